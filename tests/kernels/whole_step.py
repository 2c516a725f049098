# SPDX-License-Identifier: Apache-2.0
"""Every kernel once, on inputs that exercise all its options: used to compare devices and code paths."""

from __future__ import annotations

import torch
from gated_delta_truth import inputs
from kernel_cases import forest, num_rows, pack_paths, path_to
from torch import Tensor

from aeon_ddtree.kernels.ancestors import ancestor_mask, depth_of
from aeon_ddtree.kernels.build_tree import build_root_leaves, build_tree, rank_candidates
from aeon_ddtree.kernels.causal_conv_tree import causal_conv_chain, causal_conv_tree, conv_commit
from aeon_ddtree.kernels.compact_kv import compact_kv
from aeon_ddtree.kernels.gated_delta_tree import fold_state, gated_delta_chain, gated_delta_tree
from aeon_ddtree.kernels.keyed_sampling import keyed_gumbel, keyed_sample
from aeon_ddtree.kernels.tree_attention import tree_attention, write_kv
from aeon_ddtree.kernels.walk_tree import walk_tree

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
SLOTS = torch.tensor([7, 3, 0, 10, -1, 2])


def prepare(seed: int) -> dict[str, Tensor]:
    """All inputs on the CPU, fp32; caches and states are written by `run`."""
    gen = torch.Generator().manual_seed(seed)
    width = 17
    parent = forest(width, seed=seed)
    ends = [[path_to(p, int(torch.randint(0, num_rows(p), (1,), generator=gen))) for p in parent], [[0]] * 6, [[]] * 6]
    chosen = ends[seed % 3]
    chosen[4] = []
    path, path_len = pack_paths(chosen, width)
    return {
        **inputs(6, width, 2, 4, seed=seed, dtype=torch.float32),
        "slots": SLOTS,
        "has_state": torch.tensor([True, False, True, True, True, True]),
        "parent": parent,
        "path": path,
        "path_len": path_len,
        "length": torch.tensor([17, 1, 9, 0, 4, 16]),
        "x": torch.randn(6, width, 5, generator=gen),
        "windows": torch.randn(11, 3, 5, generator=gen),
        "weight": torch.randn(5, 4, generator=gen),
        "k_cache": torch.randn(70, 4, 2, 8, generator=gen),
        "v_cache": torch.randn(70, 4, 2, 8, generator=gen),
        "table": torch.randperm(70, generator=gen)[:66].reshape(6, 11),
        "context": torch.tensor([0, 13, 1, 26, 7, 22]),
        "rows": torch.tensor([num_rows(p) for p in parent]),
        "new_slots": torch.tensor([5, -1, 90, 33, -1, 200]) if seed % 2 else torch.full((6,), -1),
        "query": torch.randn(6, width, 4, 8, generator=gen),
        "logits": torch.randn(6, 5, 300, generator=gen) * 2,
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 1.0]) if seed % 2 else torch.zeros(6),
        "seed": torch.tensor([1, -5, 2**40, 4, 9, 9]),
        "index": torch.tensor([0, 9, 2**33, 2, 4, 4]),
        "top_k": torch.tensor([0, 20, 5, 300, 1, -1]),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1.0, 0.1, 0.95]),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.02, 0.0, 0.0]),
        "root": torch.arange(6),
        "carried": torch.randint(0, 300, (6, 4), generator=gen),
        "num_carried": torch.tensor([0, 1, 2, 0, 4, 0]),
        "max_nodes": torch.tensor([16, 3, 16, 0, 9, 16]),
        "chain_only": torch.tensor([False, False, True, False, False, False]),
    }


def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """All outputs and everything written, by name."""
    out: dict[str, Tensor] = {"mask": ancestor_mask(t["parent"]), "depth": depth_of(t["parent"])}
    gated = [t[name] for name in NAMES[:-1]]
    out["state"], out["chain_state"] = t["state"].clone(), t["state"].clone()
    out["gdn"], factors = gated_delta_tree(
        *gated, out["state"], t["slots"], t["parent"], has_state=t["has_state"], ancestors=out["mask"]
    )
    fold_state(out["state"], t["slots"], factors, t["path"], t["path_len"], has_state=t["has_state"])
    out["gdn_chain"] = gated_delta_chain(
        *gated, out["chain_state"], t["slots"], t["length"], has_state=t["has_state"], chunk=8
    )
    out["windows"], out["chain_windows"] = t["windows"].clone(), t["windows"].clone()
    conv = (t["weight"], None, t["slots"])
    out["conv"] = causal_conv_tree(t["x"], out["windows"], *conv, t["parent"], has_state=t["has_state"])
    conv_commit(out["windows"], t["slots"], t["x"], t["path"], t["path_len"], has_state=t["has_state"])
    out["conv_chain"] = causal_conv_chain(t["x"], out["chain_windows"], *conv, t["length"], has_state=t["has_state"])

    out["k_cache"], out["v_cache"] = t["k_cache"].clone(), t["v_cache"].clone()
    write_kv(t["query"][:, 0, :2], t["query"][:, 1, 2:], out["k_cache"], out["v_cache"], t["new_slots"])
    paged = (out["k_cache"], out["v_cache"], t["table"], t["context"], out["mask"], t["rows"])
    out["attention"] = tree_attention(t["query"], *paged, scale=0.3)
    out["window"] = tree_attention(t["query"], *paged, scale=0.3, window=6, depth=out["depth"])
    own = (t["query"][:, :, :2], t["query"][:, :, 2:])
    out["own_kv"] = tree_attention(t["query"], *paged, scale=0.3, own_kv=own)
    compact_kv([(out["k_cache"], out["v_cache"])], t["table"], t["context"], t["path"], t["path_len"])

    keys = (t["temperature"], t["seed"], t["index"])
    out["gumbel"] = keyed_gumbel(t["seed"], t["index"], 1001)
    for name, ranking in (("greedy", "greedy"), ("coupled", "coupled"), ("mixed", "mixed")):
        out[name], out[name + "_logp"] = rank_candidates(t["logits"], *keys, 6, ranking=ranking, tau=0.7)
    extra = {name: t[name] for name in ("carried", "num_carried", "max_nodes", "chain_only")}
    for name, options in (("full", {}), ("bound", extra)):
        for spine in (0, 5):
            tree = build_tree(out["mixed"], out["mixed_logp"], t["root"], 16, spine=spine, **options)
            out.update({f"tree_{name}_{spine}_{part}": value for part, value in enumerate(tree)})
        leaves = build_root_leaves(out["mixed"], out["mixed_logp"], t["root"], 16, 4, **options)
        out.update({f"leaves_{name}_{part}": value for part, value in enumerate(leaves)})
    filters = (t["top_k"], t["top_p"], t["min_p"])
    for name, which in (("all", filters), ("top_p", (None, t["top_p"], None)), ("none", (None, None, None))):
        out["sample_" + name], out["gap_" + name] = keyed_sample(
            t["logits"][:, 0], t["temperature"], *which, t["seed"], t["index"], return_scores=True
        )
    token = torch.remainder(torch.arange(102, device=t["root"].device).reshape(6, 17), 3)
    walk = walk_tree(token, t["parent"], t["rows"] - 1, token.roll(1, 1), max_len=9)
    out.update({f"walk_{part}": value for part, value in enumerate(walk)})
    return out


def assert_alike(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Integers and masks equal, floats within `tolerance`; names the output that differs."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        other = got[name].cpu()
        if value.is_floating_point():
            torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(other, value), name
