# SPDX-License-Identifier: Apache-2.0
"""ancestor_mask and depth_of against following pointers one at a time."""

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import SHAPES, WIDTHS, forest, path_to, random_parents

from aeon_ddtree.kernels.ancestors import ancestor_mask, depth_of
from aeon_ddtree.kernels.checks import enable_checks


def assert_right(parent):
    mask, depth = ancestor_mask(parent), depth_of(parent)
    assert mask.dtype == torch.bool and depth.dtype == torch.int64
    for r in range(parent.shape[0]):
        for i in range(parent.shape[1]):
            path = path_to(parent[r], i)
            assert mask[r, i].nonzero()[:, 0].tolist() == path
            assert depth[r, i] == len(path) - 1


@pytest.mark.parametrize("width", [*WIDTHS, 2, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_shape(width, dtype):
    """Pitfall, mask: requests of one batch have different trees of the same size; each gets its own mask."""
    assert_right(forest(width).to(dtype))


@given(random_parents())
@settings(deadline=None, max_examples=60)
def test_random_trees(parent):
    assert_right(torch.tensor([parent]))


def test_padding_is_nobodys_child():
    """Pitfall, tree: padding rows must not become children of the root."""
    parent = torch.tensor([[-1, 0, 1, -1, -1]])
    mask = ancestor_mask(parent)[0]
    assert torch.equal(mask[3:], torch.eye(5, dtype=torch.bool)[3:])
    assert not mask[:3, 3:].any()


@pytest.mark.parametrize("bad", [5, 3, 1000000, -7])
def test_bad_parent_becomes_padding_or_an_error(bad):
    parent = torch.tensor([[-1, 0, 1, bad, 1]])
    assert torch.equal(ancestor_mask(parent), ancestor_mask(torch.tensor([[-1, 0, 1, -1, 1]])))
    enable_checks(True)
    try:
        with pytest.raises(ValueError, match=r"parent\[0, 3\]"):
            ancestor_mask(parent)
    finally:
        enable_checks(None)


@pytest.mark.parametrize(
    "parent", [torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 129, dtype=torch.int64), None]
)
def test_bad_input_names_the_argument(parent):
    for function in (ancestor_mask, depth_of):
        with pytest.raises(ValueError, match="parent"):
            function(parent)


def test_all_shapes_are_trees():
    """The cases themselves: parents come first, and every shape differs from the others at width 9."""
    trees = forest(9)
    assert len({tuple(t) for t in trees.tolist()}) == len(SHAPES)
    assert (trees < torch.arange(9)).all()
