# SPDX-License-Identifier: Apache-2.0
"""Train the pair: `python -m aeon_ddtree.proving_ground.train.run --corpus DIR --out DIR --target-seconds 330 …`.

Phases: target on the corpus; drafter A on corpus text; drafter B on text that the target wrote (half greedy, half
T = 1). Each phase is time-boxed and saved before the next begins. `--target DIR` skips the first phase,
`--drafter DIR` starts from given drafter weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aeon_ddtree.proving_ground.train import checkpoint
from aeon_ddtree.proving_ground.train.decoding import features_of, generate
from aeon_ddtree.proving_ground.train.drafter import Drafter, drafter_loss
from aeon_ddtree.proving_ground.train.loop import train
from aeon_ddtree.proving_ground.train.optim import MixedOptimizer
from aeon_ddtree.proving_ground.train.target import Target

TARGET_WEIGHTS = {"coding": 0.36, "prose": 0.28, "math": 0.09, "reasoning": 0.09, "language": 0.09, "json": 0.09}
DRAFT_WEIGHTS = {"coding": 0.28, "prose": 0.34, "math": 0.095, "reasoning": 0.095, "language": 0.095, "json": 0.095}
PROMPT = 32


class Corpus:
    """All training tokens on one device, and random windows by category weights."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        arrays, self.start, self.size, offset = [], {}, {}, 0
        for category in TARGET_WEIGHTS:
            tokens = np.load(folder / f"{category}.npz")["train"]
            self.start[category], self.size[category] = offset, len(tokens)
            arrays.append(tokens.astype(np.int16))
            offset += len(tokens)
        self.tokens = torch.from_numpy(np.concatenate(arrays)).to(device)
        self.rng = np.random.default_rng(seed)

    def windows(self, count: int, length: int, weights: dict[str, float]) -> Tensor:
        """[count, length] int64 token windows, drawn by category."""
        names = list(weights)
        picks = self.rng.choice(len(names), size=count, p=np.array([weights[n] for n in names]))
        low = np.array([self.start[n] for n in names])[picks]
        high = np.array([self.size[n] for n in names])[picks] - length
        starts = torch.from_numpy(low + (self.rng.random(count) * high).astype(np.int64)).to(self.tokens.device)
        at = starts[:, None] + torch.arange(length, device=self.tokens.device)
        return self.tokens[at].long()


