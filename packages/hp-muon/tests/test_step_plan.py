"""The plan as data: for any rank of any mesh, without process groups."""

from __future__ import annotations

import math

import pytest
import torch

from hp_dtensor import AbstractMesh, Layout, Replicate, Shard, StridedShard
from hp_muon import MuonError
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


def test_the_load_is_spread_over_all_domains_of_a_mesh():
    """Matrices cut by one axis and replicated over another do not all go to the same ranks."""
    mesh = AbstractMesh(("dp", "tp"), (2, 2))
    parameters = [
        *[((64, 64), (Shard(0), Shard(1)))] * 5,  # 5 over 4 ranks
        *[((48, 48), (Shard(0), Replicate()))] * 3,
        *[((32, 32), (Replicate(), Shard(0)))] * 3,
    ]
    found = [
        build_plan(entries(*parameters, mesh=mesh), coordinate=coord)
        for coord in mesh.coordinates()
    ]
    (mesh_name,) = found[0].loads
    for plan, coord in zip(found, mesh.coordinates()):
        assert torch.equal(plan.loads[mesh_name], found[0].loads[mesh_name])
        assert float(plan.loads[mesh_name][coord]) == plan.operations
    assert found[0].balance(mesh_name) < 1.35
    # Each domain on its own would give its odd matrix to the first rank of all.
    assert max(plan.operations for plan in found) < 1.35 * found[0].loads[mesh_name].mean()


def test_uneven_groups_of_experts_agree_on_the_loads():
    mesh = AbstractMesh(("ep", "dp"), (2, 2))
    parameters = [((3, 32, 16), (Shard(0), Shard(1))), ((32, 16), (Replicate(), Shard(0)))] * 3
    found = [
        build_plan(entries(*parameters, mesh=mesh), coordinate=coord)
        for coord in mesh.coordinates()
    ]
    (mesh_name,) = found[0].loads
    assert all(torch.equal(p.loads[mesh_name], found[0].loads[mesh_name]) for p in found)


def test_measured_costs_replace_operations():
    mesh = AbstractMesh(("dp",), (2,))
    parameters = [((8, 8), (Shard(0),)), *[((8, 4), (Shard(0),))] * 4]
    made = entries(*parameters, mesh=mesh)
    costs = {(8, 8): 1.0, (8, 4): 10.0}
    plan = build_plan(made, coordinate=(0,), costs=costs)
    assert sorted(plan.loads["mesh0 (dp:2)"].tolist()) == [20.0, 21.0]
    assert plan.digest != build_plan(made, coordinate=(0,)).digest
    with pytest.raises(MuonError, match=r"'p1' holds 8 x 4 matrices, for which costs has no"):
        build_plan(made, coordinate=(0,), costs={(8, 8): 1.0})


def test_a_cap_bounds_what_is_staged_at_a_time():
    mesh = AbstractMesh(("dp",), (2,))
    made = entries(*[((64, 64), (Shard(0),))] * 16, mesh=mesh)
    whole = build_plan(made, coordinate=(0,))
    capped = build_plan(made, coordinate=(0,), max_batch_elements=4 * 64 * 64)
    assert [len(p.batches) for p in (whole, capped)] == [1, 8]
    # Gathered in bfloat16, with flags and padding.
    assert 2 * 16 * 64 * 64 <= whole.workspace_bytes["staging"] < 2.2 * 16 * 64 * 64
    assert capped.workspace_bytes["staging"] < whole.workspace_bytes["staging"] / 4
    assert "bytes of buffers: staging" in str(capped)


def test_kinds_of_one_parameter_have_one_replica_owner():
    mesh = AbstractMesh(("r", "dp"), (2, 2))
    view = MatrixView("(x d) m -> (x d) m", x=(4, 1, 1), d=8)
    how = Orthogonalization(5, "asym5", 1e-7, torch.bfloat16)
    layout = Layout(mesh, (Replicate(), Shard(0)), (48, 16))
    made = [
        Entry(index, f"p{index}", layout, v, torch.float32, torch.device("cpu"), how, kind)
        for index in range(5)
        for kind, v in enumerate(view.kinds((48, 16)))
    ]
    owned = [build_plan(made, coordinate=(replica, 0)).owned for replica in (0, 1)]
    assert owned[0] | owned[1] == set(range(5))
    assert not owned[0] & owned[1]
