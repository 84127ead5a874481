"""When a unit gathers, releases and reduces: the hooks on its modules, outputs and gradients.

Forward: gather before, release after (unless the policy keeps the parameters for backward).
Backward: an output's gradient gathers; a unit is done when all its trainable parameters have
their gradients, which needs no gradient at the unit's inputs. Inputs that do require one tell
when a unit is done that has frozen or unused parameters. What is left is done by the callback at
the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hp_fsdp.param import ShardedParameter
from hp_fsdp.root import Root, in_backward_pass
from hp_fsdp.tensors import map_tensors, tensors_in
from hp_fsdp.unit import Unit


def install(unit: Unit) -> None:
    """Registers the unit's hooks on its modules and parameters."""
    for module in unit.modules:

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return before_forward(unit, module, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return after_forward(unit, module, output)

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
        unit.drop_if_stale()
        unit.gather("forward")
        unit.wait()
        unit.modules_running = unit.modules_running or set(unit.modules)
        root.forward_order.enter(unit, unit.forward_prefetch)
    if unit.policy.cast_forward_inputs and unit.policy.param_dtype is not None:
        args, kwargs = _cast((args, kwargs), unit.policy.param_dtype)
    if torch.is_grad_enabled():
        args, kwargs = _mark_inputs(unit, root, (args, kwargs))
    return args, kwargs


def after_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Casts the outputs, asks to be told of their gradients, and releases the unit."""
    root = Root.of(unit)
    if unit.policy.output_dtype is not None:
        output = _cast(output, unit.policy.output_dtype)
    watched = torch.is_grad_enabled() and _watch_outputs(unit, root, output)
    if in_backward_pass():
        if not unit.in_backward:
            root.leave_recomputation(unit)
        return output
    unit.modules_running.discard(module)
    # A pass that leads to no backward has no reason to keep the parameters for it.
    expects_backward = watched or unit.reshard_after_forward is False
    if not unit.modules_running and (unit.releases_after_forward or not expects_backward):
        unit.release()
    root.end_forward(unit, module)
    return output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)


# -- backward ---------------------------------------------------------------------------------


def _watch_outputs(unit: Unit, root: Root, output: Any) -> bool:
    """Hooks the gradients of the outputs; False if none of them can have one."""

    def reached(_: Tensor) -> None:
        begin_unit_backward(unit, root)

    watched = False
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(reached)
            watched = True
    return watched


def begin_unit_backward(unit: Unit, root: Root) -> None:
    """The gradient of one of the unit's outputs is known: gather it and what comes next."""
    root.begin_backward()
    first = not unit.in_backward
    if first:
        unit.reduced = False
    unit.in_backward = True
    unit.gather("backward")
    unit.wait()
    if first:
        root.backward_order.enter(unit, unit.backward_prefetch)


def _gradient_done(unit: Unit, parameter: ShardedParameter) -> None:
    """Autograd has finished the gradient of `parameter` in this backward."""
    root = Root.of(unit)
    root.begin_backward()
    unit.fired.add(parameter)
    if len(unit.fired) < len(unit.trainable):
        return
    # Whatever reads a trainable parameter in this graph has run before its gradient was
    # complete; frozen ones may still be read on the way to the inputs.
    if not unit.has_frozen and unit.reshard_after_backward:
        unit.release()
    root.finish_unit(unit)


class _Inputs(torch.autograd.Function):
    """Identity whose backward runs when everything between a unit's inputs and outputs has."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.reached()
        return (None, *gradients)


def _mark_inputs(unit: Unit, root: Root, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    differentiable = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
    if not differentiable:
        return inputs

    def reached() -> None:
        _inputs_done(unit, root)

    marked = dict(zip(differentiable, _Inputs.apply(reached, *differentiable.values())))
    result: tuple[Any, Any] = map_tensors(lambda tensor: marked.get(id(tensor), tensor), inputs)
    return result


def _inputs_done(unit: Unit, root: Root) -> None:
    """One call of the unit has passed its gradient on to its inputs."""
    root.begin_backward()
    if unit.fired:
        # Parameters without a gradient by now are not used by this backward.
        root.finish_unit(unit)
    elif unit.trainable and not unit.reduced:
        # Another call of the same modules is still to come in this backward, with whose
        # gradients autograd will add this call's.
        return
    if unit.reshard_after_backward:
        unit.release()
