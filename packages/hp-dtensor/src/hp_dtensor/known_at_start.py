"""What is known to be the same on every rank when a forward in validate mode begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.utils import _pytree as pytree

from hp_dtensor.contracts import ModelAxes
from hp_dtensor.mesh import mesh_axis
from hp_dtensor.placements import is_replicate
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.whole_values import WholeValues
from hp_platform.agreement import agree

__all__ = ["KnownAtStart"]


class KnownAtStart:
    """Tensors that modules hold, and arguments that no contract declares.

    Arguments are taken to be equal on all ranks, and compared where there are others: a call that
    hands over such tensors communicates their digests, which production does not. Axes whose ranks
    have batches of their own are left out.

    Every rank gives `parallelize` the whole module with the same values, so its buffers and plain
    tensor attributes are equal. A buffer that a forward has left with something unknown in it stays
    unknown until it is written again, as by `load_state_dict`.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[nn.Module],
        plan: ShardingPlan,
        axes: ModelAxes,
        values: WholeValues,
    ) -> None:
        """`modules`: those of `root` outside opaque regions, whose tensors are local."""
        self.modules, self.values = tuple(modules), values
        self.name = f"{type(root).__name__}'s arguments without a contract"
        self.names = tuple(inspect.signature(root.forward).parameters)
        self.declared = {t.where for b in plan.boundaries if not b.module for t in b.inputs}
        self.mesh, self.shared = axes.mesh, _shared_axes(plan, axes)
        self.arguments = not _cuts_plain_inputs(plan, axes)
        self._left_unknown: dict[int, int] = {}
        for module in self.modules:
            values.mark_all([v for v in vars(module).values() if isinstance(v, Tensor)])

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for buffer in self._buffers():
            if self._left_unknown.get(id(buffer)) != buffer._version:
                self.values.mark(buffer)
        if self.arguments:
            self._compare(args, kwargs)
            self.values.mark_all(args)
            self.values.mark_all(kwargs)

    def _compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises on all ranks where they were given different tensors."""
        if not isinstance(self.mesh, DeviceMesh):
            return
        given = {**dict(zip(self.names, args)), **kwargs}
        found = {
            name: tensors
            for name, value in given.items()
            if name not in self.declared and (tensors := _plain_tensors(value))
        }
        for index in self.shared if found else ():
            agree(self.name, found, mesh_axis(self.mesh, index))

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


def _plain_tensors(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    return [
        each
        for each in leaves
        if isinstance(each, Tensor) and not hasattr(each, "to_local") and not each.is_meta
    ]


def _shared_axes(plan: ShardingPlan, axes: ModelAxes) -> tuple[int, ...]:
    """Axes of more than one rank that see one batch: gradients are not averaged over them."""
    own = {
        axis
        for spec in plan.parameters
        for axis, gradient in spec.contract.grad_placements
        if gradient == Partial("avg")
    }
    sizes = zip(axes.abstract.axis_names, axes.abstract.sizes)
    return tuple(
        index
        for index, (name, size) in enumerate(sizes)
        if size > 1 and name not in own and name in plan.model_axes
    )
