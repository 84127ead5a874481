"""The checks find planted faults, and the strategies reach every kind of layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import evolve
from hypothesis import find, given, settings
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from hp_dtensor import path, pieces, steps, testing, transition
from hp_dtensor.cuts import Chunk, Run
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import RaggedShard, SectionedShard
from hp_dtensor.testing import (
    DistributedValue,
    check_redistribute,
    collect,
    distributed_tensors,
    layouts,
    pairs_of,
    spread,
)
from hp_dtensor.transition import Transition


@pytest.fixture(autouse=True)
def _fresh_paths() -> Iterator[None]:
    """A planted fault must not be answered from, or stay in, the memo of compiled paths."""
    transition._compiled_steps.cache_clear()
    yield
    transition._compiled_steps.cache_clear()


def caught() -> bool:
    """Whether some pair of layouts of two dims and two axes fails."""
    pairs = pairs_of(AbstractMesh(("dp", "tp"), (2, 2)), (5, 3))
    for source, target in random.Random(0).sample(pairs, 300):
        try:
            check_redistribute(source, target)
        except (AssertionError, RuntimeError):
            return True
    return False


def test_without_a_fault_every_pair_of_kinds_passes() -> None:
    for source, target in pairs_of(AbstractMesh(("tp",), (2,)), (5, 3)):
        check_redistribute(source, target)


def test_a_shard_from_the_wrong_coordinate_is_caught() -> None:
    def wrong(self: Chunk, size: int, index: int) -> list[Run]:
        return right(self, size, (index + 1) % self.count)

    right = Chunk.spans
    correct = Layout({"tp": 2}, (Shard(0),), (5,))
    values = spread(torch.arange(5.0), correct)
    with mock.patch.object(Chunk, "spans", wrong):
        swapped = Layout({"tp": 2}, (Shard(0),), (5,))
        with pytest.raises(AssertionError):
            collect(swapped, values)


def test_a_replicated_value_that_counts_twice_is_caught() -> None:
    def doubled(self: steps.RankStep, tensor: Tensor) -> Tensor:
        return tensor if self.kind is path.Kind.KEEP else right(self, tensor)

    right = steps.RankStep.local
    with mock.patch.object(steps.RankStep, "local", doubled):
        assert caught()


def test_a_missing_reduction_is_caught() -> None:
    def nothing(step: steps.Step, locals_: list[Tensor]) -> list[Tensor]:
        return locals_ if step.move.kind is path.Kind.ALL_REDUCE else right(step, locals_)

    right = steps.simulate_step
    with mock.patch.object(transition, "simulate_step", nothing):
        assert caught()


def test_pieces_put_down_in_the_wrong_order_are_caught() -> None:
    right = pieces.Pieces.of
    for neglected in ("as_they_lie", "whole"):
        changes = {neglected: True}

        def wrong(*arguments: Any, _changes: dict[str, Any] = changes) -> pieces.Pieces:
            return evolve(right(*arguments), **_changes)

        with mock.patch.object(pieces.Pieces, "of", wrong):
            assert caught(), neglected
        transition._compiled_steps.cache_clear()


def test_gathering_an_outer_cut_first_is_caught() -> None:
    with (
        mock.patch.object(path, "_is_innermost", return_value=True),
        mock.patch.object(path, "_continues", return_value=True),
    ):
        assert caught()


def test_a_gradient_laid_out_like_the_value_is_caught() -> None:
    source = Layout({"tp": 2}, (Replicate(),), (4,), (Partial(),))
    target = Layout({"tp": 2}, (Replicate(),), (4,))
    check_redistribute(source, target)
    forgetful = Transition.compile(target, target)
    with (
        mock.patch.object(Transition, "adjoint", forgetful),
        pytest.raises(AssertionError, match="Tx, y"),
    ):
        check_redistribute(source, target)


@settings(max_examples=100, deadline=None)
@given(distributed_tensors())
def test_collecting_what_was_spread_gives_the_dense_tensor(value: DistributedValue) -> None:
    assert torch.equal(collect(value.layout, value.locals), value.dense)


def test_replicas_that_differ_are_not_a_tensor() -> None:
    layout = Layout({"tp": 2}, (Replicate(),), (2,))
    with pytest.raises(AssertionError, match="replicas differ"):
        collect(layout, [torch.zeros(2), torch.ones(2)])


@pytest.mark.parametrize("kind", [SectionedShard, RaggedShard])
def test_layouts_of_every_kind_are_drawn(kind: type) -> None:
    found = find(
        layouts(),
        lambda layout: any(type(p) is kind for p in layout.placements) and layout.numel > 1,
        settings=settings(max_examples=2000, deadline=None, database=None),
    )
    # A failing example shrinks to something a person can read.
    assert found.numel <= 4
    assert found.abstract_mesh.world_size == 1


def test_uneven_layouts_are_drawn() -> None:
    found = find(
        layouts(),
        lambda layout: not layout.is_even,
        settings=settings(max_examples=2000, deadline=None, database=None),
    )
    assert found.abstract_mesh.world_size == 2
    assert testing.every_placement(found.shape, 2)
