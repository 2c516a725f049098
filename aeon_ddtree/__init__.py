# SPDX-License-Identifier: Apache-2.0
"""Tree speculative decoding for vLLM, lossless on hybrid models."""
