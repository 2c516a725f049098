# SPDX-License-Identifier: Apache-2.0
"""Tensor kernels of the tree step. They know nothing but tensors: no model, no engine, no request objects.

Each `NAME/__init__.py` holds the public function (argument checks, dispatch); `NAME/reference.py` is plain PyTorch and
is its own fp64 truth when the inputs are fp64.
"""
