# SPDX-License-Identifier: Apache-2.0
"""tree_attention against dense attention of each row along its own path, in fp64; write_kv cell by cell."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import WIDTHS, forest, num_rows, path_to, poison_int, random_parents

from aeon_ddtree.kernels.ancestors import ancestor_mask, depth_of
from aeon_ddtree.kernels.tree_attention import reference, tree_attention, write_kv


class Paged:
    """R requests with a context each, laid out in a shuffled paged cache whose unused cells are NaN."""

    def __init__(self, parent, context, block=4, heads=4, kv_heads=2, dim=6, value_dim=5, seed=0, dtype=torch.float64):
        gen = torch.Generator().manual_seed(seed)
        requests, width = parent.shape
        self.parent, self.context, self.block = parent, torch.tensor(context), block
        self.used = torch.tensor([num_rows(p) for p in parent])
        self.q = torch.randn(requests, width, heads, dim, generator=gen, dtype=torch.float64).to(dtype)
        most = -(-(max(context) + width) // block) + 1
        blocks = torch.randperm(requests * most + 3, generator=gen)
        self.table = blocks[: requests * most].reshape(requests, most)
        shape = (len(blocks), block, kv_heads)
        self.k_cache = torch.full((*shape, dim), torch.nan, dtype=dtype)
        self.v_cache = torch.full((*shape, value_dim), torch.nan, dtype=dtype)
        self.own = (torch.empty(requests, width, kv_heads, dim), torch.empty(requests, width, kv_heads, value_dim))
        self.own = tuple(x.double().fill_(torch.nan).to(dtype) for x in self.own)
        self.lines = []
        for r in range(requests):
            length = context[r] + int(self.used[r])
            k = torch.randn(length, kv_heads, dim, generator=gen, dtype=torch.float64).to(dtype)
            v = torch.randn(length, kv_heads, value_dim, generator=gen, dtype=torch.float64).to(dtype)
            self.lines.append((k, v))
            position = torch.arange(length)
            slot = self.table[r, position // block] * block + position % block
            write_kv(k, v, self.k_cache, self.v_cache, slot)
            for own, line in zip(self.own, (k, v)):
                own[r, : int(self.used[r])] = line[context[r] :]
            # Entries that nobody needs may hold anything.
            self.table[r, -(-length // block) :] = torch.tensor([2**31 - 1, -5, 10**6])[r % 3]

    def run(self, **options):
        return tree_attention(
            self.q, self.k_cache, self.v_cache, self.table, self.context, ancestor_mask(self.parent), self.used,
            scale=0.4, depth=depth_of(self.parent), **options,
        )  # fmt: skip

    def worst(self, out, window=None):
        """Largest error of any used row; unused rows must be 0."""
        error, share = 0.0, self.q.shape[2] // self.k_cache.shape[2]
        for r in range(len(self.lines)):
            base = int(self.context[r])
            assert (out[r, int(self.used[r]) :] == 0).all()
            for row in range(int(self.used[r])):
                path = path_to(self.parent[r], row)
                places = [*range(base), *(base + j for j in path)]
                positions = list(range(base + len(path)))
                if window:
                    places = [p for p, at in zip(places, positions) if positions[-1] - at < window]
                k, v = (x[places].double() for x in self.lines[r])
                for h in range(self.q.shape[2]):
                    weights = torch.exp(0.4 * (k[:, h // share] @ self.q[r, row, h].double()))
                    truth = (weights / weights.sum()) @ v[:, h // share]
                    error = max(error, float((out[r, row, h].double() - truth).abs().max()))
        return error


@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape_and_width(width):
    """Pitfall, mask: unequal contexts, trees of equal size and different shape in one batch; junk in tables."""
    case = Paged(forest(width, seed=width), [0, 13, 1, 40, 7, 22], heads=2, kv_heads=1, dim=4, value_dim=3)
    assert case.worst(case.run()) < 1e-12
    case.q, case.k_cache, case.v_cache = case.q.float(), case.k_cache.float(), case.v_cache.float()
    out = case.run()
    assert out.dtype == torch.float32 and case.worst(out) < 1e-5


@given(
    st.lists(st.tuples(random_parents(12), st.integers(0, 30)), min_size=1, max_size=3),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    st.sampled_from([None, 1, 4]),
)
@settings(deadline=None, max_examples=25)
def test_random_trees(requests, block, heads, window):
    width = max(len(p) for p, _ in requests)
    parent = torch.tensor([p + [-1] * (width - len(p)) for p, _ in requests])
    case = Paged(parent, [c for _, c in requests], block, *heads, dim=3, value_dim=3)
    assert case.worst(case.run(window=window), window) < 1e-12


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_windows_go_by_depth(window):
    """Pitfall, mask: a sliding window counts positions (depth), not rows: a late sibling still sees its parent."""
    case = Paged(forest(17, seed=3), [0, 13, 1, 40, 7, 22])
    assert case.worst(case.run(window=window), window) < 1e-12


def test_blocks_that_left_the_window_may_be_reused():
    """Blocks that no row can reach any more may be freed, and then hold NaN or be out of range in the table."""
    case = Paged(forest(9, shapes=("random", "chain")), [40, 41])
    for r in range(2):
        case.k_cache[case.table[r, :8]] = torch.nan
        case.v_cache[case.table[r, :8]] = torch.inf
    case.table[1, :8] = 10**9
    assert case.worst(case.run(window=5), 5) < 1e-12


def test_rows_may_bring_their_own_kv():
    """A drafter's block is not in the cache: same result as when it is, committed cells only read from the cache."""
    case = Paged(forest(9, seed=2), [0, 13, 1, 40, 7, 22])
    cached = {window: case.run(window=window) for window in (None, 4)}
    for r in range(6):
        for position in range(int(case.context[r]), int(case.context[r] + case.used[r])):
            case.k_cache[case.table[r, position // 4], position % 4] = torch.nan
            case.v_cache[case.table[r, position // 4], position % 4] = torch.nan
    for window, truth in cached.items():
        out = case.run(window=window, own_kv=case.own)
        assert (out - truth).abs().max() < 1e-12
        assert case.worst(out, window) < 1e-12


def test_chain_shaped_tree_equals_causal_attention():
    """The control: rows of a chain-shaped tree equal torch's own causal attention over the whole sequence."""
    case = Paged(forest(17, shapes=("chain",)), [30])
    k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in case.lines[0])
    mask = torch.arange(47) <= 30 + torch.arange(17)[:, None]
    truth = torch.nn.functional.scaled_dot_product_attention(case.q[0].transpose(0, 1), k, v, mask, scale=0.4)
    assert (case.run()[0] - truth.transpose(0, 1)).abs().max() < 1e-12


def test_a_prompt_beside_trees():
    """A prefill of any length (wider than 128) beside a one-row decode; requests are not padded to one another."""
    parent = torch.full((2, 150), -1)
    parent[0] = torch.arange(150) - 1
    case = Paged(parent, [10, 200], dim=3, value_dim=3, heads=1, kv_heads=1)
    visible = torch.eye(150, dtype=torch.bool).repeat(2, 1, 1)
    visible[0] = torch.ones(150, 150).tril().bool()
    out = tree_attention(case.q, case.k_cache, case.v_cache, case.table, case.context, visible, case.used, scale=0.4)
    assert case.worst(out) < 1e-12


def test_long_prompts_are_done_in_groups_of_rows(monkeypatch):
    case = Paged(forest(33, seed=4), [0, 13, 1, 40, 7, 22])
    whole = case.run()
    monkeypatch.setattr(reference, "_MAX_SCORES", 1000)
    assert (case.run() - whole).abs().max() < 1e-13


def test_siblings_are_blind_to_each_other():
    case = Paged(torch.tensor([[-1, 0, 0, 1, 2]]), [6])
    out = case.run()
    slot = case.table[0, 8 // 4], 8 % 4
    case.k_cache[slot], case.v_cache[slot] = 50.0, -50.0  # row 2
    other = case.run()
    assert torch.equal(out[0, [0, 1, 3]], other[0, [0, 1, 3]])
    assert not torch.equal(out[0, 2], other[0, 2]) and not torch.equal(out[0, 4], other[0, 4])


def test_strided_caches():
    """Pitfall, mask: strides are honoured, never inferred from a shape: K and V in one tensor, heads first."""
    case = Paged(forest(9), [0, 13, 1, 40, 7, 22], value_dim=6)
    truth = case.run()
    both = torch.full((case.k_cache.shape[0], 2, 2, 4, 6), torch.nan, dtype=torch.float64)
    both[:, 0], both[:, 1] = case.k_cache.transpose(1, 2), case.v_cache.transpose(1, 2)
    case.k_cache, case.v_cache = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    assert not case.k_cache.is_contiguous()
    assert torch.equal(case.run(), truth)


def test_half_precision_sums_in_fp32():
    case = Paged(forest(17), [0, 13, 1, 40, 7, 22], dtype=torch.bfloat16)
    out = case.run()
    assert out.dtype == torch.bfloat16
    assert case.worst(out) < 1e-2


def test_write_kv_touches_its_cells_only():
    """Negative slots are skipped, values converted to the cache's dtype, every other cell keeps its bytes."""
    k, v = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    slots = torch.tensor([9, -1, 0, 14, -7])
    for dtype in (torch.float32, torch.bfloat16):
        k_cache, v_cache = poison_int((4, 4, 2, 3), dtype), poison_int((4, 4, 2, 4), dtype)
        k_before, v_before = k_cache.clone(), v_cache.clone()
        write_kv(k, v, k_cache, v_cache, slots)
        for slot in range(16):
            at = (slot // 4, slot % 4)
            token = slots.tolist().index(slot) if slot in slots.tolist() else None
            assert torch.equal(k_cache[at], k_before[at] if token is None else k[token].to(dtype))
            assert torch.equal(v_cache[at], v_before[at] if token is None else v[token].to(dtype))
    write_kv(k[:0], v[:0], k_cache, v_cache, slots[:0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(2, 9, 3, 6)),
        ("q", torch.zeros(2, 9, 4, 5)),
        ("k_cache", torch.zeros(5, 4, 2)),
        ("v_cache", torch.zeros(5, 4, 1, 5)),
        ("block_table", torch.zeros(3, 2, dtype=torch.int64)),
        ("context_len", torch.zeros(2)),
        ("visible", torch.zeros(2, 9, 9)),
        ("visible", torch.zeros(2, 9, 8, dtype=torch.bool)),
        ("num_rows", torch.zeros(1, dtype=torch.int64)),
        ("window", 0),
    ],
)
def test_bad_input_is_named(name, value):
    arguments = {
        "q": torch.zeros(2, 9, 4, 6),
        "k_cache": torch.zeros(5, 4, 2, 6),
        "v_cache": torch.zeros(5, 4, 2, 5),
        "block_table": torch.zeros(2, 3, dtype=torch.int64),
        "context_len": torch.zeros(2, dtype=torch.int64),
        "visible": torch.ones(2, 9, 9, dtype=torch.bool),
        "num_rows": torch.ones(2, dtype=torch.int64),
        "scale": 1.0,
        "depth": torch.zeros(2, 9, dtype=torch.int64),
    }
    tree_attention(**arguments)
    with pytest.raises(ValueError, match=name):
        tree_attention(**{**arguments, name: value})
    with pytest.raises(ValueError, match="depth"):
        tree_attention(**{**arguments, "window": 4, "depth": None})
    with pytest.raises(ValueError, match="slot_mapping"):
        write_kv(
            torch.zeros(3, 2, 6), torch.zeros(3, 2, 5), arguments["k_cache"], arguments["v_cache"],
            torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip
