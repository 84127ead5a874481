"""The plan as data: for any rank of any mesh, without process groups."""

from __future__ import annotations

import math

import torch

from hp_dtensor import AbstractMesh, Layout, Replicate, Shard, StridedShard
from hp_muon.plan_builder import batch_capacity, build_plan
from hp_muon.step_plan import MAX_BATCH_ELEMENTS, Entry, Orthogonalization
from hp_muon.views import MatrixView
from hp_platform import Topology

MESH = AbstractMesh(("r", "dp", "tp"), (2, 4, 2))
HSDP_TP = (Replicate(), StridedShard(0, 2), Shard(0))
EXPERTS = (Replicate(), Shard(0), Replicate())


def entries(*parameters, mesh=MESH):
    how = Orthogonalization(5, "asym5", 1e-7, torch.bfloat16)
    return [
        Entry(
            index=index,
            name=f"p{index}",
            layout=Layout(mesh, placements, shape),
            view=MatrixView.default(len(shape)).resolve(shape),
            dtype=torch.float32,
            device=torch.device("cpu"),
            orthogonalization=how,
        )
        for index, (shape, placements) in enumerate(parameters)
    ]


MODEL = [
    *[((64, 32), HSDP_TP)] * 7,
    *[((32, 64), HSDP_TP)] * 5,
    *[((8, 16, 24), EXPERTS)] * 3,
]


def plans(parameters=MODEL, **arguments):
    return {
        coord: build_plan(entries(*parameters), coordinate=coord, **arguments)
        for coord in MESH.coordinates()
    }


def test_every_rank_agrees_and_walks_the_same_batches():
    found = plans()
    assert len({plan.digest for plan in found.values()}) == 1
    assert len({tuple((b.rows, b.cols) for b in plan.batches) for plan in found.values()}) == 1


def test_batches_come_in_descending_size():
    areas = [b.rows * b.cols for b in plans()[(0, 0, 0)].batches]
    assert areas == sorted(areas, reverse=True)


def test_every_matrix_has_one_compute_owner_and_every_momentum_one_replica_owner():
    found = plans()
    cut = sum(
        b.matrices_here for plan in found.values() for b in plan.batches if b.domain.shard_size == 8
    )
    assert cut == 12
    # Experts: separated by dp, replicated over tp and r, so each stack has one owner per dp slice.
    experts = sum(
        b.matrices_here for plan in found.values() for b in plan.batches if b.domain.shard_size == 1
    )
    assert experts == 3 * 8
    for index, (_, placements) in enumerate(MODEL):
        holders = [coord for coord, plan in found.items() if index in plan.owned]
        sharing = 2 if placements == HSDP_TP else 4
        assert len(holders) == MESH.world_size // sharing


def test_the_load_is_spread():
    plan = plans([((64, 32), HSDP_TP)] * 32)[(0, 0, 0)]
    assert [plan.balance(label) for label in plan.loads] == [1.0]
    assert "balance" in str(plan)
    assert "64 x 32" in str(plan)


def test_subgroups_on_other_hosts_recompute():
    hosts = Topology.from_hosts(["a"] * 8 + ["b"] * 8)
    split = plans(topology=hosts)
    assert all(set(range(12)) <= plan.owned for plan in split.values())
    alone = plans(deduplicate=False)
    assert all(plan.owned == set(range(len(MODEL))) for plan in alone.values())


def test_a_batch_holds_whole_rounds_below_the_cap():
    assert batch_capacity(2**20, 1) == 2**9
    assert batch_capacity(4096 * 2048, 16) == 16
    assert batch_capacity(4096 * 2048, 128) == 64
    assert batch_capacity(1000, 16) % 16 == 0
    assert batch_capacity(1000, 16) * 1000 <= MAX_BATCH_ELEMENTS // 16
    assert batch_capacity(2**30, 4) == 1


def test_qwen3_30b_over_16_ranks_communicates_for_cut_matrices_only():
    mesh = AbstractMesh(("dp",), (16,))
    dense = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)] * 48
    stacks = [(128, 1536, 2048), (128, 2048, 768)] * 48
    parameters = [(shape, (Shard(0),)) for shape in dense + stacks]
    plan = build_plan(entries(*parameters, mesh=mesh), coordinate=(3,))
    assert sum(len(b.own.members) for b in plan.batches) == 336
    gathered = sum(b.rows * b.cols * b.own.count for b in plan.batches if b.domain.shard_size == 16)
    assert gathered == sum(math.prod(shape) for shape in dense)
    assert [plan.balance(label) for label in plan.loads] == [1.0]
