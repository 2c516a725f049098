# SPDX-License-Identifier: Apache-2.0
"""Where the engine hands a plan to `aeon_ddtree.commit`: every layer of every KV group, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from aeon_ddtree.commit.apply import apply_conv, apply_kv, apply_recurrent
from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.engine.attention import split
from aeon_ddtree.engine.gdn import TreeGatedDeltaNet, Verified
from aeon_ddtree.engine.step import Step


def commit_step(
    step: Step,
    plan: CommitPlan,
    layers: Mapping[str, Any],
    kv_groups: Iterable[tuple[Iterable[str], Tensor]],
) -> None:
    """Commit the verified windows of a step; requests without a tree were committed by the layers themselves.

    plan       of the whole batch
    layers     layer name -> layer (vLLM's forward context)
    kv_groups  per attention KV group of the target: its layers' names, block table [R, blocks]
    """
    group = step.tree_group
    if group is None:
        return
    plan = plan.select(group.reqs)
    if step.recording is not None:
        step.recording.write(plan.path, plan.path_len())
    missing = [n for n, layer in layers.items() if isinstance(layer, TreeGatedDeltaNet) and n not in step.records]
    if missing:
        raise RuntimeError(f"{len(missing)} recurrent layers verified nothing in this step, the first: {missing[0]}")
    for name, record in step.records.items():
        verified: Verified = record
        conv_state, state = layers[name].states()
        apply_recurrent([(state, verified.factors)], verified.slots, plan, has_state=group.has_state)
        apply_conv([(conv_state, verified.inputs)], verified.slots, plan, has_state=group.has_state)
    apply_kv(
        (
            ([split(layers[name].kv_cache) for name in names], block_table[group.reqs], group.context)
            for names, block_table in kv_groups
        ),
        plan,
    )
