"""What `hp_dtensor.layout.Layout` takes and refuses: which placements fit a mesh and a shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    SectionedShard,
    default_grad_placement,
    describe,
    is_partial,
    is_replicate,
    normalize_placement,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def as_shape(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


def as_placements(value: Iterable[Placement]) -> tuple[Placement, ...]:
    return tuple(value)


def as_gradients(value: Iterable[Placement] | None) -> tuple[Placement, ...]:
    # None stays None until the value's placements are known.
    return None if value is None else tuple(value)  # type: ignore[return-value]


def as_mesh(value: DeviceMesh | AbstractMesh | Mapping[str, int]) -> DeviceMesh | AbstractMesh:
    return AbstractMesh.of(value) if isinstance(value, Mapping) else value


def check_count(what: str, placements: tuple[Placement, ...], mesh: AbstractMesh) -> None:
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"Layout: one of {what} is needed per mesh axis; the mesh {mesh} has {mesh.ndim} "
            f"axes, found {len(placements)}: {describe(placements)}"
        )


def normalized(placement: Placement, axis: str, ndim: int) -> Placement:
    try:
        return normalize_placement(placement, ndim)
    except (TypeError, ValueError) as error:
        raise type(error)(f"mesh axis {axis!r}: {error}") from None


def may_be_gradient(value: Placement, gradient: Placement) -> bool:
    if is_replicate(value):
        return is_replicate(gradient) or (
            is_partial(gradient) and gradient.reduce_op in ("sum", "avg")
        )
    return gradient == default_grad_placement(value)


def check_reductions(placements: tuple[Placement, ...]) -> None:
    found = {p.reduce_op for p in placements if is_partial(p)}
    if len(found) > 1 and found != {"sum", "avg"}:
        raise ValueError(
            f"reductions {sorted(found)} on different mesh axes do not commute: "
            f"{describe(placements)}; redistribute one of them to Replicate first"
        )


def check_placement(placement: Placement, axis: str, size: int, shape: tuple[int, ...]) -> None:
    if type(placement) is SectionedShard and sum(placement.sections) != shape[placement.dim]:
        raise ValueError(
            f"mesh axis {axis!r}: sections of {describe(placement)} sum to "
            f"{sum(placement.sections)}, but dim {placement.dim} of shape {shape} has size "
            f"{shape[placement.dim]}"
        )
    if type(placement) is RaggedShard and len(placement.local_units) != size:
        raise ValueError(
            f"mesh axis {axis!r}: {describe(placement)} gives shares to "
            f"{len(placement.local_units)} coordinates, but the axis has {size}"
        )


def partial_extreme(placements: tuple[Placement, ...]) -> bool:
    """Whether a maximum or minimum over ranks is pending, of which there is no gradient."""
    return any(is_partial(p) and p.reduce_op not in ("sum", "avg") for p in placements)
