# SPDX-License-Identifier: Apache-2.0
"""Muon for the layers' matrices, AdamW for the rest, and a step that a CUDA graph can replay.

Muon: momentum, then the nearest orthogonal matrix by a quintic Newton-Schulz iteration (Jordan et al. 2024).
Learning rates live in tensors, so that a captured step follows the schedule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

_NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Approximately U V^T of x = U S V^T, for a batch [n, rows, cols]."""
    a, b, c = _NS
    wide = x.shape[-2] <= x.shape[-1]
    y = (x if wide else x.transpose(-1, -2)).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = y @ y.transpose(-1, -2)
        y = a * y + (b * s + c * s @ s) @ y
    return (y if wide else y.transpose(-1, -2)).to(x.dtype)


class Muon:
    """Muon over 2-D parameters, batched by shape."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            groups[tuple(p.shape)].append(p)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.lr = torch.tensor(lr, device=parameters[0].device)
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.mul_(self.momentum).add_(grad, alpha=1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum))
            rows, cols = group[0].shape
            update = update * (self.lr * math.sqrt(max(1.0, rows / cols)))
            keep = 1 - self.lr * self.decay
            for p, u in zip(group, update, strict=True):
                p.mul_(keep).sub_(u)


class MixedOptimizer:
    """Muon for matrices whose both sides are ≥ 64 (embeddings excepted), AdamW (.9, .95) for everything else."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, decay: float = 0.1) -> None:
        matrices: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        bare: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            if p.dim() == 2 and min(p.shape) >= 64 and "embed" not in name:
                matrices.append(p)
            else:
                (plain if p.dim() >= 2 else bare).append(p)
        device = next(model.parameters()).device
        self.parameters = matrices + plain + bare
        self.muon = Muon(matrices, muon_lr, decay=decay)
        cuda = device.type == "cuda"
        groups = [{"params": plain, "weight_decay": decay}, {"params": bare, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=torch.tensor(adam_lr, device=device), betas=(0.9, 0.95), fused=cuda, capturable=cuda,
        )  # fmt: skip
        self.base = (muon_lr, adam_lr)

    def set_scale(self, scale: float) -> None:
        """Multiply both base rates by `scale` for the coming steps."""
        self.muon.lr.fill_(self.base[0] * scale)
        for group in self.adam.param_groups:
            group["lr"].fill_(self.base[1] * scale)

    def step(self) -> None:
        """Clip the gradients' norm to 1, then update."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.muon.step()
        self.adam.step()

    def state(self) -> list[Tensor]:
        """Every tensor of the optimiser's state, for snapshots."""
        tensors = list(self.muon.buffers)
        for value in self.adam.state.values():
            tensors += [t for t in value.values() if torch.is_tensor(t)]
        return tensors


class ReplayedStep:
    """loss_fn -> backward -> update, captured once as a CUDA graph (called directly on the CPU).

    `loss_fn()` reads its batch from tensors that the caller refills in place.
    """

    def __init__(self, loss_fn: Callable[[], Tensor], optimizer: MixedOptimizer) -> None:
        self.loss_fn, self.optimizer = loss_fn, optimizer
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros(())
        if optimizer.parameters[0].is_cuda:
            self._capture()

    def _once(self) -> Tensor:
        for p in self.optimizer.parameters:
            p.grad = None
        loss = self.loss_fn()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _capture(self) -> None:
        self.optimizer.set_scale(0.01)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._once()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._once()

    def __call__(self) -> Tensor:
        """One step; the returned loss is overwritten by the next one."""
        if self.graph is None:
            self.loss = self._once()
        else:
            self.graph.replay()
        return self.loss


def schedule(step: int, total: int, warmup: float = 0.04) -> float:
    """Linear warm-up, then a cosine to 2 % of the base rate."""
    rise = max(1, int(total * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))
