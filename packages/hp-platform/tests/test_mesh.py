"""Meshes that make no more groups than they need, counted where PyTorch makes them."""

import pytest
import torch
import torch.distributed as dist

from hp_platform import MeshAxis, TopologyError, all_reduce, groups, make_mesh
from hp_platform.hccl import HcclGroupOptions
from hp_platform.testing import run_ranks


class Counted:
    """Counts the process groups that are made."""

    def __init__(self):
        self.made = []
        original = dist.new_group

        def new_group(ranks=None, **arguments):
            self.made.append(tuple(ranks))
            return original(ranks, **arguments)

        dist.new_group = new_group


@pytest.mark.ranks
def test_the_same_mesh_again_makes_no_groups_and_axes_of_size_one_never_do():
    def run(rank):
        counted = Counted()
        shape = {"pp": 1, "dp": 2, "tp": 2, "cp": 1}
        meshes = [make_mesh(shape) for _ in range(3)]
        first = len(counted.made)
        axes = [MeshAxis.of_mesh(mesh, name) for mesh in meshes for name in shape]
        halves = [axes[1].subset([(0,), (1,)]) for _ in range(2)]
        whole = make_mesh({"dp": 4, "tp": 1})
        axis = MeshAxis.of_mesh(whole, "dp")
        parts = [axis.subset([(0, 2), (1, 3)]) for _ in range(3)]
        with pytest.raises((AttributeError, RuntimeError), match="axis tp of size 1 has no group"):
            dist.all_reduce(torch.ones(1), group=whole.get_group("tp"))
        total = all_reduce(torch.ones(1), parts[0]).wait().item()
        sub = MeshAxis.of_mesh(meshes[0]["dp", "tp"], "tp")
        return (
            counted.made,
            first,
            [a.process_group is None for a in axes[:4]],
            [a.process_group for a in axes[:4]] == [a.process_group for a in axes[8:]],
            halves[0].process_group,
            axis.process_group is dist.group.WORLD,
            parts[0].process_group is parts[2].process_group,
            total,
            sub == axes[2],
        )

    dp, tp, part = (1, 3), (2, 3), (1, 3)
    assert run_ranks(run, 4)[3] == (
        [dp, tp, part], 2, [True, False, False, True], True, None, True, True, 2.0, True
    )  # fmt: skip


@pytest.mark.ranks
def test_a_destroyed_group_is_not_used_again_nor_replaced_by_one_that_hangs():
    def run(rank):
        first = groups.group_of("dp", (0, 1))
        other = groups.group_of("tp", (0, 1))
        assert other is not first
        assert all_reduce(torch.ones(1), MeshAxis.of_group(other)).wait().item() == 2.0
        dist.destroy_process_group(first)
        for name in ("dp", "cp"):
            with pytest.raises(TopologyError, match="for 'dp' has been destroyed"):
                groups.group_of(name, (0, 1))
        del first
        with pytest.raises(TopologyError, match="for 'dp' has been destroyed"):
            groups.group_of("dp", (0, 1))

    run_ranks(run, 2)


@pytest.mark.ranks
def test_shapes_and_options_that_do_not_fit_are_refused():
    def run():
        for axes in ({"dp": 3}, {}, {"dp": 2, "tp": 0}):
            with pytest.raises(TopologyError, match="the world has 2 ranks; give sizes"):
                make_mesh(axes)
        with pytest.raises(TopologyError, match=r"options for \['tp'\]: the mesh has axes"):
            make_mesh({"dp": 2}, options={"tp": HcclGroupOptions()})
        with pytest.raises(TopologyError, match="HCCL options cannot be given to backend 'gloo'"):
            make_mesh({"dp": 2}, options={"dp": HcclGroupOptions("dp")})

    run_ranks(run, 2)
