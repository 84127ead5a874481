"""Parameters that PyTorch's tensor parallelism (`parallelize_module`) has made its DTensors.

Their local tensors travel as any other. While its unit is gathered, the module sees a DTensor of
PyTorch's over the gathered form, on the tensor-parallel mesh, and its hooks and operators work as
before. The shards are laid out on the data axes and that mesh together, as under FSDP2.

`_get_root_mesh`, `_concatenate` and `_set_sequence_nr` are private to PyTorch, which has no public
way to join meshes or to order autograd's nodes: `test_agreement` fails if they change.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement, Replicate, Shard

from hp_dtensor.layout import Layout
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError

_FIRST = 2**64 - 1
"""Autograd runs nodes in the order of their numbers, greatest first."""


@frozen(eq=False)
class TorchParallel:
    """PyTorch's description of a parameter on a tensor-parallel mesh.

    Attributes:
        mesh: the tensor-parallel mesh, without the data axes.
        placements: one for each of its axes, `Shard` or `Replicate`.
        shape, stride: of the global tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: TorchDTensor, name: str) -> TorchParallel:
        """Checks that its local tensor can be cut further.

        Raises:
            ShardingError: it is placed otherwise than `Shard` or `Replicate`.
        """
        for placement in parameter.placements:
            if type(placement) not in (Shard, Replicate):
                raise ShardingError(
                    f"parameter {name!r} is a DTensor of PyTorch's placed {placement!r}; "
                    "fully_shard takes those that parallelize_module has placed Shard or Replicate"
                )
        return cls(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())

    def layout(self, name: str, data: DataMesh) -> Layout:
        """Its layout on the data axes, over which it is replicated, and the mesh together.

        Raises:
            ShardingError: the two meshes share an axis, or are no slices of one.
        """
        own, others = self.mesh.mesh_dim_names, data.mesh.mesh_dim_names
        shared = sorted(set(own or ()) & set(others or ()))
        if shared:
            raise ShardingError(
                f"parameter {name!r} is a DTensor of PyTorch's on mesh {self.mesh}, which has the "
                f"data axes {shared} of {data.mesh} that fully_shard was given: it has been placed "
                "over the data ranks already. Expected one on the other axes only: give "
                "parallelize_module or distribute_tensor the slice mesh['tp'], or fully_shard the "
                "plain module"
            )
        apart = own is not None and others is not None
        if not apart or self.mesh._get_root_mesh() != data.mesh._get_root_mesh():
            raise ShardingError(
                f"parameter {name!r} is a DTensor of PyTorch's on mesh {self.mesh}, and "
                f"fully_shard was given {data.mesh}. FSDP requires the DP and model parallel TP/EP "
                "mesh to have the same parent mesh and no axis in common: make one mesh with named "
                "axes, such as ('dp', 'tp'), apply parallelize_module on mesh['tp'], and "
                "fully_shard on mesh['dp']"
            )
        whole = _together(data.mesh, self.mesh)
        placements = [*[Replicate()] * data.mesh.ndim, *self.placements]
        return Layout(whole, placements, self.shape)

    def over(self, full: Tensor) -> TorchDTensor:
        """A DTensor of PyTorch's over the gathered local tensor; gradients flow back to it."""
        with torch.inference_mode(False), torch.enable_grad():
            made = TorchDTensor.from_local(
                full,
                self.mesh,
                self.placements,
                run_check=False,
                shape=self.shape,
                stride=self.stride,
            )
        if made.grad_fn is not None:
            # As the accumulation of a leaf, it runs before anything else that is ready: gradients
            # are complete when backward leaves the unit.
            made.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
        return made


def local_parameter(parameter: Any) -> nn.Parameter:
    """The local tensor of a DTensor of PyTorch's, as a parameter of its own over its memory."""
    return nn.Parameter(parameter.detach().to_local(), requires_grad=parameter.requires_grad)


def _together(data: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Both meshes' axes in one mesh, data axes first; one object for all units of a model."""
    root = data._get_root_mesh()
    names = (*(data.mesh_dim_names or ()), *(other.mesh_dim_names or ()))
    if root.mesh_dim_names == names:
        return root
    # Kept by the root mesh, with which it ends.
    known: dict[tuple[str, ...], DeviceMesh] = root.__dict__.setdefault("_hp_joined", {})
    if names not in known:
        known[names] = DeviceMesh._concatenate([data, other])
    return known[names]
