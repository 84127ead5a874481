"""What the units of one model share: gather order, backward pipeline, and where a step stands.

Made at the first forward by the unit whose module is outermost. Two models have two roots and do
not see one another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hp_dtensor.end_of_backward import queue_at_end_of_backward
from hp_fsdp.backward import BackwardPipeline
from hp_fsdp.errors import NotAvailableError, UsageError
from hp_fsdp.model_agreement import ModelAgreement
from hp_fsdp.other_wrappers import refuse_to_run_in_replicas
from hp_fsdp.pages import PagePool
from hp_fsdp.param import SHARDED_MARK, ShardedParameter
from hp_fsdp.prefetch import GatherOrder
from hp_fsdp.uninitialized import refuse_uninitialized_buffers
from hp_fsdp.unit import Unit
from hp_platform import mark

UNIT_ATTRIBUTE = "_hp_fsdp_unit"
BACKWARD_BEGINS = "hp_fsdp backward begins"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` was given to `fully_shard` for, if any."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None


def current_backward_pass() -> int:
    """A number for the backward pass that runs on this thread, the innermost one; -1 if none.

    Private to PyTorch, which has no public way to ask; its own checkpointing relies on it too.
    `test_backward` fails if its meaning changes.
    """
    return torch._C._current_graph_task_id()


def in_backward_pass() -> bool:
    """Whether autograd is running on this thread: a forward now is a recomputation."""
    return current_backward_pass() != -1


def _parameters_below(module: nn.Module) -> Iterator[ShardedParameter]:
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None:
            yield from unit.parameters


class _Names:
    """Qualified names, below one unit, of its units and their parameters.

    Attributes:
        units: every unit with the paths of its modules; the one itself has the path "".
    """

    def __init__(self, outermost: Unit) -> None:
        self.units: dict[Unit, list[str]] = {}
        self._parameters: dict[int, str] = {}
        for module in outermost.modules:
            for path, child in module.named_modules(remove_duplicate=False):
                for name, parameter in child._parameters.items():
                    full = f"{path}.{name}" if path else name
                    self._parameters.setdefault(id(parameter), full)
                unit = unit_of(child)
                if unit is not None and child in unit.modules:
                    known = self.units.setdefault(unit, [])
                    if path not in known:
                        known.append(path)

    def give(self) -> None:
        """Tells the units and parameters."""
        for unit, where in self.units.items():
            unit.path = "+".join(where) or "root"
            for sharded in unit.parameters:
                sharded.name = self._parameters.get(id(sharded.sharded), sharded.name)


def name_units_below(outer: Unit) -> None:
    """A module that contains units is sharded: they have its names from now on, whichever of them
    is called first."""
    names = _Names(outer)
    names.give()
    for unit in names.units:
        unit.is_below = unit is not outer


class _Pass:
    """One backward pass that has reached a unit. Autograd holds the only strong reference, through
    its callback, so a pass that raised is recognised by its death."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def end(self) -> None:
        self._root._end_backward()


