"""Ranks in lockstep: the collectives' meaning, what happens when one rank stops, determinism."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import RaggedShard, Replicate, SectionedShard, Shard, StridedShard
from hp_dtensor.testing import spread
from hp_dtensor.testing.lockstep import LockstepMesh, run_lockstep
from hp_dtensor.testing.simulated_check import check_simulated

SHAPE = (6, 5)
DENSE = torch.arange(30.0).view(SHAPE)


def test_every_rank_reaches_every_layout_as_with_real_ranks() -> None:
    """Gathers, reductions and exchanges, even and uneven, against the layout's own indices."""
    kinds = [
        [Shard(0), Shard(1)],
        [Replicate(), StridedShard(0, 2)],
        [SectionedShard(0, (4, 2)), Replicate()],
        [Shard(1), RaggedShard((0,), (3, 0))],
    ]

    def body(mesh: LockstepMesh) -> bool:
        for source in kinds:
            for target in kinds:
                layout = Layout(mesh, source, SHAPE)
                local = spread(DENSE, layout.abstract)[mesh.own_rank]
                found = DTensor.of_layout(local, layout).redistribute(placements=target)
                expected = spread(DENSE, found.layout.abstract)[mesh.own_rank]
                if not torch.equal(found.to_local(), expected):
                    return False
        return True

    assert run_lockstep(body, {"dp": 2, "tp": 2}) == [True] * 4


def test_a_rank_that_raises_stops_the_others_and_is_the_one_reported() -> None:
    def body(mesh: LockstepMesh) -> None:
        if mesh.own_rank == 1:
            raise KeyError("only here")
        DTensor.of_layout(torch.ones(2), Layout(mesh, [Shard(0)], (4,))).full_tensor()

    with pytest.raises(KeyError, match="only here"):
        run_lockstep(body, {"tp": 2})


def test_ranks_that_wait_for_one_that_never_comes_are_named() -> None:
    def body(mesh: LockstepMesh) -> None:
        if mesh.own_rank == 0:
            DTensor.of_layout(torch.ones(2), Layout(mesh, [Shard(0)], (4,))).full_tensor()

    with pytest.raises(RuntimeError, match="no rank can go on: rank 0 in all-gather"):
        run_lockstep(body, {"tp": 2})


def test_a_wrong_function_is_found_with_layouts_and_rank() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return DTensor.of_layout(x.to_local() * 2, x.layout)
        return x * 1

    with pytest.raises(AssertionError, match=r"input layouts Layout.*on rank 0: output 0"):
        check_simulated(wrong, (DENSE.double(),), mesh={"dp": 2, "tp": 2})
