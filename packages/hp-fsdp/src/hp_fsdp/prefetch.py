"""Which units to gather ahead of time: recorded order, or the order the user set.

The order of the first forward and of the first backward is recorded; from then on, entering a
unit issues the gathers of the next `depth` units in that order. Recomputation neither records nor
prefetches: its order differs, and the units it would gather are about to be released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_fsdp.unit import Unit


class GatherOrder:
    """The order in which one phase, "forward" or "backward", needs the units.

    Attributes:
        depth: how many units are gathered ahead; 0 switches prefetching off.
    """

    def __init__(self, phase: str, depth: int = 1) -> None:
        self.phase = phase
        self.depth = depth
        self._recorded: list[Unit] = []
        self._position: dict[Unit, int] = {}
        self._complete = False

    @property
    def recorded(self) -> tuple[Unit, ...]:
        return tuple(self._recorded)

    def enter(self, unit: Unit, explicit: list[Unit] | None) -> None:
        """`unit` is gathered and about to compute: record it, and gather what comes next."""
        if not self._complete and unit not in self._position:
            self._position[unit] = len(self._recorded)
            self._recorded.append(unit)
        for following in self._following(unit) if explicit is None else explicit:
            following.gather(self.phase)

    def complete(self) -> None:
        """The phase has ended: what was recorded is the order from now on."""
        self._complete = self._complete or bool(self._recorded)

    def restart(self) -> None:
        """Forgets an order that was only recorded in part."""
        if not self._complete:
            self._recorded.clear()
            self._position.clear()

    def _following(self, unit: Unit) -> list[Unit]:
        if not self._complete or unit not in self._position:
            return []
        start = self._position[unit] + 1
        return self._recorded[start : start + self.depth]
