# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch attention of a tree over paged KV, batched; on the CPU the gathered width follows the real lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels import checks

# Largest score matrix formed at once; longer prompts are done by groups of rows.
_MAX_SCORES = 1 << 23
# On the CPU, requests are batched unless padding them to one size would make this many times the work.
_MAX_PADDING = 2


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: Tensor, visible: Tensor,
    num_rows: Tensor, scale: float, window: int | None, depth: Tensor | None,
    own_kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """See `tree_attention`."""
    requests, width, heads, _ = q.shape
    out = q.new_zeros(requests, width, heads, v_cache.shape[-1])
    if requests == 0 or width == 0:
        return out
    capacity = block_table.shape[1] * k_cache.shape[1]
    context_len, num_rows = context_len.long(), num_rows.long().clamp(0, width)

    def run(which: slice, rows: int, keys: int) -> None:
        out[which, :rows] = _attend(
            q[which, :rows], k_cache, v_cache, block_table[which], context_len[which],
            visible[which, :rows, :rows], num_rows[which], min(keys, capacity), scale, window,
            None if depth is None else depth[which, :rows],
            None if own_kv is None else (own_kv[0][which, :rows], own_kv[1][which, :rows]),
        )  # fmt: skip

    if not checks.reads_are_free(q):
        run(slice(None), width, capacity)
        return out
    # Reading lengths costs nothing on the CPU.
    rows = num_rows.tolist()
    own_rows = [0] * requests if own_kv is not None else rows
    keys = [c + n for c, n in zip(context_len.tolist(), own_rows, strict=True)]
    padded = requests * max(rows) * max(keys)
    if padded <= _MAX_PADDING * sum(n * m for n, m in zip(rows, keys, strict=True)):
        run(slice(None), max(rows), max(keys))
    else:
        for r in range(requests):
            if rows[r]:
                run(slice(r, r + 1), rows[r], keys[r])
    return out


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: Tensor, visible: Tensor,
    num_rows: Tensor, keys: int, scale: float, window: int | None, depth: Tensor | None,
    own_kv: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Attention over the first `keys` positions of each request; context_len + num_rows may be less.

    With `own_kv` these positions are the committed ones and the rows' own keys follow them.
    """
    requests, width, heads, _ = q.shape
    block, kv_heads = k_cache.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    device = q.device
    mask = _mask(context_len, visible, num_rows, keys, window, depth, own_kv is not None)

    # Entries past the end may be garbage: clamped to be readable; what is read there is masked below.
    table = block_table[:, : -(-keys // block)].long().clamp(0, k_cache.shape[0] - 1)
    used = mask.any(1)[:, :, None, None]

    def gathered(cache: Tensor, own: Tensor | None) -> Tensor:
        """[R, Hkv, keys, D]; places that no row sees are cleared, since NaN times a zero weight is still NaN."""
        picked = cache[table].flatten(1, 2)[:, :keys].to(dtype)
        if own is not None:
            picked = torch.cat((picked, own.to(dtype)), dim=1)
        return picked.masked_fill(~used, 0).transpose(1, 2)

    k = gathered(k_cache, None if own_kv is None else own_kv[0])
    v = gathered(v_cache, None if own_kv is None else own_kv[1])
    keys = k.shape[2]
    # Query heads that share a key head are rows of one product.
    group = heads // kv_heads
    q = (q.to(dtype) * scale).reshape(requests, width, kv_heads, group, -1).permute(0, 2, 1, 3, 4)
    out = torch.empty(requests, width, kv_heads, group, v.shape[-1], dtype=dtype, device=device)
    step = max(1, _MAX_SCORES // max(1, requests * heads * keys))
    for start in range(0, width, step):
        part = q[:, :, start : start + step]
        rows = part.shape[2]
        scores = (part.reshape(requests, kv_heads, rows * group, -1) @ k.transpose(-1, -2)).reshape(
            requests, kv_heads, rows, group, keys
        )
        seen = mask[:, None, start : start + step, None]
        weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1).reshape(requests, kv_heads, rows * group, keys)
        mixed = (weights @ v).reshape(requests, kv_heads, rows, group, -1)
        out[:, start : start + rows] = mixed.permute(0, 2, 1, 3, 4)
    in_use = torch.arange(width, device=device) < num_rows[:, None]
    return out.flatten(2, 3).masked_fill(~in_use[..., None, None], 0)


def _mask(
    context_len: Tensor, visible: Tensor, num_rows: Tensor, keys: int, window: int | None, depth: Tensor | None,
    own: bool,
) -> Tensor:  # fmt: skip
    """bool [R, W, keys]: request, row -> visible position of the cache; with `own`, [R, W, keys + W] and the rows' own
    keys stand behind the `keys` committed positions instead of among them."""
    requests, width = visible.shape[:2]
    place = torch.arange(keys + width if own else keys, device=visible.device).expand(requests, -1)
    position = torch.where(place >= keys, context_len[:, None] + place - keys, place)
    committed = (position < context_len[:, None]) & (place < keys)
    row = position - context_len[:, None]
    is_row = (row >= 0) & (row < num_rows[:, None]) & ((place >= keys) == own)
    row = row.clamp(0, width - 1)
    mask = visible.gather(2, row[:, None].expand(-1, width, -1)) & is_row[:, None]
    mask |= committed[:, None]
    if window is not None and depth is not None:
        depth = depth.long()
        key_position = torch.where(is_row, context_len[:, None] + depth.gather(1, row), position)
        query_position = context_len[:, None] + depth
        mask &= query_position[:, :, None] - key_position[:, None] < window
    in_use = torch.arange(width, device=visible.device) < num_rows[:, None]
    return mask & in_use[..., None]


def pack(visible: Tensor) -> Tensor:
    """See `pack_visible`."""
    width = visible.shape[2]
    words = -(-width // 32)
    padded = torch.nn.functional.pad(visible, (0, words * 32 - width)).unflatten(2, (words, 32))
    bit = torch.arange(32, device=visible.device)
    word = (padded.long() << bit).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def unpack(bits: Tensor) -> Tensor:
    """See `unpack_visible`."""
    bit = torch.arange(32, device=bits.device, dtype=bits.dtype)
    return ((bits[..., None] >> bit) & 1).bool().flatten(2)[:, :, : bits.shape[1]]


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `write_kv`. On other devices than the CPU, a skipped token repeats the write of the first stored one."""
    if k.shape[0] == 0:
        return
    block = k_cache.shape[1]
    slot = slot_mapping.long()
    kept = slot >= 0
    if checks.reads_are_free(slot):
        slot, k, v = slot[kept], k[kept], v[kept]
        where = (slot // block, slot % block)
        k_cache[where] = k.to(k_cache.dtype)
        v_cache[where] = v.to(v_cache.dtype)
        return
    pick = torch.where(kept, torch.arange(slot.shape[0], device=slot.device), kept.int().argmax())
    slot = slot.clamp(min=0)[pick]
    where = (slot // block, slot % block)
    some = kept.any()
    k_cache[where] = torch.where(some, k[pick].to(k_cache.dtype), k_cache[where])
    v_cache[where] = torch.where(some, v[pick].to(v_cache.dtype), v_cache[where])
