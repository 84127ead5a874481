"""When a unit gathers, releases and reduces: the hooks on its modules, outputs and gradients.

Forward: gather before, release after (unless the policy keeps the parameters for backward).
Backward: the gradient of an output gathers. A unit is done when the gradients of its inputs are
known; where no input requires one, when all its trainable parameters have theirs. What neither
shows is done by the callback at the end of backward.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from hp_fsdp.errors import UsageError
from hp_fsdp.param import ShardedParameter
from hp_fsdp.root import Root, current_backward_pass, in_backward_pass
from hp_fsdp.tensors import map_tensors, tensors_in
from hp_fsdp.unit import Unit, UnitState


def install(unit: Unit) -> None:
    """Registers the unit's hooks on its modules and parameters."""
    for module in unit.modules:

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            begin = _uncompiled_before if "torch._dynamo" in sys.modules else before_forward
            return begin(unit, module, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            end = _uncompiled_after if "torch._dynamo" in sys.modules else after_forward
            return end(unit, module, output)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, prepend=False)
    unit.on_gradient(_gradient_done)


# -- forward ----------------------------------------------------------------------------------


def before_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gathers the unit, and what comes next; casts and marks the inputs."""
    root = Root.of(unit)
    if in_backward_pass():
        root.enter_recomputation(unit)
        unit.gather("recomputation")
        unit.wait()
    else:
        root.begin_forward(unit, module)
        root.release_kept(unit)
        unit.drop_if_stale()
        unit.gather("forward")
        # The order must be that of all ranks, which need not all come here.
        if not unit.reduces_unused:
            root.forward_order.enter(unit, unit.forward_prefetch)
        unit.wait()
        unit.modules_running = unit.modules_running or set(unit.modules)
    if unit.policy.cast_forward_inputs and unit.policy.param_dtype is not None:
        args, kwargs = _cast((args, kwargs), unit.policy.param_dtype)
    unit.call = None
    if torch.is_grad_enabled():
        unit.call = call = Call(unit, root)
        args, kwargs = call.mark_inputs((args, kwargs))
    return args, kwargs


def after_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Casts the outputs, asks to be told of their gradients, and releases the unit."""
    root = Root.of(unit)
    if unit.policy.output_dtype is not None:
        output = _cast(output, unit.policy.output_dtype)
    call, unit.call = unit.call, None
    watched = call is not None and torch.is_grad_enabled() and call.watch_outputs(output)
    if in_backward_pass():
        if not unit.in_backward:
            root.leave_recomputation(unit)
        return output
    unit.modules_running.discard(module)
    # A pass that leads to no backward has no reason to keep the parameters for it.
    expects_backward = watched or unit.reshard_after_forward is False
    if unit.modules_running or unit.reduces_unused:
        pass
    elif not expects_backward:
        unit.release()
    elif unit.releases_after_forward and not root.keeps(unit):
        unit.retire()
    else:
        # What follows in the forward of a container may write the shards.
        unit.take_back()
    root.end_forward(unit, module)
    return output


# What `torch.compile` is to leave alone where the module is compiled. `torch.compiler.disable`
# would import the compiler, for which a program that compiles nothing should not wait.
_uncompiled_before = _disable_dynamo(before_forward)
_uncompiled_after = _disable_dynamo(after_forward)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)


# -- backward ---------------------------------------------------------------------------------


class Call:
    """One forward call of a unit's module, as backward passes through it.

    Autograd's graph keeps it alive.
    """

    def __init__(self, unit: Unit, root: Root) -> None:
        self._unit = unit
        self._root = root
        self._inputs_marked = False

    def mark_inputs(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """The inputs, with a node behind those that require a gradient."""
        differentiable = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        if not differentiable:
            return inputs
        self._inputs_marked = True
        marked = dict(zip(differentiable, _Inputs.apply(self, *differentiable.values())))
        result: tuple[Any, Any] = map_tensors(lambda tensor: marked.get(id(tensor), tensor), inputs)
        return result

    def watch_outputs(self, output: Any) -> bool:
        """Hooks the gradients of the outputs; False if none of them can have one."""
        watched = False
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._outputs_reached)
                watched = True
        if watched:
            self._unit.calls_ahead.add(self)
        return watched

    def _outputs_reached(self, _: Tensor) -> None:
        """The gradient of an output is known: gather the unit, and what comes next."""
        unit, root = self._unit, self._root
        root.begin_backward()
        unit.calls_ahead.discard(self)
        if self._inputs_marked:
            unit.calls_within.add(self)
        first = not unit.in_backward
        if first:
            unit.in_backward = True
            unit.reduced = False
            unit.backward_pass = current_backward_pass()
        unit.gather("backward")
        if first and not unit.reduces_unused:
            root.backward_order.enter(unit, unit.backward_prefetch)
        root.pipeline.go_ahead()
        unit.wait()
        unit.make_room()

    def inputs_reached(self) -> None:
        """Everything between this call's inputs and outputs has run."""
        unit, root = self._unit, self._root
        root.begin_backward()
        unit.calls_within.discard(self)
        if unit.calls_within or unit.reduces_unused:
            return
        complete = len(unit.fired) == len(unit.trainable)
        if unit.fired and (complete or not unit.calls_ahead):
            # Parameters without a gradient by now are not used by this backward.
            root.finish_unit(unit)
        elif unit.trainable and not unit.reduced:
            # Another call is still to come, with whose gradients autograd will add this call's.
            return
        if unit.reshard_after_backward:
            unit.release()


class _Inputs(torch.autograd.Function):
    """Identity whose backward runs when everything between a call's inputs and outputs has."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.inputs_reached()
        return (None, *gradients)


def _gradient_done(unit: Unit, parameter: ShardedParameter) -> None:
    """Autograd has finished the gradient of `parameter`."""
    root = Root.of(unit)
    if unit.state is not UnitState.GATHERED and unit.unshard_in_backward:
        raise UsageError(
            f"backward reached parameter {parameter.name!r} of unit {unit.path!r} without passing "
            "through an output of the unit, while the parameter was sharded; its gradient is "
            "wrong. Return every tensor that takes part in the loss from the unit's forward, or "
            "pass reshard_after_forward=False"
        )
    root.begin_backward()
    unit.fired.add(parameter)
    root.pipeline.go_ahead()
    if unit.reduces_unused:
        return
    # A backward inside this one, as reentrant checkpointing of a part of the unit makes, may be
    # followed by another that needs the parameters.
    nested = unit.backward_pass != current_backward_pass()
    if unit.calls_within or nested or len(unit.fired) < len(unit.trainable):
        return
    # Whatever reads a trainable parameter in this graph has run before its gradient was
    # complete; a frozen one may still be read.
    if not unit.has_frozen and unit.reshard_after_backward:
        unit.release()
    root.finish_unit(unit)
