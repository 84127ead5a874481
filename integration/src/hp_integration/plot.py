"""The run as one picture: loss over the steps, and when each tier carried which collective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hp_platform.ledger import Record

_COLOURS = {
    "all_gather": "#3b6ea5",
    "reduce_scatter": "#c8553d",
    "all_reduce": "#588157",
    "broadcast": "#e0a100",
    "reduce": "#7d5ba6",
    "all_to_all": "#4a4e69",
}
_OTHER = "#9a9a9a"


def save_picture(
    path: Path,
    *,
    losses: Sequence[tuple[int, float]],
    evaluation: tuple[int, float] | None,
    frequency_loss: float,
    records: Sequence[Record],
    title: str,
) -> Path:
    """Writes a PNG: the loss curve above, the communication timeline of `records` below.

    Args:
        losses: (step, nats a token) of the training batches.
        evaluation: (step, nats a token) of the held-out text.
        frequency_loss: nats a token of the byte- or token-frequency model, drawn as a line.
        records: the ledger's entries of the recorded step; may be empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    figure.suptitle(title)
    _draw_losses(above, losses, evaluation, frequency_loss)
    _draw_timeline(below, records)
    figure.savefig(path, dpi=110)
    return path


def _draw_losses(
    axes: Any,
    losses: Sequence[tuple[int, float]],
    evaluation: tuple[int, float] | None,
    frequency_loss: float,
) -> None:
    axes.plot(*zip(*losses), color="#3b6ea5", label="training loss")
    axes.axhline(frequency_loss, color="#c8553d", linestyle="--", label="token-frequency model")
    if evaluation is not None:
        axes.plot(*evaluation, "o", color="#588157", label="held-out loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.legend()


def _draw_timeline(axes: Any, records: Sequence[Record]) -> None:
    """One lane a tier and mesh axis; a bar from issue to wait."""
    axes.set_title("communication of one training step, from issue to wait")
    axes.set_xlabel("time (ms)")
    if not records:
        axes.text(0.5, 0.5, "no collective was recorded", ha="center", transform=axes.transAxes)
        axes.set_yticks([])
        return
    start = min(record.issued for record in records)
    lanes = sorted({_lane(record) for record in records})
    named: set[str] = set()
    for record in records:
        end = record.issued if record.waited is None else record.waited
        width = max(1000 * (end - record.issued), 0.05)
        label = record.operation if record.operation not in named else None
        named.add(record.operation)
        axes.barh(
            lanes.index(_lane(record)),
            width,
            left=1000 * (record.issued - start),
            height=0.6,
            alpha=0.7,
            color=_COLOURS.get(record.operation, _OTHER),
            label=label,
        )
    axes.set_yticks(range(len(lanes)), [f"{tier}: {axis}" for tier, axis in lanes])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(named), fontsize="small")


def _lane(record: Record) -> tuple[str, str]:
    return record.tier.name.lower(), record.axis
