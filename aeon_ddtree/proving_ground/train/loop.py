# SPDX-License-Identifier: Apache-2.0
"""The training loop shared by target and drafter: time-boxed, guarded against divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aeon_ddtree.proving_ground.train.optim import MixedOptimizer, ReplayedStep, schedule


@dataclass
class TrainingLog:
    """What a run did: steps taken, seconds, losses every `every` steps, restarts after a non-finite loss."""

    steps: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    restarts: int = 0


def train(
    loss_fn: Callable[[], Tensor],
    refill: Callable[[int], None],
    optimizer: MixedOptimizer,
    *,
    seconds: float,
    max_steps: int,
    label: str,
    on_checkpoint: Callable[[], None] | None = None,
    every: int = 100,
) -> TrainingLog:
    """Run until `seconds` have passed or `max_steps` are done, whichever the measured step time meets first.

    The schedule spans the number of steps that fit. Each `every` steps the loss is read: a non-finite one restores
    the last good snapshot and lowers the rates by 0.6. `on_checkpoint` is called about once a minute.
    """
    log, scale, started = TrainingLog(), 1.0, time.time()
    refill(0)
    step_once = ReplayedStep(loss_fn, optimizer)
    cuda = optimizer.parameters[0].is_cuda
    total, snapshot, last_saved = max_steps, None, time.time()
    window: list[Tensor] = []
    step, probe_from = 0, 0.0
    while step < total:
        refill(step)
        optimizer.set_scale(scale * schedule(step, total))
        window.append(step_once().clone())
        step += 1
        if step == 10:
            if cuda:
                torch.cuda.synchronize()
            probe_from = time.time()
        if step == 40 and math.isfinite(seconds):
            if cuda:
                torch.cuda.synchronize()
            pace = (time.time() - probe_from) / 30
            total = min(max_steps, max(41, int(40 + (seconds - (time.time() - started)) / pace * 0.985)))
            print(f"[{label}] {pace * 1e3:.1f} ms a step, {total} steps planned", flush=True)
        if step % every == 0 or step == total:
            mean = torch.stack(window).mean().item()
            window = []
            state = [*optimizer.parameters, *optimizer.state()]
            if math.isfinite(mean):
                log.losses.append((step, round(mean, 4)))
                snapshot = [t.detach().clone() for t in state]
                if step % (every * 5) == 0 or step == total:
                    print(f"[{label}] step {step} loss {mean:.4f} {time.time() - started:.0f} s", flush=True)
                if on_checkpoint is not None and time.time() - last_saved > 60:
                    on_checkpoint()
                    last_saved = time.time()
            else:
                log.restarts += 1
                scale *= 0.6
                print(f"[{label}] step {step}: loss is {mean}; restoring, rates x {scale:.2f}", flush=True)
                if snapshot is None or log.restarts > 4:
                    raise FloatingPointError(f"{label}: the loss stays non-finite; lower the learning rates")
                with torch.no_grad():
                    for t, s in zip(state, snapshot, strict=True):
                        t.copy_(s)
    if cuda:
        torch.cuda.synchronize()
    log.steps, log.seconds = step, round(time.time() - started, 1)
    return log
