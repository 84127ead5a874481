"""What a benchmark reports: rows of ours against a peer, and targets that hold or do not."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, field, frozen
from rich import box
from rich.console import Console
from rich.table import Table


@frozen
class Row:
    """One measured pair; `ratio` below 1 means that ours needs less."""

    case: str
    ours: float
    peer: str
    theirs: float
    unit: str
    ratio: float = field(init=False)

    @ratio.default
    def _ratio(self) -> float:
        return self.ours / self.theirs


@frozen
class Target:
    """A value that should not exceed its limit."""

    name: str
    value: float
    limit: float
    holds: bool = field(init=False)

    @holds.default
    def _holds(self) -> bool:
        return self.value <= self.limit


def _rows(values: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(values)


def _targets(values: Iterable[Target]) -> tuple[Target, ...]:
    return tuple(values)


@frozen
class BenchResult:
    """Everything one benchmark measured."""

    bench: str
    rows: tuple[Row, ...] = field(converter=_rows)
    targets: tuple[Target, ...] = field(converter=_targets)

    def to_json(self) -> str:
        """One JSON object."""
        values: dict[str, Any] = {
            "bench": self.bench,
            "machine": machine(),
            "rows": [_rounded(asdict(row)) for row in self.rows],
            "targets": [_rounded(asdict(target)) for target in self.targets],
        }
        return json.dumps(values)

    def print(self, console: Console) -> None:
        """Rows and targets as tables; a target that does not hold is shown as such."""
        found = machine()
        table = Table(
            title=f"{self.bench}: {found['cpu']}, {found['cores']} cores, torch {found['torch']}",
            box=box.SIMPLE_HEAD,
        )
        for column in ("case", "ours", "peer", "theirs", "unit", "ratio"):
            words = column in ("case", "peer")
            # Numbers are never cut; a narrow terminal breaks the words instead.
            table.add_column(column, justify="left" if words else "right", no_wrap=not words)
        for row in self.rows:
            numbers = (f"{row.ours:.4g}", row.peer, f"{row.theirs:.4g}", row.unit)
            table.add_row(row.case, *numbers, f"{row.ratio:.3f}")
        console.print(table)
        for target in self.targets:
            verdict = "holds" if target.holds else "DOES NOT HOLD"
            console.print(f"{target.name}: {target.value:.3f}, limit {target.limit:g}: {verdict}")


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def machine() -> dict[str, Any]:
    return {"cpu": _processor(), "cores": os.cpu_count(), "torch": torch.__version__.split("+")[0]}


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
