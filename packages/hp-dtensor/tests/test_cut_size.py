"""Sizes of cut dims: what stays cut in arithmetic, and what operators make of it."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor.cut_size import CutSize, sizes_of
from hp_dtensor.dtensor import DTensor
from hp_dtensor.implicit import implicit
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, SectionedShard, Shard
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.whole_values import WholeValues, following

HEADS = Layout({"tp": 2}, [Shard(1)], (2, 4, 8))


def test_multiples_and_whole_quotients_stay_cut() -> None:
    size = sizes_of(HEADS)[1]
    for found, cut in [
        (size, True),
        (size * 3, True),
        (3 * size, True),
        (size * 6 // 3, True),
        (size // 2, True),
        (size // 4, False),  # one head is not two halves
        (size + 1, False),
        (size // 3, False),
    ]:
        assert isinstance(found, CutSize) == cut
    assert sizes_of(HEADS)[0].__class__ is int
    assert sizes_of(HEADS) == (2, 4, 8)


def test_products_over_other_axes_and_sums_over_the_same_stay_cut() -> None:
    sequence, heads = CutSize(6, (0,), 2), CutSize(8, (1,), 4)
    product = sequence * heads
    assert (product, product.cut, product.ways) == (48, (0, 1), 8)
    assert isinstance(sequence + sequence, CutSize)
    assert isinstance(sum([sequence, sequence]), CutSize)
    assert isinstance(sequence * 2 - sequence, CutSize)
    for plain in (sequence * sequence, sequence + heads, sequence - sequence, 2 + sequence):
        assert plain.__class__ is int


WHOLE = Layout({"tp": 2}, [Replicate()], (2, 8))
VIEWS = {
    "view": lambda x, size: x.view(2, size, 2, 4),
    "reshape": lambda x, size: x.reshape(2, size, -1),
    "torch.reshape": lambda x, size: torch.reshape(x, (-1, size, 8)),
    "expand": lambda x, size: x.expand(2, size, 8),
    "unflatten": lambda x, size: x.unflatten(1, (size, 1)),
    "merged": lambda x, size: x.transpose(0, 1).reshape(size * 2, 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_within_a_module_a_cut_dim_is_given_no_size_of_the_modules_own(name: str) -> None:
    heads = DTensor.of_layout(torch.ones(2, 2, 8), HEADS)
    change = VIEWS[name]
    # A user's own code states global sizes as it likes.
    assert change(heads, 4).placements == change(heads, heads.shape[1]).placements
    with following(WholeValues()):
        change(heads, heads.shape[1])
        change(heads, CutSize(4, (0,), 2))
        with pytest.raises(OperatorError, match=r"size \d of dim . of the result .* cut over tp"):
            change(heads, 4)


SECTIONS = Layout({"tp": 2}, [SectionedShard(1, (4, 4))], (2, 8))
PLACES = {
    "slice": lambda x, size: (x[:, :size], x[..., size:]),
    "narrow": lambda x, size: x.narrow(1, 0, size),
    "split": lambda x, size: x.split(size, dim=-1),
    "sections": lambda x, size: x.split([size, size], dim=1),
    "written": lambda x, size: x.__setitem__((slice(None), slice(size)), 0.0),
}


@pytest.mark.parametrize("name", PLACES)
def test_within_a_module_places_along_a_cut_dim_come_from_its_size(name: str) -> None:
    fused = DTensor.of_layout(torch.ones(2, 4), SECTIONS)
    change = PLACES[name]
    change(fused, 4)
    with following(WholeValues()):
        change(fused, fused.shape[1] // 2)
        with pytest.raises(OperatorError, match=r"4 along dim 1 is a number .* cut over tp"):
            change(fused, 4)
        change(DTensor.of_layout(torch.ones(2, 8), WHOLE), 4)


def test_sections_have_a_size_and_whole_dims_may_be_given_any() -> None:
    fused = DTensor.of_layout(torch.ones(2, 4), SECTIONS)
    whole = DTensor.of_layout(torch.ones(2, 8), WHOLE)
    with following(WholeValues()):
        assert fused.view(1, 2, fused.shape[1]).shape == (1, 2, 8)
        assert fused[:, 0:].shape == fused[..., None, :].shape[::2] == (2, 8)
        assert fused[:, 1::2].shape == (2, 4)
        assert whole.view(2, 4, 2).placements == (Replicate(),)
        with pytest.raises(OperatorError, match="size 8 of dim 2"):
            fused.view(1, 2, 8)


def test_uneven_parts_have_no_size_of_their_own() -> None:
    assert sizes_of(Layout({"tp": 2}, [Shard(0)], (3,)))[0].__class__ is int


def test_a_dim_spread_to_a_cut_size_is_cut_and_its_gradient_is_a_summand() -> None:
    queries = DTensor.of_layout(torch.ones(2, 2, 8), HEADS)
    shape = (2, 1, 8)
    for gradient in (Partial(), Replicate()):
        layout = Layout({"tp": 2}, [Replicate()], shape, [gradient])
        shared = DTensor.of_layout(torch.ones(shape, requires_grad=True), layout)
        with following(WholeValues()), implicit(reductions=False, adjoints=False):
            if gradient == Replicate():
                with pytest.raises(OperatorError, match="not declared Partial"):
                    shared.expand(-1, queries.shape[1], -1)
                continue
            spread = shared.expand(-1, queries.shape[1], -1)
            assert spread.placements == (Shard(1),)
            assert spread.to_local().shape == (2, 2, 8)
            assert shared.expand(-1, 4, -1).placements == (Replicate(),)


def test_new_tensors_are_cut_like_the_leading_dims_that_they_share() -> None:
    queries = DTensor.of_layout(torch.ones(2, 2, 8), HEADS)
    for made in (
        queries.new_empty(2, 4, 6),
        queries.new_full((2, 4), 1.0),
        queries.new_zeros((2, 4, 8)),
    ):
        assert made.placements == (Shard(1),)
        assert made.to_local().shape == (2, 2, *made.shape[2:])
    for made in (queries.new_ones(4, 2), queries.new_zeros(2)):
        assert made.placements == (Replicate(),)
        assert made.to_local().shape == made.shape
