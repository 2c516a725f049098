# SPDX-License-Identifier: Apache-2.0
"""Training of the proving pair: architecture, tokenizer, target, drafter, evaluation (PyTorch only)."""
