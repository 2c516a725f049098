# SPDX-License-Identifier: Apache-2.0
"""Put a trained pair into the package.

`python -m aeon_ddtree.proving_ground.train.package --target DIR --drafter DIR --corpus DIR`

Adds the (initialised, untrained) vision tower, tokenizer, chat template and processor files, and refuses a pair above
the size limit. Written into the package itself, the held-out prompts and the corpus recipe go along.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from aeon_ddtree.proving_ground.train import checkpoint
from aeon_ddtree.proving_ground.train.tokenizer import save_tokenizer_files

HERE = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 24 * 2**20


def package(target: Path, drafter: Path, corpus: Path, weights: Path, vision_seed: int) -> int:
    """Write `weights/target` and `weights/drafter`; returns their size in bytes."""
    checkpoint.save_target(checkpoint.load_target(target), weights / "target", vision_seed=vision_seed)
    checkpoint.save_drafter(checkpoint.load_drafter(drafter), weights / "drafter")
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    save_tokenizer_files(tokenizer, weights / "target", with_processor=True)
    save_tokenizer_files(tokenizer, weights / "drafter", with_processor=False)
    size = sum(f.stat().st_size for f in weights.rglob("*") if f.is_file())
    if size > LIMIT_BYTES:
        raise ValueError(
            f"the pair takes {size} bytes, the limit is {LIMIT_BYTES}: shrink the drafter or the vision tower"
        )
    return size


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "corpus"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=HERE / "weights")
    parser.add_argument("--vision-seed", type=int, default=20261129)
    options = parser.parse_args()
    size = package(options.target, options.drafter, options.corpus, options.weights, options.vision_seed)
    if options.weights == HERE / "weights":
        shutil.copy(options.corpus / "prompts.jsonl", HERE / "prompts.jsonl")
        shutil.copy(options.corpus / "recipe.json", HERE / "corpus" / "recipe.json")
    print(f"{options.weights}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
