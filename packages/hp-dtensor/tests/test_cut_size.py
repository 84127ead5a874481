"""Sizes of cut dims: what stays cut in arithmetic, and what operators make of it."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor.cut_size import CutSize, sizes_of
from hp_dtensor.dtensor import DTensor
from hp_dtensor.implicit import implicit
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, Shard
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
