"""What is known to be the same on every rank when a forward in validate mode begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hp_dtensor.contracts import ModelAxes
from hp_dtensor.placements import is_replicate
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.whole_values import WholeValues

__all__ = ["KnownAtStart"]


class KnownAtStart:
    """Tensors that modules hold, and arguments that no contract declares.

    Every rank gives `parallelize` the whole module with the same values, so its buffers and plain
    tensor attributes are equal. A buffer that a forward has left with something unknown in it stays
    unknown until it is written again, as by `load_state_dict`.
    """

    def __init__(
        self, modules: Sequence[nn.Module], plan: ShardingPlan, axes: ModelAxes, values: WholeValues
    ) -> None:
        """`modules`: those outside opaque regions, whose tensors are local."""
        self.modules, self.values = tuple(modules), values
        self.arguments = not _cuts_plain_inputs(plan, axes)
        self._left_unknown: dict[int, int] = {}
        for module in self.modules:
            values.mark_all([v for v in vars(module).values() if isinstance(v, Tensor)])

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for buffer in self._buffers():
            if self._left_unknown.get(id(buffer)) != buffer._version:
                self.values.mark(buffer)
        if self.arguments:
            self.values.mark_all(args)
            self.values.mark_all(kwargs)

    def end(self) -> None:
        """Called when the forward has returned."""
        self._left_unknown = {
            id(buffer): buffer._version
            for buffer in self._buffers()
            if not self.values.holds(buffer)
        }

    def _buffers(self) -> Iterator[Tensor]:
        for module in self.modules:
            for buffer in module._buffers.values():
                if buffer is not None and not hasattr(buffer, "to_local"):
                    yield buffer


def _cuts_plain_inputs(plan: ShardingPlan, axes: ModelAxes) -> bool:
    """Whether ranks are called with parts: then nothing is known of arguments without contract."""
    sizes = dict(zip(axes.abstract.axis_names, axes.abstract.sizes))
    return any(
        sizes.get(axis, 1) > 1 and not is_replicate(placement)
        for boundary in plan.boundaries
        for tensor in boundary.inputs
        if tensor.plain
        for axis, placement in tensor.outside.placements
    )
