# SPDX-License-Identifier: Apache-2.0
"""The dispatcher `aeon-ddtree`: recipes, preflight, the server's start. Imports neither torch nor vLLM."""
