# SPDX-License-Identifier: Apache-2.0
"""The proving ground: a small trained target and drafter, their training, oracles and the parity harness."""
