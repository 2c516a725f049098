# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: the only package that imports vLLM. Kept empty so that `engine.options` costs nothing to import."""
