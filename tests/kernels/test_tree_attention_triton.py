# SPDX-License-Identifier: Apache-2.0
"""The Triton tree_attention against dense attention of each row along its own path in fp64."""

import pytest
import torch
from kernel_cases import WIDTHS, forest
from poison import poisoned
from test_tree_attention import Paged

from aeon_ddtree.kernels import dispatch
from aeon_ddtree.kernels.ancestors import ancestor_mask, depth_of
from aeon_ddtree.kernels.tree_attention import (
    pack_visible,
    reference,
    tree_attention,
    triton,
    unpack_visible,
)

Config, CHOOSE = triton.Config, triton.choose
# fp32: scores of order 10, summed in another order; bf16: weights of 8 bits, truncated by Triton's interpreter, times
# values of order 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """The same number of programs everywhere, few enough for the interpreter, many enough to split requests."""
    monkeypatch.setattr(triton, "device_traits", lambda tensor: (4, 0))
    monkeypatch.setattr(triton, "_MERGED_ROWS", 16)
    if not torch.cuda.is_available():  # the interpreter's time goes by tiles, hardly by their size
        choose = triton.choose
        monkeypatch.setattr(triton, "choose", lambda rows, *rest: Config(64, 64) if rows > 32 else choose(rows, *rest))


class OnDevice(Paged):
    """`Paged`, run on the device with any configuration of the kernel."""

    def __init__(self, device, *arguments, **options):
        small = {"dtype": torch.float32, "heads": 2, "kv_heads": 1, "dim": 16}
        dispatch.interpret_on_cpu(False)  # filling a cache is not what is tested
        super().__init__(*arguments, **small | options)
        dispatch.interpret_on_cpu(device == "cpu")
        self.device = device

    def run(self, visible=None, window=None, own_kv=None):
        tensors = [self.q, self.k_cache, self.v_cache, self.table, self.context]
        if visible is None:  # wide ones packed beforehand: `pack_visible` has its own test
            visible = ancestor_mask(self.parent)
            visible = reference.pack(visible) if visible.shape[1] > 32 else visible
        tensors += [visible, self.used]
        if own_kv is not None:
            own_kv = tuple(x.to(self.device) for x in own_kv)
        with poisoned():
            out = tree_attention(
                *(x.to(self.device) for x in tensors), scale=0.4, window=window, own_kv=own_kv,
                depth=depth_of(self.parent).to(self.device) if window else None,
            )  # fmt: skip
        return out.cpu()

    def check(self, window=None, **options):
        out = self.run(window=window, **options)
        assert out.dtype == self.q.dtype and not out.isnan().any()
        assert self.worst(out, window) < TOLERANCE[self.q.dtype]
        return out


@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape_and_width(device, width):
    """Pitfall, mask: unequal contexts, trees of equal size and different shape in one batch; junk in tables."""
    OnDevice(device, forest(width, seed=width), [0, 45, 1, 40, 70, 22], block=16).check()


@pytest.mark.parametrize(
    ("block", "dtype"),
    [(16, torch.bfloat16), (48, torch.float32), (48, torch.bfloat16), (864, torch.float32), (864, torch.bfloat16)],
)
def test_block_sizes(device, block, dtype):
    """Blocks smaller than a tile, and blocks that a tile crosses: none of these is a power of two times the other."""
    shapes = ("random", "padded")
    context = [93, 850 if block == 864 else 60]
    OnDevice(device, forest(9, seed=2, shapes=shapes), context, block=block, dtype=dtype).check()


@pytest.mark.parametrize(
    "config",
    [
        Config(16, 16, least=1, per_sm=2),
        Config(32, 32, least=3, per_sm=3),
        Config(16, 64, least=1, per_sm=3),
        Config(16, 16, least=100),
    ],
    ids=repr,
)
def test_every_way_to_split(device, config, monkeypatch):
    """One request over many programs, many requests in one program, parts merged by a second launch."""
    monkeypatch.setattr(triton, "choose", lambda *arguments: config)
    parent = forest(9, seed=1, shapes=("random", "padded", "chain", "comb"))
    case = OnDevice(device, parent, [5, 160, 0, 37], block=24)
    first = case.check()
    assert torch.equal(case.run(), first)
    OnDevice(device, parent[:1], [200], block=24).check()


