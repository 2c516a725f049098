# SPDX-License-Identifier: Apache-2.0
"""Faults that others have shipped, planted alone in the engine's process; `Probe.remove` takes them out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from step_probes import Probe
from torch import Tensor


def sibling_visible(probe: Probe) -> None:
    """Attention: a node also sees its siblings. Recurrence and convolution keep to the ancestors."""
    from aeon_ddtree.engine import attention

    def seen(given: dict[str, Any]) -> None:
        group = probe.runner._step.tree_group
        if group is not None and given["visible"] is group.visible:
            sibling = (group.parent[:, :, None] == group.parent[:, None, :]) & (group.parent >= 0)[:, :, None]
            given["visible"] = group.visible | sibling

    _arguments(probe, attention, "tree_attention", seen)


def neighbours_state(probe: Probe) -> None:
    """Recurrence: a node continues from the row before it, whoever its parent is."""
    _parents_in_row_order(probe, "gated_delta_tree")


def flat_convolution(probe: Probe) -> None:
    """Convolution: windows run over the rows as they stand, not along the ancestors."""
    _parents_in_row_order(probe, "causal_conv_tree")


def position_by_row(probe: Probe) -> None:
    """A node's position is the root's + its row, as vLLM counted them, not + its depth."""
    runner = probe.runner

    def make(original: Any) -> Any:
        def wrapped(step: Any, tree: Any) -> None:
            buffers = [runner.positions] + ([runner.mrope_positions.gpu] if runner.uses_mrope else [])
            kept = [buffer.clone() for buffer in buffers]
            original(step, tree)
            for buffer, old in zip(buffers, kept):
                buffer.copy_(old)

        return wrapped

    probe.replace(runner, "_write_window", make)


def layer_not_folded(probe: Probe) -> None:
    """Commit: one recurrent layer keeps its old state."""
    from aeon_ddtree.engine import commit

    victim: list[int] = []

    def make(original: Any) -> Any:
        def wrapped(layers: Any, *args: Any, **kwargs: Any) -> None:
            layers = list(layers)
            victim.extend([] if victim else [layers[0][0].data_ptr()])
            original([pair for pair in layers if pair[0].data_ptr() != victim[0]], *args, **kwargs)

        return wrapped

    probe.replace(commit, "apply_recurrent", make)


def root_not_folded(probe: Probe) -> None:
    """Commit: the state continues from the committed one with the accepted nodes alone."""
    from aeon_ddtree.engine import commit

    def without_root(given: dict[str, Any]) -> None:
        plan = given["plan"]
        path = torch.cat([plan.path[:, 1:], torch.full_like(plan.path[:, :1], -1)], dim=1)
        given["plan"] = replace(plan, path=path, num_accepted=plan.num_accepted - 1)

    _arguments(probe, commit, "apply_recurrent", without_root)


def window_of_prefix(probe: Probe) -> None:
    """Commit: the convolution's window moves along the first rows instead of the path."""
    from aeon_ddtree.engine import commit

    _arguments(probe, commit, "apply_conv", _prefix)


def kv_not_moved(probe: Probe) -> None:
    """Commit: keys and values stay in the slots of their rows."""
    from aeon_ddtree.engine import commit

    _arguments(probe, commit, "apply_kv", _prefix)


def one_kv_layer_not_moved(probe: Probe) -> None:
    """Commit: keys and values of one layer of the group are forgotten."""
    from aeon_ddtree.engine import commit

    def forget(given: dict[str, Any]) -> None:
        given["groups"] = [(layers[:-1], *rest) for layers, *rest in given["groups"]]

    _arguments(probe, commit, "apply_kv", forget)


def bonus_as_accepted(probe: Probe) -> None:
    """Drafter context: one row too many, as if the bonus had been a verified node."""

    def longer(path: Tensor) -> Tensor:
        length = (path >= 0).sum(dim=1, keepdim=True)
        path = torch.cat([path, torch.full_like(length, -1)], dim=1)
        last = path.gather(1, length - 1)
        return path.scatter(1, length, last)

    _drafter_path(probe, longer)


def hidden_states_by_prefix(probe: Probe) -> None:
    """Drafter context: as many rows as were committed, but the window's first ones instead of the path's."""
    _drafter_path(probe, lambda path: torch.where(path >= 0, torch.arange(path.shape[1]), -1))


def padding_acceptable(probe: Probe) -> None:
    """Walk: rows after the last node hang below the root with their token 0."""
    from aeon_ddtree.engine import runner

    def make(original: Any) -> Any:
        def wrapped(tree: Any, sampled: Tensor, max_len: int) -> Any:
            rows = torch.arange(tree.width)
            padding = (rows > tree.num_nodes[:, None]) & (tree.num_nodes > 0)[:, None]
            full = replace(
                tree,
                parent=torch.where(padding, 0, tree.parent),
                num_nodes=torch.where(tree.num_nodes > 0, tree.width - 1, 0),
            )
            return original(full, sampled, max_len)

        return wrapped

    probe.replace(runner, "walk", make)


def trees_swapped(probe: Probe) -> None:
    """Two requests verify each other's whole trees: by batch order instead of by request."""

    def make(original: Any) -> Any:
        return lambda req_ids: original(list(reversed(req_ids)))

    probe.replace(probe.runner.trees, "pop", make)


def shapes_swapped(probe: Probe) -> None:
    """Two requests keep their tokens but get each other's parents, depths and masks."""
    _tree_group(probe, lambda g: {name: getattr(g, name).flip(0) for name in ("parent", "depth", "visible")})


def _tree_group(probe: Probe, changes: Callable[[Any], dict[str, Tensor]]) -> None:
    from aeon_ddtree.engine import runner

    def make(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            step = original(*args, **kwargs)
            if step.tree_reqs:
                step.groups[0] = replace(step.groups[0], **changes(step.groups[0]))
            return step

        return wrapped

    probe.replace(runner, "make_step", make)


def _parents_in_row_order(probe: Probe, kernel: str) -> None:
    from aeon_ddtree.engine import gdn

    def flatten(given: dict[str, Any]) -> None:
        parent = given["parent"]
        given["parent"] = torch.where(parent >= 0, torch.arange(parent.shape[1]) - 1, parent)
        if "ancestors" in given:
            given["ancestors"] = None

    _arguments(probe, gdn, kernel, flatten)


def _arguments(probe: Probe, module: Any, function: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what `module` hands to one of its functions, by parameter name."""

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            change(bound.arguments)
            return original(*bound.args, **bound.kwargs)

        return wrapped

    probe.replace(module, function, make)


def _prefix(given: dict[str, Any]) -> None:
    plan = given["plan"]
    given["plan"] = replace(plan, path=torch.where(plan.path >= 0, torch.arange(plan.path.shape[1]), -1))


def _drafter_path(probe: Probe, change: Callable[[Tensor], Tensor]) -> None:
    from aeon_ddtree.engine.step import Step

    def make(original: Any) -> Any:
        return lambda step, path: original(step, change(path))

    probe.replace(Step, "drafter_context", make)


PLANTS: dict[str, Callable[[Probe], None]] = {
    plant.__name__: plant
    for plant in (
        sibling_visible,
        neighbours_state,
        flat_convolution,
        position_by_row,
        layer_not_folded,
        root_not_folded,
        window_of_prefix,
        kv_not_moved,
        one_kv_layer_not_moved,
        bonus_as_accepted,
        hidden_states_by_prefix,
        padding_acceptable,
        trees_swapped,
        shapes_swapped,
    )
}
