"""Mesh axes as one rank sees them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_platform import MeshAxis, Tier, Topology, TopologyError, all_gather
from hp_platform.testing import run_ranks


def fields(axis):
    return axis.name, axis.size, axis.rank, axis.ranks, axis.tier, axis.process_group is None


@pytest.mark.ranks
def test_axes_of_a_mesh_have_ranks_in_coordinate_order():
    topology = Topology.from_hosts(["a", "a", "b", "b"])

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        axes = [MeshAxis.of_mesh(mesh, axis, topology) for axis in ("dp", "tp", 0, -1)]
        assert all(axis.backend == "gloo" and axis.device.type == "cpu" for axis in axes)
        assert axes[0] == axes[2]
        assert axes[1] == axes[3]
        assert axes[0].global_rank == dist.get_rank()
        return [fields(axis) for axis in axes[:2]]

    assert run_ranks(body, 4)[3] == [
        ("dp", 2, 1, (1, 3), Tier.SLOW, False),
        ("tp", 2, 1, (2, 3), Tier.FAST, False),
    ]


@pytest.mark.ranks
def test_an_axis_of_size_one_has_no_group():
    def body():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        return fields(MeshAxis.of_mesh(mesh, "tp"))

    assert run_ranks(body, 2)[1] == ("tp", 1, 0, (1,), Tier.LOCAL, True)
    assert run_ranks(lambda: fields(MeshAxis.of_group()), 1)[0][-1]


@pytest.mark.ranks
def test_a_slice_of_a_mesh_gives_the_same_axes():
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return MeshAxis.of_mesh(mesh["tp"], "tp") == MeshAxis.of_mesh(mesh, "tp")

    assert run_ranks(body, 4) == [True] * 4


@pytest.mark.ranks
def test_a_mesh_whose_group_orders_ranks_otherwise_is_refused():
    def body():
        mesh = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("dp",))
        with pytest.raises(TopologyError) as caught:
            MeshAxis.of_mesh(mesh, "dp")
        return str(caught.value)

    assert "lists ranks (1, 0) but its process group numbers them (0, 1)" in run_ranks(body, 2)[0]


@pytest.mark.ranks
def test_an_unknown_axis_and_a_foreign_rank_are_refused():
    def body(rank):
        mesh = DeviceMesh("cpu", torch.tensor([0]), mesh_dim_names=("dp",))
        for axis, text in (("tp", r"none is named 'tp'"), (1, "no axis 1")):
            with pytest.raises(TopologyError, match=text):
                MeshAxis.of_mesh(mesh, axis)
        if rank == 1:
            with pytest.raises(TopologyError, match="rank 1 is not part of the mesh"):
                MeshAxis.of_mesh(mesh, "dp")
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(TopologyError, match="rank 1 is not a member"):
                MeshAxis.of_group(group)
        return True

    assert run_ranks(body, 2) == [True, True]


def test_an_axis_without_a_process_group_is_refused():
    with pytest.raises(TopologyError, match="init_process_group"):
        MeshAxis.of_group()
    with pytest.raises(TopologyError, match="a process group is needed"):
        MeshAxis("dp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"))
    with pytest.raises(TopologyError, match="do not fit"):
        MeshAxis("dp", 1, 1, (0,), Tier.LOCAL, torch.device("cpu"))


@pytest.mark.ranks
def test_a_subset_of_an_axis_has_its_own_group_and_tier():
    topology = Topology.from_hosts(["a", "a", "b", "b"])

    def body():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        axis = MeshAxis.of_mesh(mesh, "dp", topology)
        half = axis.subset([(0, 1), (2, 3)], topology)
        seen = torch.tensor([dist.get_rank()])
        gathered = all_gather(seen, half).wait().tolist()
        assert axis.subset([(0, 1, 2, 3)], topology) is axis
        assert axis.subset([(0,), (1,), (2,), (3,)], topology).process_group is None
        with pytest.raises(TopologyError, match="exactly once"):
            axis.subset([(0, 1), (1, 2, 3)])
        return fields(half), gathered

    assert run_ranks(body, 4)[3] == (("dp", 2, 1, (2, 3), Tier.FAST, False), [2, 3])


@pytest.mark.ranks
@pytest.mark.parametrize("axis", [None, ("dp", "tp")])
def test_what_is_neither_a_name_nor_an_index_is_no_axis(axis):
    def body():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(TopologyError, match="one name or one index"):
            MeshAxis.of_mesh(mesh, axis)

    run_ranks(body, 2)
