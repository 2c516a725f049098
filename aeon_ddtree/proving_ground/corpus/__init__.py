# SPDX-License-Identifier: Apache-2.0
"""The corpus recipe of the proving pair: sources, generators, held-out split and prompts."""
