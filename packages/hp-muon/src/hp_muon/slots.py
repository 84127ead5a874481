"""The parameters of an optimizer in order, with their names and groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from hp_dtensor import Layout, layout_of
from hp_muon.state import local_tensor


@frozen(eq=False)
class Slot:
    """One parameter.

    Attributes:
        index: position among all parameters of the optimizer.
        group: its parameter group, live.
    """

    index: int
    name: str
    parameter: Tensor
    group: dict[str, Any]

    @property
    def layout(self) -> Layout | None:
        return layout_of(self.parameter)

    @property
    def local(self) -> Tensor:
        """This rank's part, sharing storage."""
        return local_tensor(self.parameter)

    @property
    def on_muon(self) -> bool:
        return bool(self.group["use_muon"])


def slots(groups: Sequence[dict[str, Any]]) -> Iterator[Slot]:
    """Every parameter of every group, in order."""
    index = 0
    for number, group in enumerate(groups):
        for name, parameter in named(number, group):
            yield Slot(index, name, parameter, group)
            index += 1


def named(number: int, group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The parameters of group `number` with their names, or with names made up from places."""
    names = group.get("param_names") or [
        f"group {number} parameter {i}" for i in range(len(group["params"]))
    ]
    return list(zip(names, group["params"]))
