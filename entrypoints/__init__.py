# SPDX-License-Identifier: Apache-2.0
"""The dispatcher `aeon-ddtree`: recipes, preflight, the command that starts the server. Imports neither torch nor vLLM."""