class Root:
    """Shared state of the units below one outermost unit.

    Attributes:
        unit: the outermost unit.
        units: all of them, in `named_modules` order.
        forward_order, backward_order: what to gather ahead.
        pipeline: gradient reductions in flight.
        pages: memory that units leave to one another.
        models: whether the ranks have the same model.
        post_optim_event: an event that the next forward waits for.
        is_last_backward: False leaves the slow tier in flight at the end of a backward; the next
            one with True settles it.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.units: list[Unit] = []
        self.forward_order = GatherOrder("forward")
        self.backward_order = GatherOrder("backward")
        self.pipeline = BackwardPipeline()
        self.pages = PagePool()
        self.models: ModelAgreement
        self.is_last_backward = True
        self.post_optim_event: Any = None
        # The module whose forward is the outermost in progress.
        self._forward_of: nn.Module | None = None
        self._running: Callable[[], _Pass | None] | None = None
        # Units gathered by recomputation whose own backward has not begun.
        self._recomputed: list[Unit] = []
        # The last unit whose forward has ended, and, once recorded, the one at which forward turns
        # into backward; `_kept` while it stays gathered for that.
        self._last_ended: Unit | None = None
        self._turning: Unit | None = None
        self._kept: Unit | None = None

    @classmethod
    def of(cls, unit: Unit) -> Root:
        """The root of `unit`, made now if its model has none."""
        if unit.root is None:
            cls(unit)._take_over()
        assert unit.root is not None
        return unit.root

    def _take_over(self) -> None:
        """Makes this the root of all units in the module tree, with paths below it.

        Raises:
            UsageError: one of them is in the middle of a step of its own, or in a replica.
            NotAvailableError: a shard is to gather itself.
        """
        names = _Names(self.unit)
        refuse_to_run_in_replicas(self.unit.path)
        self._refuse_cut_ties()
        self._refuse_gather_extensions()
        for unit in names.units:
            if unit.root is not None and unit.root is not self and unit.root.is_in_backward:
                raise UsageError(
                    f"unit {unit.path!r} became part of a larger model in the middle of its own "
                    "backward; finish that backward first"
                )
        # Only now: a model that is refused is refused again.
        for unit in names.units:
            unit.root = self
        # Called by itself, a part of a sharded module keeps the names it has there: with its own,
        # other parts would have the same.
        if not self.unit.is_below:
            names.give()
        self.units = list(names.units)
        self.models = ModelAgreement(self)

    def _refuse_cut_ties(self) -> None:
        owned = {
            form
            for module in self.unit.modules
            for parameter in _parameters_below(module)
            for form in parameter.form_ids
        }
        for module in self.unit.modules:
            for name, parameter in module.named_parameters():
                if getattr(parameter, SHARDED_MARK, False) and id(parameter) not in owned:
                    raise UsageError(
                        f"parameter {name!r} was tied to one that another unit has sharded, and is "
                        "no longer; shard the modules that share it together: "
                        "fully_shard([first, second])"
                    )

    def _refuse_gather_extensions(self) -> None:
        # FSDP2 also looks for them on the local shard, where they are set after `fully_shard`.
        for module in self.unit.modules:
            for name, parameter in module.named_parameters():
                shard = getattr(parameter, "_local_tensor", None)
                if hasattr(shard, "fsdp_pre_all_gather"):
                    raise NotAvailableError(
                        f"the shard of parameter {name!r} has fsdp_pre_all_gather: parameters that "
                        "gather themselves are not available. To gather in another type, pass "
                        "mp_policy=MixedPrecisionPolicy(param_dtype=...)"
                    )

    # -- forward -----------------------------------------------------------------------------

    def begin_forward(self, unit: Unit, module: nn.Module) -> None:
        """The outermost forward starts a pass; it also clears what a failed pass left behind."""
        if self._forward_of is not None and unit is not self.unit:
            return
        if unit is self.unit and not self.models.is_complete and torch.is_grad_enabled():
            self.models.before_training()
        self._forget_failed_pass()
        if unit is self.unit and self._forward_of is not module:
            self.forward_order.restart()
        self._forward_of = module
        self._recomputed.clear()
        if unit is self.unit:
            self._begin_step()

    def _begin_step(self) -> None:
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()
        for other in self.units:
            if other.has_new_buffers:
                for module in other.modules:
                    refuse_uninitialized_buffers(module)
                other.has_new_buffers = False
            # What ranks may use differently is gathered here, on all of them.
            if other.reduces_unused:
                other.drop_if_stale()
                other.gather("forward")

    def keeps(self, unit: Unit) -> bool:
        """The forward of `unit` has ended: whether it stays gathered for the backward to come.

        It does where backward began with it last time, so that it would be gathered again at once,
        and `reshard_after_forward` is None, whose meaning for the root has the same reason.
        """
        if unit.is_root:
            return False
        self._last_ended = unit
        if unit is not self._turning or unit.reshard_after_forward is not None:
            return False
        self._kept = unit
        # As after any other forward, the program sees the shards: it may freeze them, or save them.
        unit.show_shards()
        return True

    def release_kept(self, coming: Unit) -> None:
        """Forward goes on with another unit than expected: only so many may be gathered."""
        kept = self._kept
        if kept is None or kept is coming:
            return
        self._kept = None
        if not kept.in_backward:
            kept.release()

    def end_forward(self, unit: Unit, module: nn.Module) -> None:
        """Releases what the pass gathered ahead and did not use."""
        if self._forward_of is not module:
            return
        self._forward_of = None
        if unit is self.unit:
            self.forward_order.complete()
        for other in self.units:
            no_backward = other.reduces_unused and not torch.is_grad_enabled()
            releases = other.releases_after_forward and other is not self._kept
            if (releases or no_backward) and not other.in_backward:
                other.release()
            other.take_back()
            other.modules_running.clear()

    # -- recomputation -----------------------------------------------------------------------

    def enter_recomputation(self, unit: Unit) -> None:
        """Releases what recomputation gathered before and backward does not need yet."""
        if unit not in self._recomputed:
            self._release_recomputed()

    def leave_recomputation(self, unit: Unit) -> None:
        """`unit` stays gathered until another is recomputed: its backward usually comes next."""
        if unit not in self._recomputed:
            self._recomputed.append(unit)

    def _release_recomputed(self) -> None:
        for unit in self._recomputed:
            if not unit.in_backward and unit.releases_after_forward:
                unit.release()
        self._recomputed.clear()

    # -- backward ----------------------------------------------------------------------------

    @property
    def is_in_backward(self) -> bool:
        return self._running is not None and self._running() is not None

    def begin_backward(self) -> None:
        """Queues the settlement for the end of the backward pass in progress, once.

        Passes inside another one, as reentrant checkpointing makes, belong to the outer pass.
        """
        if self.is_in_backward:
            return
        self._forget_failed_pass()
        mark(BACKWARD_BEGINS)
        now = _Pass(self)
        self._running = weakref.ref(now)
        queue_at_end_of_backward(now.end)

    def _end_backward(self) -> None:
        """What autograd calls when the backward pass is complete."""
        self._running = None
        for unit in self.units:
            if unit.reshard_after_backward:
                unit.release()
            unit.take_back()
            unit.show_shards()
            unit.in_backward = False
            unit.calls_within.clear()
            for bucket in unit.buckets:
                bucket.forget_part()
            self.finish_unit(unit)
        self._recomputed.clear()
        self._kept = None
        self.backward_order.complete()
        self._note_turning()
        if self.is_last_backward:
            self.pipeline.settle()

    def _note_turning(self) -> None:
        """Takes the first unit of backward, if forward ended with it, for the turning point."""
        first = next((unit for unit in self.backward_order.recorded if not unit.is_root), None)
        turns = first is self._last_ended and first is not None and first.unshard_in_backward
        self._turning = first if turns else None
        self._last_ended = None

    def finish_unit(self, unit: Unit) -> None:
        """Reduces or accumulates the gradients that autograd has left on `unit`."""
        unit.fired.clear()
        unit.reduced = True
        if unit.needs_reduction:
            self.pipeline.after_unit(unit)
            return
        with torch.no_grad():
            for bucket in unit.buckets:
                if unit.requires_gradient_sync:
                    bucket.drop_room(self.pages)
                else:
                    bucket.accumulate(self.pages)

    def _forget_failed_pass(self) -> None:
        if self._running is not None and self._running() is None:
            self.reset()

    def reset(self) -> None:
        """Drops what a forward or backward that raised has left: its gradients are incomplete."""
        self._running = None
        self._forward_of = None
        self._kept = self._last_ended = None
        self.pipeline.discard()
        for unit in self.units:
            unit.release()
            unit.fired.clear()
            unit.calls_within.clear()
            unit.modules_running.clear()
            unit.partial_sums.clear()
            for bucket in unit.buckets:
                bucket.forget_part()
                bucket.forget(self.pages)