def compile_or_not(modules: list[nn.Module], loss: Callable[[], Tensor], label: str) -> None:
    """Compile `modules`; where the compiler fails, say so and go on without it (it only saves time)."""
    started = time.time()
    for module in modules:
        module.compile(dynamic=False)
    try:
        loss().backward()
    except Exception as error:  # any compiler failure: the plain form computes the same
        print(f"[{label}] not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
        for module in modules:
            module._compiled_call_impl = None
        loss().backward()
    print(f"[{label}] first step in {time.time() - started:.0f} s", flush=True)


def train_target(
    corpus: Corpus, options: argparse.Namespace, device: torch.device, save: Any
) -> tuple[Target, dict[str, Any]]:
    """Phase 1."""
    target = Target(options.compute).to(device)
    rows = torch.zeros(options.batch, options.length + 1, dtype=torch.long, device=device)
    pool: list[Tensor] = []

    def refill(step: int) -> None:
        if step % 100 == 0:
            pool[:] = [corpus.windows(options.batch * 100, options.length + 1, TARGET_WEIGHTS)]
        at = step % 100 * options.batch
        rows.copy_(pool[0][at : at + options.batch])

    def loss() -> Tensor:
        hidden, _ = target(rows[:, :-1])
        return F.cross_entropy(target.logits(hidden).flatten(0, 1), rows[:, 1:].flatten())

    if options.compile:
        refill(0)
        compile_or_not(list(target.layers), loss, "target")
    optimizer = MixedOptimizer(target, options.muon_lr, options.adam_lr)
    log = train(
        loss, refill, optimizer, seconds=options.target_seconds, max_steps=options.max_steps, label="target",
        on_checkpoint=lambda: save(target, None),
    )  # fmt: skip
    for layer in target.layers:
        # Later phases use other shapes; compiling for them again would cost more than it saves.
        layer._compiled_call_impl = None
    return target, asdict(log)


@torch.no_grad()
def own_text(target: Target, corpus: Corpus, count: int, length: int, batch: int) -> Tensor:
    """[count, length] tokens: 32-token prompts of the corpus continued by the target, in turn greedy and at T = 1."""
    parts = []
    for start in range(0, count, batch):
        rows = min(batch, count - start)
        prompts = corpus.windows(rows, PROMPT, DRAFT_WEIGHTS)
        sampled = torch.arange(rows, device=prompts.device) % 2 == 1
        lengths = torch.full((rows,), PROMPT, device=prompts.device)
        parts.append(generate(target, prompts, lengths, length - PROMPT, sampled))
    return torch.cat(parts)


def train_drafter(
    drafter: Drafter, target: Target, tokens: Tensor, seconds: float, rate: float, label: str,
    options: argparse.Namespace, on_checkpoint: Any,
) -> dict[str, Any]:  # fmt: skip
    """One drafter phase over fixed rows `tokens` [N, L]; features are made once."""
    started = time.time()
    features = features_of(target, tokens)
    print(f"[{label}] features of {tokens.numel()} tokens in {time.time() - started:.0f} s", flush=True)
    count, length = tokens.shape
    batch = min(options.draft_batch, count)
    rows = torch.zeros(batch, length, dtype=torch.long, device=tokens.device)
    feats = torch.zeros(batch, length, features.shape[-1], dtype=features.dtype, device=tokens.device)
    anchors = torch.zeros(batch, options.anchors, dtype=torch.long, device=tokens.device)
    embedding = target.embed_tokens.weight.detach()

    def refill(step: int) -> None:
        pick = torch.randint(count, (batch,), device=tokens.device)
        rows.copy_(tokens[pick])
        feats.copy_(features[pick])
        anchors.copy_(torch.randint(1, length - 1, anchors.shape, device=tokens.device))

    def loss() -> Tensor:
        return drafter_loss(drafter, rows, feats, anchors, embedding)

    if options.compile:
        refill(0)
        compile_or_not([drafter], loss, label)
    optimizer = MixedOptimizer(drafter, options.draft_muon_lr * rate, options.draft_adam_lr * rate)
    log = train(
        loss, refill, optimizer,
        seconds=seconds - (time.time() - started), max_steps=options.max_steps, label=label,
        on_checkpoint=on_checkpoint,
    )  # fmt: skip
    return {**asdict(log), "rows": count, "row_length": length}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="start from this trained target")
    parser.add_argument("--drafter", type=Path, help="start from this drafter")
    parser.add_argument("--target-seconds", type=float, default=330)
    parser.add_argument("--phase-a-seconds", type=float, default=20)
    parser.add_argument("--phase-b-seconds", type=float, default=110)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--rows-a", type=int, default=8192)
    parser.add_argument("--rows-b", type=int, default=32768)
    parser.add_argument("--generate-batch", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--draft-batch", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=288)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--draft-muon-lr", type=float, default=0.02)
    parser.add_argument("--draft-adam-lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    started = time.time()
    corpus = Corpus(options.corpus, device, options.seed)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "seed": options.seed, "options": {k: str(v) for k, v in vars(options).items()},
        "target_weights": TARGET_WEIGHTS, "draft_weights": DRAFT_WEIGHTS,
    }  # fmt: skip

    def save(target: Target | None, drafter: Drafter | None) -> None:
        if target is not None:
            checkpoint.save_target(target, options.out / "target", vision_seed=None)
        if drafter is not None:
            checkpoint.save_drafter(drafter, options.out / "drafter")
        report["seconds"] = round(time.time() - started, 1)
        (options.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")

    options.out.mkdir(parents=True, exist_ok=True)
    if options.target is None:
        target, report["target"] = train_target(corpus, options, device, save)
    else:
        target = checkpoint.load_target(options.target, options.compute).to(device)
    checkpoint.round_to_bf16(target)
    save(target if options.target is None else None, None)
    target.requires_grad_(False)
    drafter = checkpoint.load_drafter(options.drafter, options.compute) if options.drafter else Drafter(options.compute)
    drafter.to(device)
    if options.phase_a_seconds > 0:
        rows = corpus.windows(options.rows_a, options.draft_length, DRAFT_WEIGHTS)
        report["drafter_a"] = train_drafter(
            drafter, target, rows, options.phase_a_seconds, 1.0, "drafter A", options, None
        )
        save(None, drafter)
    begun = time.time()
    text = own_text(target, corpus, options.rows_b, options.draft_length, options.generate_batch)
    report["generation_seconds"] = round(time.time() - begun, 1)
    print(f"[text] {text.numel()} tokens in {report['generation_seconds']} s", flush=True)
    rate = 0.75 if options.drafter is None else 0.5
    report["drafter_b"] = train_drafter(
        drafter, target, text, options.phase_b_seconds, rate, "drafter B", options, lambda: save(None, drafter)
    )
    save(None, drafter)
    print(json.dumps({k: v for k, v in report.items() if k != "options"})[:1500], flush=True)


if __name__ == "__main__":
    main()
