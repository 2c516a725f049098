# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

# The brute-force oracles stand with the tree's tests and serve all layers.
sys.path.insert(0, str(Path(__file__).parents[1] / "tree"))
