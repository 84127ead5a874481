"""The one form of a refusal: operator, what is wrong, the operands' layouts, remedy."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Placement, RaggedShard, describe
from hp_platform.errors import HPError


class OperatorError(HPError):
    """An operator cannot be applied to operands laid out like these.

    Not a TypeError: Python's `a + b` would turn that into "unsupported operand types".
    """


def operator_error(
    operator: str,
    what: str,
    layouts: Sequence[Layout],
    names: Sequence[str] | None = None,
    remedy: str = "",
) -> OperatorError:
    """The one form of a refusal: operator, what is wrong, operands' layouts, remedy."""
    names = names or [f"operand {i}" for i in range(len(layouts))]
    operands = "; ".join(f"{name}: {show(layout)}" for name, layout in zip(names, layouts))
    text = f"{operator}: {what}. Operands: {operands or 'none'}."
    return OperatorError(f"{text} Remedy: {remedy}." if remedy else text)


def remedy_of_conflict(placements: Sequence[Placement], pattern: str) -> str:
    """What to do where operands are cut in ways that do not fit together."""
    ragged = [p for p in placements if isinstance(p, RaggedShard) and len(p.dims) == 1]
    if len(ragged) > 1 and len({p.dims for p in ragged}) == 1:
        (dim,) = ragged[0].dims
        return (
            "where they are slices of one tensor, cut that in sections, "
            f"SectionedShard({dim}, sizes of the slices), so that each rank has its part of every "
            f"slice, or redistribute each slice to Shard({dim})"
        )
    return (
        "redistribute the operand that is wrong before the operator, to the cut of the others or "
        f"to Replicate() (pattern {pattern!r})"
    )


def show(layout: Layout) -> str:
    """Shape and placements by axis name, e.g. `(4, 8) dp=S(0) tp=R/grad P(sum)`."""
    parts = []
    for name, value, grad in zip(
        layout.abstract_mesh.axis_names, layout.placements, layout.grad_placements
    ):
        special = isinstance(value, Replicate) and isinstance(grad, Partial)
        parts.append(f"{name}={describe(value)}{'/grad ' + describe(grad) if special else ''}")
    return f"{tuple(layout.shape)} {' '.join(parts)}"
