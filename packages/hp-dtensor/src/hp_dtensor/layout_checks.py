"""What `hp_dtensor.layout.Layout` takes and refuses: which placements fit a mesh and a shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hp_dtensor.cuts import Cut, Ragged
from hp_dtensor.holdings import Coordinate, Holdings, coordinates_along
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


def check_whole_units(
    holdings: Holdings, mesh: AbstractMesh, placements: tuple[Placement, ...]
) -> None:
    """What a RaggedShard divides must be whole units of it, at every coordinate."""
    flat = holdings.flat_dims if holdings.flattening else 0
    if flat:
        leading = [cut for cuts in holdings.own[:flat] for cut in cuts]
        for coord in coordinates_along([*leading, *holdings.flattening]):
            sizes = holdings.flattened_sizes(coord)
            _check_units(holdings.flattening, sizes, coord, mesh, placements, holdings.shape)
    for dim, cuts in enumerate(holdings.own):
        if any(type(cut) is Ragged for cut in cuts):
            for coord in coordinates_along(cuts):
                sizes = holdings.sizes(dim, coord)
                _check_units(cuts, sizes, coord, mesh, placements, holdings.shape)


def _check_units(
    cuts: Sequence[Cut],
    sizes: Sequence[int],
    coord: Coordinate,
    mesh: AbstractMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> None:
    for cut, size in zip(cuts, sizes):
        if isinstance(cut, Ragged) and not cut.divides(size):
            raise ValueError(
                f"mesh axis {mesh.axis_names[cut.axis]!r}: {describe(placements[cut.axis])} needs "
                f"whole units, but {size} elements over {sum(cut.units)} units remain in shape "
                f"{shape} at coordinate {coord + (0,) * (mesh.ndim - len(coord))}"
            )


def partial_extreme(placements: tuple[Placement, ...]) -> bool:
    """Whether a maximum or minimum over ranks is pending, of which there is no gradient."""
    return any(is_partial(p) and p.reduce_op not in ("sum", "avg") for p in placements)