@pytest.mark.skipif(not HOPPER, reason="hopper_kernel runs on sm_90 only; Triton's interpreter has no Gluon")
@pytest.mark.parametrize(
    ("width", "block", "dim", "value_dim", "config"),
    [
        (1, 64, 64, 64, Config(64, 64, hopper=True, least=1)),
        (9, 864, 256, 256, Config(64, 64, hopper=True, least=1, pdl=True)),
        (17, 864, 256, 256, Config(128, 64, hopper=True, pdl=True)),
        (33, 96, 128, 128, Config(128, 64, hopper=True, least=1)),
        (65, 864, 256, 256, Config(128, 64, hopper=True, least=1, pdl=True)),
        (127, 80, 256, 64, Config(64, 64, hopper=True, pdl=True)),
    ],
    ids=str,
)
def test_hopper_kernel(device, width, block, dim, value_dim, config, monkeypatch):
    """Tiles that end with a page, with the context and with the tree; NaN behind the last row; few and many parts."""
    monkeypatch.setattr(triton, "choose", lambda *arguments: config)
    sizes = {"heads": 6, "kv_heads": 1, "dim": dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    case = OnDevice(device, forest(width, seed=width), [0, 63, 64, 900, 865, 127], block=block, **sizes)
    # Scores of order 6, so that errors of the weights stay near those of narrow heads.
    case.q *= (16 / dim) ** 0.5
    first = None
    for processors in (3, 1, 50):
        monkeypatch.setattr(triton, "device_traits", lambda tensor, processors=processors: (processors, 90))
        got = case.check() if first is None else case.run()
        assert torch.equal(got, case.run())
        first = got if first is None else first
        assert (got - first).abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("width", [9, 17, 33, 65])
@pytest.mark.parametrize("window", [None, 1000])
def test_a_captured_graph_replays_the_very_bytes(device, width, window, monkeypatch):
    """The device's own choice for the target's sizes, captured once, replayed with other contexts, trees and tables.

    On sm_90 this is hopper_kernel without a window and attend_kernel with one; elsewhere attend_kernel.
    """
    monkeypatch.undo()  # the real number of multiprocessors
    chosen = []
    monkeypatch.setattr(triton, "choose", lambda *arguments: chosen.append(CHOOSE(*arguments)) or chosen[-1])
    heads = {"heads": 24, "kv_heads": 4, "dim": 256, "value_dim": 256, "dtype": torch.bfloat16, "block": 864}
    inputs = []
    for seed, contexts in enumerate(([3000, 1727, 0], [63, 2000, 864])):
        case = OnDevice(device, forest(width, seed=seed, shapes=("random", "padded", "chain")), contexts, **heads)
        mask = ancestor_mask(case.parent)
        inputs.append([case.q * 0.25, case.k_cache, case.v_cache, case.table, case.context, mask, case.used,
                       depth_of(case.parent)])  # fmt: skip
    # As large as the larger of both caches and tables.
    shapes = [[max(sizes) for sizes in zip(*(x.shape for x in pair))] for pair in zip(*inputs)]
    still = [torch.zeros(shape, dtype=x.dtype, device=device) for shape, x in zip(shapes, inputs[0])]
    bits = torch.zeros_like(reference.pack(inputs[0][5])).to(device)
    q, k_cache, v_cache, table, context, visible, used, depth = still

    def fill(values):
        for buffer, value in zip(still, values):
            buffer[tuple(slice(size) for size in value.shape)] = value.to(device)
        bits.copy_(reference.pack(visible))

    def run():
        options = {"scale": 0.4, "window": window, "depth": depth if window else None}
        return tree_attention(q, k_cache, v_cache, table, context, bits, used, **options)

    fill(inputs[0])
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for values in reversed(inputs):
        fill(values)
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())
        truth = reference.attention(
            q.double(), k_cache, v_cache, table, context, visible, used, 0.4, window, depth, None
        )  # fmt: skip
        assert (replayed - truth).abs().max() < TOLERANCE[torch.bfloat16]
    assert {config.hopper for config in chosen} == {HOPPER and window is None}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"), [(6, 1, 64, 64), (4, 2, 80, 96), (3, 3, 24, 8), (6, 2, 256, 256)]
)
def test_heads(device, heads, kv_heads, dim, value_dim):
    """Groups that are no power of two, several KV heads, head sizes that fill no tile."""
    parent = forest(9, seed=5, shapes=("random", "padded"))
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}
    OnDevice(device, parent, [40, 7], block=16, **sizes).check()


@pytest.mark.parametrize("window", [1, 3, 40, 100])
def test_windows_go_by_depth(device, window):
    """Pitfall, mask: a sliding window counts positions (depth), not rows."""
    shapes = ("random", "chain", "star", "padded")
    OnDevice(device, forest(17, seed=3, shapes=shapes), [90, 0, 41, 70], block=16).check(window)


def test_blocks_that_left_the_window_may_be_reused(device):
    """Blocks that no row can reach any more may be freed, and then hold NaN or be out of range in the table."""
    case = OnDevice(device, forest(9, shapes=("random", "chain")), [40, 41])
    for r in range(2):
        case.k_cache[case.table[r, :8]] = torch.nan
        case.v_cache[case.table[r, :8]] = torch.inf
    case.table[1, :8] = 10**9
    case.check(5)


