"""What cannot be sharded, and what is not available, is refused by name."""

import pytest
import torch
from small_networks import Net, meshes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import hp_fsdp
from hp_fsdp import DataParallelMeshDims as Dims
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.testing import run_ranks


@pytest.mark.ranks
def test_what_cannot_be_sharded_is_refused_by_name():
    def body(rank):
        mesh = meshes(4)[0]

        def refuses(match, module, **kwargs):
            with pytest.raises((hp_fsdp.ShardingError, hp_fsdp.NotAvailableError), match=match):
                fully_shard(module, **{"mesh": mesh, **kwargs})

        outer = Net()
        fully_shard(outer, mesh=mesh)
        refuses("'norm.weight'.*submodules before", outer.blocks[0])
        refuses("already sharded", outer)
        with pytest.raises(AssertionError, match="only be applied to a module once"):
            fully_shard(outer, mesh=mesh)
        tied = Net(tied=True)
        fully_shard(tied.embed, mesh=mesh)
        refuses("'weight'.*fully_shard\\(\\[first, second\\]\\)", tied.head)
        left_over = Net(tied=True)
        fully_shard(left_over.embed, mesh=mesh)
        fully_shard(left_over, mesh=mesh, ignored_params={left_over.head.weight})
        with pytest.raises(hp_fsdp.UsageError, match=r"'head.weight' was tied"):
            left_over(torch.ones(1, 2, dtype=torch.long))
        refuses("empty list", [])
        held = nn.Linear(2, 2)
        held.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
        refuses("'weight' is a TwoTensor: tensor subclasses", held)
        gathers_itself = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
        gathers_itself[0].weight._local_tensor.fsdp_pre_all_gather = lambda *args: None
        for _ in range(2):
            with pytest.raises(hp_fsdp.NotAvailableError, match=r"'0.weight' has fsdp_pre_all_gat"):
                gathers_itself(torch.ones(1, 2))
        refuses("ModuleList", nn.ModuleList([nn.Linear(2, 2)]))
        linear = nn.Linear(2, 2)
        refuses("contains it", [nn.Sequential(linear), linear])
        scalar = nn.Linear(2, 2)
        scalar.scale = nn.Parameter(torch.tensor(1.0))
        refuses("Shard dim 0 is invalid for 0D", scalar, shard_placement_fn=lambda p: Shard(0))
        refuses(
            "Shard dim 3 is invalid for 2D", nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(3)
        )
        refuses("shard_placement_fn returned", nn.Linear(2, 2), shard_placement_fn=lambda p: 0)
        refuses("factor of 4", nn.Linear(2, 2), reshard_after_forward=3)
        refuses("a bool or an int", nn.Linear(2, 2), reshard_after_forward="yes")
        refuses("import it from hp_fsdp", nn.Linear(2, 2), offload_policy=TorchOffload())
        refuses("must be a torch.distributed.device_mesh.DeviceMesh", nn.Linear(2, 2), mesh=4)
        refuses(
            "import MixedPrecisionPolicy from hp_fsdp", nn.Linear(2, 2), mp_policy=TorchPolicy()
        )
        refuses("MixedPrecisionPolicy, found builtins.NoneType", nn.Linear(2, 2), mp_policy=None)
        refuses("ignored_params must be a set", nn.Linear(2, 2), ignored_params={"weight"})
        for factor in (0, float("nan"), float("inf"), "2"):
            with pytest.raises(hp_fsdp.ShardingError, match="must be a positive number"):
                outer.set_gradient_divide_factor(factor)
        for depth in (-1, 1.5, "1"):
            with pytest.raises(hp_fsdp.ShardingError, match="integers >= 0"):
                outer.set_prefetch_depth(depth)
        with pytest.raises(AssertionError, match="2D mesh for HSDP with mesh_dim_names specified"):
            fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2)))
        prefetchers = (
            outer.set_modules_to_forward_prefetch,
            outer.set_modules_to_backward_prefetch,
        )
        for call in (*prefetchers, hp_fsdp.share_comm_ctx):
            with pytest.raises(ValueError, match=r"Expects (list of )?FSDPModules? but got"):
                call([linear])
        with pytest.raises(ValueError, match="does not have a method encode"):
            hp_fsdp.register_fsdp_forward_method(outer, "encode")
        for wrong, error in ((True, TypeError), (0, ValueError)):
            with pytest.raises(error, match="max_input_buffers must be"):
                outer.set_reduce_scatter_max_input_buffers(wrong)
        outer.set_reduce_scatter_max_input_buffers(1)
        within = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh))
        fully_shard(within, mesh=mesh)(torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="unit '0'; call it on the root module"):
            within[0].reset_iter_state()
        cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
        refuses("expects a 1D or 2D DeviceMesh", nn.Linear(2, 2), mesh=cube)
        for dims, match in (
            (Dims(replicate="dp_shard"), "name one axis to shard over"),
            (Dims(shard=("a", "b")), "name one axis to shard over"),
            (Dims(shard="dp"), "Mesh dim name 'dp' not found"),
            (Dims(shard="a", replicate="c"), "'c' must come before 'a'"),
            ("a", "dp_mesh_dims must be a DataParallelMeshDims"),
        ):
            refuses(match, nn.Linear(2, 2), mesh=cube, dp_mesh_dims=dims)
        refuses(
            "mesh_dim_names when dp_mesh_dims", nn.Linear(2, 2), mesh=None, dp_mesh_dims=Dims("dp")
        )
        named = fully_shard(nn.Linear(2, 2), mesh=cube, dp_mesh_dims=Dims("c", replicate="b"))
        assert named.weight.device_mesh == cube["b", "c"]
        assert named.weight.placements == (Replicate(), Shard(0))
        with torch.device("meta"):
            meta = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(hp_fsdp.ShardingError, match=r"on meta device: \['weight', 'bias'\]"):
            meta(torch.ones(1, 4))
        with pytest.raises(hp_fsdp.NotAvailableError, match="set_all_reduce_hook"):
            outer.set_all_reduce_hook(print, stream=object())
        with pytest.raises(hp_fsdp.ShardingError, match="needs a function"):
            outer.set_all_reduce_hook(None)
        with pytest.raises(hp_fsdp.ShardingError, match="param_dtype"):
            MixedPrecisionPolicy(param_dtype=torch.int32)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_a_loss_that_bypasses_the_outputs_is_refused():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.aside = self.layer(x).sum()
            return x.detach()

    def body(rank):
        model = nn.Sequential(Leaky())
        fully_shard(model[0], mesh=meshes(2)[0], reshard_after_forward=True)
        model(torch.ones(1, 4))
        with pytest.raises(hp_fsdp.UsageError, match=r"without passing\s+through an output"):
            model[0].aside.backward()

    run_ranks(body, 2)


REFUSED = {
    "set_custom_all_gather": None,
    "set_custom_reduce_scatter": None,
    "set_allocate_memory_from_process_group_for_comm": True,
    "set_symm_mem_for_comm": "NCCL",
    "set_separate_reduce_scatter_group": True,
}


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_of_fsdp2_that_is_not_available_says_so(method):
    with pytest.raises(hp_fsdp.NotAvailableError, match=rf"FSDPModule\.{method} is not available"):
        getattr(hp_fsdp.FSDPModule(), method)(REFUSED[method])
