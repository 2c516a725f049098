# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel runs where, and that nothing else runs instead; write_kv cell by cell."""

import itertools
import sys

import pytest
import torch
from kernel_cases import forest, poison_int

from aeon_ddtree.kernels.ancestors import ancestor_mask
from aeon_ddtree.kernels.tree_attention import reference, tree_attention, triton, write_kv

Config = triton.Config

# What `choose` says of an H200 with 4 KV heads of 256 in groups of 6: packed rows, requests, positions a table holds ->
# rows of a tile, overlap of the second launch. The numbers that it follows are in `_choose_hopper`.
CHOICES = [
    (48, 1, 2592, 64, True), (48, 1, 8640, 64, False), (48, 16, 131328, 64, True),
    (96, 1, 864, 64, True), (96, 1, 8640, 64, True), (96, 1, 131328, 128, False), (96, 16, 864, 64, True),
    (96, 16, 2592, 64, True), (96, 16, 8640, 128, True), (96, 16, 131328, 128, True), (192, 1, 131328, 64, True),
    (192, 16, 864, 128, True), (384, 1, 864, 128, True), (384, 1, 2592, 128, False), (384, 16, 8640, 128, True),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "requests", "capacity", "block_m", "pdl"), CHOICES)
def test_hopper_choices_follow_the_measurements(rows, requests, capacity, block_m, pdl):
    got = triton.choose(rows, torch.bfloat16, 90, True, 4, requests, capacity, 132)
    assert got == Config(block_m, 64, hopper=True, pdl=pdl)


def test_hopper_kernel_is_chosen_on_sm_90_alone():
    """Whatever the sizes: all other devices, and what descriptors cannot address, take the Triton kernel."""
    for rows, requests, capacity, kv_heads in itertools.product((1, 64, 65, 193, 1536), (1, 99), (1, 10**6), (1, 999)):
        sizes = (kv_heads, requests, capacity, 132)
        assert triton.choose(rows, torch.bfloat16, 90, True, *sizes).hopper
        for capability, described in ((90, False), (80, True), (89, True), (100, True), (120, True), (121, True)):
            assert not triton.choose(rows, torch.bfloat16, capability, described, *sizes).hopper
        assert not triton.choose(rows, torch.float32, 90, True, *sizes).hopper


def test_a_triton_without_gluon_is_an_error_not_another_kernel(device, monkeypatch):
    """Where Hopper's kernel is chosen and cannot be imported, one line says what cures it; nothing runs instead."""
    # Before Gluon goes: Triton itself looks for it at a process's first launch.
    visible = reference.pack(ancestor_mask(forest(9, shapes=("random",)).to(device)))
    monkeypatch.setattr(triton, "choose", lambda *arguments: Config(64, 64, hopper=True))
    monkeypatch.setattr(triton, "attend_kernel", None)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    for name in ("hopper", "hopper_multiply"):
        monkeypatch.delitem(sys.modules, f"aeon_ddtree.kernels.tree_attention.{name}", raising=False)
        monkeypatch.delattr(f"aeon_ddtree.kernels.tree_attention.{name}", raising=False)
    triton._hopper.cache_clear()
    q, cache = torch.zeros(1, 9, 6, 64).bfloat16().to(device), torch.zeros(2, 64, 1, 64).bfloat16().to(device)
    table, context, rows = (torch.tensor(x, device=device) for x in ([[0, 1]], [40], [9]))
    with pytest.raises(RuntimeError, match=r"cannot import the Hopper attention .*DDTREE_KERNELS=reference"):
        tree_attention(q, cache, cache, table, context, visible, rows, scale=0.1)
    triton._hopper.cache_clear()


def test_hopper_kernel_is_for_caches_that_descriptors_address():
    """16 bits, whole context, heads and blocks that fill a tile, dense 16-byte aligned rows; else the other kernel."""
    q, cache = torch.zeros(1, 4, 6, 256).bfloat16(), torch.zeros(3, 2, 864, 2, 256).bfloat16()
    k, v = cache[:, 0], cache[:, 1]
    assert triton._described(q, k, v, None, None)
    assert triton._described(q.half(), k.half(), v.half(), None, None)
    refused = [
        (q.float(), k.float(), v.float(), None, None), (q, k, v, (k, v), None), (q, k, v, None, 100),
        (q[..., :80], k[..., :80], v, None, None), (q, k[:, :48], v[:, :48], None, None),
        (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, None, None),
        (q, cache.flatten()[4 : 4 + 864 * 512].view(1, 864, 2, 256), v[:1], None, None),
    ]  # fmt: skip
    assert not any(triton._described(*arguments) for arguments in refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_touches_its_cells_only(device, dtype):
    """Negative slots and slots beyond the cache are skipped; every other cell keeps its bytes; caches are strided."""
    # Values that bf16 holds exactly: Triton's interpreter truncates where hardware rounds.
    k, v = torch.randn(6, 2, 3).bfloat16().float(), torch.randn(6, 2, 4).bfloat16().float()
    slots = torch.tensor([9, -1, 0, 14, -7, 16])
    store = poison_int((4, 2, 4, 7), dtype).to(device)
    k_cache, v_cache = store[..., :3].transpose(1, 2), store[..., 3:].transpose(1, 2)
    before = store.clone().cpu()
    write_kv(k.to(device), v.to(device), k_cache, v_cache, slots.to(device))
    wanted = before.clone()
    for token, slot in ((0, 9), (2, 0), (3, 14)):
        wanted[slot // 4, :, slot % 4] = torch.cat((k[token], v[token]), -1).to(dtype)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(store.cpu().view(word), wanted.view(word))
    write_kv(k[:0].to(device), v[:0].to(device), k_cache, v_cache, slots[:0].to(device))