@pytest.mark.parametrize("window", [None, 4])
def test_rows_may_bring_their_own_kv(device, window):
    """A drafter's block is not in the cache, and sees itself in both directions."""
    case = OnDevice(device, forest(9, seed=2, shapes=("random", "padded", "chain")), [0, 45, 40])
    for r in range(3):
        for position in range(int(case.context[r]), int(case.context[r] + case.used[r])):
            case.k_cache[case.table[r, position // 4], position % 4] = torch.nan
            case.v_cache[case.table[r, position // 4], position % 4] = torch.nan
    case.check(window, own_kv=case.own)
    block = torch.ones(3, 9, 9, dtype=torch.bool)
    got = case.run(visible=block, window=window, own_kv=case.own)
    wanted = reference.attention(
        case.q, case.k_cache, case.v_cache, case.table, case.context, block, case.used, 0.4, window,
        depth_of(case.parent), case.own,
    )  # fmt: skip
    assert (got - wanted).abs().max() < TOLERANCE[torch.float32]


def test_chain_shaped_tree_equals_causal_attention(device):
    """The control: rows of a chain-shaped tree equal torch's own causal attention over the whole sequence."""
    case = OnDevice(device, forest(17, shapes=("chain",)), [30], heads=4, kv_heads=2, value_dim=16)
    k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in case.lines[0])
    mask = torch.arange(47) <= 30 + torch.arange(17)[:, None]
    truth = torch.nn.functional.scaled_dot_product_attention(case.q[0].transpose(0, 1), k, v, mask, scale=0.4)
    assert (case.run()[0] - truth.transpose(0, 1)).abs().max() < TOLERANCE[torch.float32]


def test_a_prompt_beside_a_plain_step(device):
    """A prefill wider than 128 rows beside a one-row decode."""
    parent = torch.full((2, 150), -1)
    parent[0] = torch.arange(150) - 1
    case = OnDevice(device, parent, [10, 200], block=16, heads=1, dim=8)
    visible = torch.eye(150, dtype=torch.bool).repeat(2, 1, 1)
    visible[0] = torch.ones(150, 150).tril().bool()
    case.check(visible=reference.pack(visible))


def test_strided_caches(device):
    """Pitfall, mask: strides are honoured, never inferred from a shape: K and V in one tensor, heads first."""
    case = OnDevice(device, forest(9, shapes=("random", "padded")), [0, 45], heads=4, kv_heads=2, value_dim=16)
    truth = case.check()
    both = torch.full((case.k_cache.shape[0], 2, 2, 4, 16), torch.nan).to(device)
    both[:, 0], both[:, 1] = (x.to(device).transpose(1, 2) for x in (case.k_cache, case.v_cache))
    case.k_cache, case.v_cache = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    assert not case.k_cache.is_contiguous()
    assert torch.equal(case.run(), truth)


@pytest.mark.parametrize("width", [1, 33, 64, 150])
def test_masks_are_packed_once(device, width):
    """Both packers agree, unpacking inverts them, and the packed mask gives the very same bytes of attention."""
    requests = 2 if width < 100 else 1
    visible = torch.rand(requests, width, width, generator=torch.Generator().manual_seed(width)) < 0.5
    bits = pack_visible(visible.to(device))
    assert torch.equal(bits.cpu(), reference.pack(visible))
    assert torch.equal(unpack_visible(bits).cpu(), visible)
    assert torch.equal(pack_visible(visible.to(device).mT).cpu(), reference.pack(visible.mT))
    if width == 33:
        case = OnDevice(device, forest(33, shapes=("random", "padded")), [30, 5])
        bits = pack_visible(ancestor_mask(case.parent).to(device))
        assert torch.equal(case.run(visible=bits), case.check())


def test_what_the_kernel_does_not_take_goes_to_the_reference(device, monkeypatch):
    """fp64, mixed dtypes and heads beyond 256 are right all the same, and the kernel is not asked."""
    monkeypatch.setattr(triton, "attention", None)
    parent = forest(9, shapes=("random",))
    for options in ({"dtype": torch.float64}, {"dim": 300}):
        case = OnDevice(device, parent, [20], **options)
        assert case.worst(case.run()) < TOLERANCE[torch.float32]
    case = OnDevice(device, parent, [20])
    case.q = case.q.bfloat16()
    assert case.worst(case.run()) < 1e-2
    with pytest.raises(ValueError, match="own_kv"):
        case.run(own_kv=(case.own[0][:, :3], case.own[1]))
