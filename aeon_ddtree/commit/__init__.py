# SPDX-License-Identifier: Apache-2.0
"""The commit: what of a verified window becomes committed state, and the only place that changes it."""

from aeon_ddtree.commit.apply import apply_conv, apply_history, apply_kv, apply_recurrent, gather_rows
from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.commit.policies import POLICIES, branch_plan, flat_plan, plan_for

__all__ = [
    "POLICIES",
    "CommitPlan",
    "apply_conv",
    "apply_history",
    "apply_kv",
    "apply_recurrent",
    "branch_plan",
    "flat_plan",
    "gather_rows",
    "plan_for",
]
