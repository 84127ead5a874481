"""torch's `_foreach_` functions, which optimizers and norm clipping call, on lists of tensors.

Plain tensors and DTensors of different layouts and meshes may be in one list; each index is a call
of its own to the layout rules, and one call of the function does the work on all local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.alike import foreach_alike
from hp_dtensor.dispatch import local_operands, make, plan_for
from hp_dtensor.layout import Layout
from hp_dtensor.operator_plan import Plan
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.engine import OperatorError, operator_error
from hp_dtensor.rules.norms import finished_norm, norm_layouts, summable_norm
from hp_dtensor.rules.recipe import is_inplace
from hp_dtensor.rules.reduction import settled
from hp_dtensor.rules.table import rule_named
from hp_dtensor.transition import Transition
from hp_platform.ledger import Origin

_PREFIX = "_foreach_"
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})


def is_foreach(name: str) -> bool:
    return name.startswith(_PREFIX)


def is_fused_update(name: str) -> bool:
    return name in _FUSED


def foreach(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs one `_foreach_` function.

    Raises:
        OperatorError: the function has no rule, or the layouts at one index do not fit together.
    """
    name = function.__name__[len(_PREFIX) :]
    if name == "norm":
        return _norms(*args, **kwargs)
    result = foreach_alike(function, name, args, kwargs)
    if result is not NotImplemented:
        return result
    rule = rule_named(name) or rule_named(name.rstrip("_"))
    if rule is None:
        raise OperatorError(
            f"{function.__name__}: no rule for this operator on DTensors. Remedy: pass "
            "foreach=False, or call it on to_local() tensors."
        )
    count = len(args[0])
    columns = [value if _is_list(value, count) else None for value in args]
    plans: list[Plan | None] = []
    locals_: list[list[Any]] = [[] for _ in args]
    shared: list[Any] = [None] * len(args)
    for index in range(count):
        row = tuple(
            value if column is None else column[index] for value, column in zip(args, columns)
        )
        plan, local = _row(name, rule, row, kwargs)
        plans.append(plan)
        for position, value in enumerate(local):
            locals_[position].append(value)
            shared[position] = value
    given = [
        shared[position]
        if column is None and count
        else (locals_[position] if column is not None else args[position])
        for position, column in enumerate(columns)
    ]
    result = function(*given, **kwargs)
    if is_inplace(name):
        for target in args[0]:
            if hasattr(target, "_follow_local"):
                target._follow_local()
        return result
    return _wrapped(result, plans)


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == count


def _row(
    name: str, rule: Any, row: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Plan | None, Sequence[Any]]:
    """One index: its plan (None for plain tensors only) and its local arguments."""
    tensors = [value for value in row if isinstance(value, Tensor)]
    if all(getattr(tensor, "_layout", None) is None for tensor in tensors):
        return None, row
    plan = plan_for(name, rule, row, kwargs, tensors)
    if plan.recipe.run is not None or plan.recipe.composite is not None:
        raise plan.call.error(
            "its rule works on one tensor at a time", "pass foreach=False, or call it on each"
        )
    supply = iter(local_operands(plan, tensors))
    return plan, [next(supply) if isinstance(value, Tensor) else value for value in row]


def _wrapped(result: Any, plans: Sequence[Plan | None]) -> list[Any]:
    return [
        local if plan is None else make(local, plan.recipe.outputs)
        for local, plan in zip(result, plans)
    ]


def _norms(tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    """Global norms of every tensor; one reduction per mesh and set of sharding axes."""
    order = float(ord)
    norms: list[Any] = [None] * len(tensors)
    pending: dict[tuple[Layout, torch.dtype], list[int]] = {}
    parts: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        layout = getattr(tensor, "_layout", None)
        if layout is None:
            norms[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
            parts.append(norms[index])
            continue
        needed = settled(layout)
        local: Tensor = tensor._to(needed)._local  # type: ignore[attr-defined]
        local = local if dtype is None else local.to(dtype)
        if any(is_sharding(p) for p in needed.placements):
            parts.append(summable_norm(local, order))
        else:
            parts.append(torch.linalg.vector_norm(local, order))
        source, _ = norm_layouts(needed, order)
        pending.setdefault((source, local.dtype), []).append(index)
    for (source, _), indices in pending.items():
        fused = source.with_shape((len(indices),))
        target = norm_layouts(source, order)[1]
        stacked = torch.stack([parts[index] for index in indices])
        if fused.partial_axes():
            origin = Origin("hp_dtensor", f"norms of {len(indices)} tensors", "optimizer")
            whole = fused.with_placements(target.placements)
            stacked = Transition.compile(fused, whole).apply(stacked, origin=origin)
            stacked = finished_norm(stacked, order)
        for value, index in zip(stacked.unbind(), indices):
            norms[index] = make(value, target)
    return norms


def fused_update(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """An optimizer's fused step, which is elementwise: one call for all local tensors.

    Raises:
        OperatorError: a gradient or a state is not laid out as its parameter.
    """
    for column in args:
        for index, value in enumerate(column):
            _check_alike(function.__name__, args[0][index], value)
    locals_ = [[getattr(value, "_local", value) for value in column] for column in args]
    result = function(*locals_, **kwargs)
    for parameter in args[0]:
        if hasattr(parameter, "_follow_local"):
            parameter._follow_local()
    return result


def _check_alike(name: str, parameter: Tensor, value: Tensor) -> None:
    """A plain step counter of any parameter is welcome, anything else has the parameter's cut."""
    mine, other = (getattr(each, "_layout", None) for each in (parameter, value))
    if value.ndim == 0 and other is None and not hasattr(value, "to_local"):
        return
    if mine is None or other is None:
        alike = type(parameter) is type(value) or mine is other is None
    else:
        alike = mine.mesh == other.mesh and mine.placements == other.placements
        alike = alike and mine.shape == other.shape
    if not alike:
        raise operator_error(
            name,
            "a gradient or a state is not laid out as its parameter",
            [layout for layout in (mine, other) if layout is not None],
            remedy="redistribute it to the parameter's placements, or pass fused=False",
        )


def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Gradient scaling: a value that is not finite on any rank of a mesh is found on all."""
    locals_ = [getattr(gradient, "_local", gradient) for gradient in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(locals_, found_inf, inverse_scale)
    meshes = {
        gradient._layout.mesh: gradient for gradient in gradients if hasattr(gradient, "_layout")
    }
    origin = Origin("hp_dtensor", "found_inf", "optimizer")
    for mesh in meshes:
        source = Layout(mesh, [Partial("max")] * mesh.ndim, found_inf.shape)
        target = source.with_placements([Replicate()] * mesh.ndim)
        whole = Transition.compile(source, target).run_forward(found_inf, origin=origin)
        found_inf.copy_(whole)
