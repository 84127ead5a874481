"""What a plan is asked for: the mesh by names and sizes, and the options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from hp_dtensor.mesh import AbstractMesh
from hp_planner.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TENSOR_AXIS = "tp"
EXPERT_AXIS = "ep"
CONTEXT_AXIS = "cp"
MODEL_AXES = (TENSOR_AXIS, EXPERT_AXIS, CONTEXT_AXIS)
DATA_AXES = ("dp_replicate", "dp_shard")


@frozen
class Settings:
    """Mesh and options, checked when made.

    Raises:
        PlanError: an axis has an unknown name.
    """

    mesh: AbstractMesh
    sequence_parallel: bool = True
    loss_parallel: bool = False

    def __attrs_post_init__(self) -> None:
        known = (*DATA_AXES, *MODEL_AXES)
        unknown = [name for name in self.mesh.axis_names if name not in known]
        if unknown:
            raise PlanError(
                f"mesh ({self.mesh}): unknown axes {', '.join(unknown)}; the planner knows "
                f"{', '.join(known)}. Rename the mesh's axes to these"
            )

    @property
    def tensor_size(self) -> int:
        """Ranks of the tensor-parallel axis; 1 where the mesh has none."""
        return self.size(TENSOR_AXIS)

    @property
    def expert_size(self) -> int:
        """Ranks among which experts are shared; 1 where the mesh has no such axis."""
        return self.size(EXPERT_AXIS)

    @property
    def context_size(self) -> int:
        """Ranks among which sequences are shared; 1 where the mesh has no such axis."""
        return self.size(CONTEXT_AXIS)

    @property
    def model_size(self) -> int:
        """Ranks of all model axes together."""
        return self.tensor_size * self.expert_size * self.context_size

    def size(self, axis: str) -> int:
        """Ranks of an axis; 1 where the mesh has none of that name."""
        return self.mesh.size(axis) if axis in self.mesh.axis_names else 1

    @property
    def model_axes(self) -> tuple[str, ...]:
        return tuple(name for name in self.mesh.axis_names if name in MODEL_AXES)


def read_mesh(mesh: DeviceMesh | AbstractMesh | Mapping[str, int]) -> AbstractMesh:
    """Names and sizes of any mesh.

    Raises:
        PlanError: a size or a name is not usable.
    """
    try:
        return AbstractMesh.of(mesh)
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"mesh: {error}") from error
