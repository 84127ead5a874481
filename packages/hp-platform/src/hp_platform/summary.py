"""Totals over a ledger, and plain-text tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hp_platform.records import Record
from hp_platform.topology import Tier


@dataclass(frozen=True)
class SummaryLine:
    """Totals of the records that share tier, axis, phase and operation.

    Attributes:
        count: number of collectives.
        bytes: sum of their payloads; crossing: sum of what must cross between fast domains.
    """

    tier: Tier
    axis: str
    phase: str
    operation: str
    count: int
    bytes: int
    crossing: int


@dataclass(frozen=True)
class Summary:
    """Totals by tier, axis, phase and operation, in order of first occurrence; `str()` is a table.

    `summary.where(tier=..., axis=..., phase=..., operation=...)` is the part that fits, with
    totals of its own.
    """

    lines: tuple[SummaryLine, ...]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Summary:
        """Adds up records."""
        totals: dict[tuple[Tier, str, str, str], tuple[int, int, int]] = {}
        for record in records:
            key = (record.tier, record.axis, record.phase, record.operation)
            count, size, crossing = totals.get(key, (0, 0, 0))
            totals[key] = (count + 1, size + record.bytes, crossing + record.crossing)
        return cls(tuple(SummaryLine(*key, *total) for key, total in totals.items()))

    @property
    def count(self) -> int:
        """Number of collectives."""
        return sum(line.count for line in self.lines)

    @property
    def bytes(self) -> int:
        """Sum of the payloads."""
        return sum(line.bytes for line in self.lines)

    @property
    def crossing(self) -> int:
        """Sum of the bytes that must cross between fast domains on this rank's account."""
        return sum(line.crossing for line in self.lines)

    def where(
        self,
        *,
        tier: Tier | None = None,
        axis: str | None = None,
        phase: str | None = None,
        operation: str | None = None,
    ) -> Summary:
        """The lines that fit every argument that is given; empty where none does."""
        return Summary(
            tuple(
                line
                for line in self.lines
                if tier in (None, line.tier)
                and axis in (None, line.axis)
                and phase in (None, line.phase)
                and operation in (None, line.operation)
            )
        )

    def __getitem__(self, key: tuple[Tier, str, str]) -> Summary:
        """What shares (tier, axis, operation), in all phases.

        Raises:
            KeyError: there is nothing of the kind.
        """
        tier, axis, operation = key
        found = self.where(tier=tier, axis=axis, operation=operation)
        if not found.lines:
            raise KeyError(key)
        return found

    def __str__(self) -> str:
        header = ("tier", "axis", "phase", "operation", "count", "bytes", "crossing")
        rows = [
            (
                *(line.tier.value, line.axis, line.phase or "-", line.operation),
                *(f"{number:,}" for number in (line.count, line.bytes, line.crossing)),
            )
            for line in self.lines
        ]
        totals = (f"{number:,}" for number in (self.count, self.bytes, self.crossing))
        rows.append(("total", "", "", "", *totals))
        return format_table(header, rows, numeric=3)


def table_of(records: Iterable[Record]) -> str:
    """One line for every record."""
    header = (
        "#", "operation", "axis", "tier", "dtype", "aligned", "asked by", "ranks", "bytes",
        "crossing", "issued ms", "waited ms", "done ms", "issue", "wait", "done",
    )  # fmt: skip
    rows = [
        (
            str(r.index),
            r.operation,
            r.axis,
            r.tier.value,
            str(r.dtype).removeprefix("torch.") if r.dtype else "-",
            "yes" if r.aligned else "no",
            str(r.origin),
            str(r.axis_size),
            f"{r.bytes:,}",
            f"{r.crossing:,}",
            *(_milliseconds(seconds) for seconds in (r.issued, r.waited, r.completed)),
            *(_number(order) for order in (r.issue_order, r.wait_order, r.complete_order)),
        )
        for r in records
    ]
    return format_table(header, rows, numeric=9)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: int) -> str:
    """A plain-text table whose last `numeric` columns are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows)]
    first_numeric = len(header) - numeric
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if i >= first_numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _number(order: int | None) -> str:
    return "-" if order is None else str(order)
