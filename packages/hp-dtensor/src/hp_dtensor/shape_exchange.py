"""The global shape of a tensor of which every rank knows only its own part.

`DTensor.from_local` without a shape: ranks exchange the shapes of their parts, one small
collective per sharded axis, and all of them learn together whether the parts make up a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import mesh_axis
from hp_dtensor.placements import describe, is_sharding, sharded_dims
from hp_platform.collectives import Origin, gather_objects

_ORIGIN = Origin("hp_dtensor", "redistribute")


def exchanged_shape(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """The global shape as the sum of the ranks' sizes along every sharded dim."""
    shape = list(local.shape)
    for axis, dim in reversed(_sharded_axes(local, mesh, placements)):
        sent = (tuple(shape), local.dtype)
        received = gather_objects(sent, mesh_axis(mesh, axis), origin=_ORIGIN)
        everyone = [each for each, _ in received]
        dtypes = [dtype for _, dtype in received]
        if len(set(dtypes)) > 1:
            raise ValueError(
                f"from_local: along mesh axis {axis} the parts have dtypes {dtypes}; convert them "
                "to one"
            )
        rest = {each[:dim] + each[dim + 1 :] for each in everyone}
        if len(rest) > 1:
            raise ValueError(
                f"from_local: along mesh axis {axis} the parts have shapes {everyone}, which "
                f"differ in other dims than the sharded dim {dim}"
            )
        shape[dim] = sum(each[dim] for each in everyone)
    return _chunk_shaped(local, mesh, placements, shape)


def _sharded_axes(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[int, int]]:
    """Mesh axes that cut a dim, each with that dim; refuses what gives no shape."""
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"from_local: one placement is needed per mesh axis; the mesh has {mesh.ndim} axes, "
            f"found {len(placements)}: {describe(placements)}"
        )
    found = []
    for axis, placement in enumerate(placements):
        if not is_sharding(placement):
            continue
        dims = sharded_dims(placement)
        if len(dims) > 1:
            raise ValueError(
                f"from_local: {describe(placement)} needs the global shape; pass shape="
            )
        if not -local.ndim <= dims[0] < local.ndim:
            raise ValueError(
                f"from_local: mesh axis {axis}: {describe(placement)} names dim {dims[0]}, but the "
                f"local tensor has {local.ndim} dims"
            )
        found.append((axis, dims[0] % local.ndim))
    return found


def _chunk_shaped(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: list[int]
) -> tuple[int, ...]:
    """All ranks learn together whether every part is what the layout says."""
    layout = Layout(mesh, placements, shape)
    fits = tuple(local.shape) == layout.local_shape()
    problems = [(layout.coordinate(), tuple(local.shape))] if not fits else []
    for axis in range(mesh.ndim):
        found = gather_objects(problems, mesh_axis(mesh, axis), origin=_ORIGIN)
        problems = sorted({problem for each in found for problem in each})
    if problems:
        raise ValueError(
            f"from_local: parts at coordinates {problems} (coordinate, shape) are not what "
            f"{layout} gives there; cut them as torch.chunk does, or pass RaggedShard and shape="
        )
    return tuple(shape)
