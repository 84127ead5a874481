"""Every call of a torch function on a DTensor passes here, above autograd (decision D5).

1. The arguments are flattened, and a key is built of everything that can change the answer.
2. The operator's rule gives a *recipe*, once per key: a transition for each operand that needs
   one, how to run the operator on local tensors, and the layouts of the results.
3. The recipe runs on plain local tensors, under the ambient grad mode, and the results are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor import extreme
from hp_dtensor.cut_size import CutSize
from hp_dtensor.function_bridge import bridged, way_round
from hp_dtensor.function_gradient import expect_function
from hp_dtensor.implicit import allowed, any_requires_grad
from hp_dtensor.layout import Layout
from hp_dtensor.operands import is_known_whole, operands_of
from hp_dtensor.operator_plan import Plan, Step, plans_of
from hp_dtensor.rules.engine import OperatorError, operator_error, show
from hp_dtensor.rules.recipe import (
    Call,
    Everywhere,
    Operand,
    Recipe,
    Rule,
    replicated,
    with_targets_gradients,
)
from hp_dtensor.rules.table import rule_for
from hp_dtensor.stated_sizes import stated_size
from hp_dtensor.transition import Transition
from hp_dtensor.whole_values import current_values, mark_whole
from hp_platform.collectives import Origin

if TYPE_CHECKING:
    from hp_dtensor.dtensor import DTensor


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs `func` on DTensors, or refuses with what, where and a remedy.

    Raises:
        OperatorError: the operator has no rule, or its operands' layouts do not fit it.
    """
    found: list[Tensor] = []
    key = (func, _key(args, found), _key(kwargs, found) if kwargs else None)
    cache = plans_of(found)
    try:
        plan = cache.plans.get(key)
    except TypeError:  # an argument that cannot be hashed: derive every time
        return _run(_derive(func, args, kwargs, found), func, args, kwargs, found)
    if plan is None:
        plan = _derive(func, args, kwargs, found)
        cache.put(key, plan)
    return _run(plan, func, args, kwargs, found)


def plan_for(
    name: str, rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: list[Tensor]
) -> Plan:
    """The plan of one call of the operator `name`, for functions that stand for many calls."""
    key = (name, _key(args, []), _key(kwargs, []))
    cache = plans_of(found)
    plan = cache.plans.get(key)
    if plan is None:
        plan = _bind(name, rule, args, kwargs, found)
        cache.put(key, plan)
    return plan


# -- 1. flatten -------------------------------------------------------------------------------


def _key(value: Any, found: list[Tensor]) -> Any:
    """A hashable description of an argument; tensors are appended to `found` in order."""
    kind = type(value)
    if kind is tuple or kind is list:
        # The items of the outermost argument tuple come here one by one, so the common kinds are
        # told apart before anything is called.
        parts: list[Any] = [kind]
        for item in value:
            each = type(item)
            if each in _PLAIN_KINDS:
                parts.append((each, item))
            elif issubclass(each, Tensor):
                found.append(item)
                parts.append(_tensor_key(item))
            else:
                parts.append(_key(item, found))
        return tuple(parts)
    if issubclass(kind, Tensor):
        found.append(value)
        return _tensor_key(value)
    if kind is dict:
        return tuple([(name, _key(item, found)) for name, item in value.items()])
    if kind is slice:
        ends = value.start, value.stop, value.step
        # A size that knows its cut equals the plain number.
        return slice, ends, tuple(getattr(end, "cut", None) for end in ends)
    if isinstance(value, tuple | list):  # torch.Size and other sequences
        return kind, tuple([_key(item, found) for item in value])
    if kind is CutSize:
        return kind, int(value), value.cut
    return kind, value


_PLAIN_KINDS = frozenset({int, float, bool, str, type(None), torch.dtype})


def _tensor_key(value: Any) -> Any:
    try:
        return value._layout, value._local.dtype
    except AttributeError:
        return _plain_key(value)


def _plain_key(value: Tensor) -> Any:
    taken = allowed().plain, is_known_whole(value)
    return "plain", tuple(value.shape), value.dtype, value.requires_grad, taken


# -- 2. derive --------------------------------------------------------------------------------


def operator_name(func: Callable[..., Any]) -> str:
    """What errors call a function: `add`, or the property a getter reads."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", str(func))
    return getattr(func, "__name__", str(func))


def _derive(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    found: Sequence[Tensor],
) -> Plan:
    return _bind(operator_name(func), rule_for(func), args, kwargs, found)


def _bind(
    name: str,
    rule: Rule | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    found: Sequence[Tensor],
) -> Plan:
    operands = operands_of(name, found)
    if rule is None:
        rule = _replicated_rule(name, operands)
    call = Call.bind(rule, name, operands, args, dict(kwargs))
    recipe = rule.derive(call)
    if recipe is None:  # the rule does not cover these arguments
        recipe = _replicated_rule(name, operands).derive(call)
    assert recipe is not None
    if call.inplace:
        recipe = with_targets_gradients(call, recipe)
        _check_inplace(call, recipe)
    nested = bool(kwargs) or not all(isinstance(value, Tensor) for value in args)
    stated = stated_size(call, recipe.outputs)
    return Plan(rule, recipe, _compile(call, recipe), call, nested, stated)


def _replicated_rule(name: str, operands: Sequence[Operand]) -> Rule:
    """An operator without a rule runs as it is where every rank holds everything."""
    layouts = [operand.layout for operand in operands]
    for layout in layouts:
        everything = all(isinstance(p, Replicate) for p in layout.placements)
        if not everything or any(isinstance(g, Partial) for g in layout.grad_placements):
            raise operator_error(
                name,
                "no rule says how this operator acts on sharded or partial tensors; expected every "
                "operand Replicate(), with a replicated gradient",
                layouts,
                remedy="redistribute the operands to Replicate() first, or compute on to_local() "
                "and wrap the result with DTensor.from_local()",
            )
        if layout.mesh != layouts[0].mesh:
            raise operator_error(
                name,
                "operands are on different meshes",
                layouts,
                remedy="take full_tensor() of one and distribute_tensor() it on the other's mesh",
            )
    return replicated(name, layouts[0].mesh, len(layouts[0].placements))


def _check_inplace(call: Call, recipe: Recipe) -> None:
    """What is written in place must keep its layout: its memory is the result."""
    for target in call.targets:
        operand = call.operands[target]
        if operand.plain:
            raise operator_error(
                call.operator,
                "a plain tensor cannot be written from DTensors in place",
                call.layouts,
                remedy="write into a DTensor, or use full_tensor() on the source",
            )
        if recipe.operands and target >= len(recipe.operands):
            raise call.error(
                "out= has no rule for this operator", "use the result, or copy_ it into the tensor"
            )
        needed = recipe.operands[target] if recipe.operands else None
        output = recipe.outputs
        for became in (needed, output if isinstance(output, Layout) else None):
            if became is None:
                continue
            if (became.placements, became.shape) != (operand.layout.placements, operand.shape):
                raise operator_error(
                    call.operator,
                    f"the tensor written in place is {show(operand.layout)}, but the result "
                    f"would be {show(became)}",
                    call.layouts,
                    remedy="redistribute the other operand first, or use the operator that is not "
                    "in place",
                )


def _compile(call: Call, recipe: Recipe) -> tuple[Step | None, ...] | None:
    if recipe.operands is None:
        return None
    steps = [_step(call, operand, need) for operand, need in zip(call.operands, recipe.operands)]
    return tuple(steps) if any(step is not None for step in steps) else None


def _step(call: Call, operand: Operand, needed: Layout | None) -> Step | None:
    if needed is None or needed == operand.layout:
        return None
    same = needed.placements == operand.layout.placements
    if call.inplace and operand.index in call.targets and not same:
        return None  # refused by _check_inplace
    origin = Origin("hp_dtensor", f"{call.operator}[{operand.index}]", "operator")
    return Step(Transition.compile(operand.layout, needed), same, origin)


# -- 3. run -----------------------------------------------------------------------------------


def _run(
    plan: Plan,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    found: Sequence[Tensor],
) -> Any:
    recipe = plan.recipe
    if recipe.composite is not None:
        return recipe.composite(*args, **kwargs)
    if plan.call.inplace:
        _refuse_copies(plan, found)
    if recipe.communicates and not allowed().reductions:
        raise operator_error(
            plan.call.operator,
            f"it would communicate by itself: {recipe.communicates}",
            plan.call.layouts,
            remedy="redistribute the operand explicitly, or declare it in the boundary's contract",
        )
    if plan.stated is not None and current_values() is not None:
        what, remedy = plan.stated
        raise operator_error(plan.call.operator, what, plan.call.layouts, remedy=remedy)
    given = local_operands(plan, found)
    local_args: Any
    if len(given) == len(args):  # tensors only
        local_args, local_kwargs = given, kwargs
        if plan.nested:
            supply = iter(given)
            local_args, local_kwargs = _substitute(args, supply), _substitute(kwargs, supply)
    else:
        supply = iter(given)
        local_args = _substitute(args, supply)
        local_kwargs = _substitute(kwargs, supply) if kwargs else kwargs
    run = recipe.run
    if run is None:
        result = func(*local_args, **local_kwargs)
    else:
        result = run(func, local_args, local_kwargs)
    if plan.call.inplace:
        return _written(plan, found)
    if type(result) is Tensor and plan.local_shape not in (None, result.shape):
        raise operator_error(
            plan.call.operator,
            f"the rule gives this rank a result of shape {tuple(plan.local_shape)}, but the local "
            f"result has {tuple(result.shape)}",
            plan.call.layouts,
            remedy="this is a fault of the operator's rule, please report it; use to_local() and "
            "DTensor.from_local() around the operator until then",
        )
    if plan.rule.views and not torch.is_grad_enabled():
        result = _outside_graph(result)
    wrapped = _wrap(recipe.outputs, result, found, given)
    if recipe.copies or (plan.rule.views and getattr(found[0], COPY, None)):
        _mark_copies(wrapped, plan.call.operator)
    return wrapped


def _outside_graph(result: Any) -> Any:
    """Torch's views require gradients even where none are recorded. A function whose result is one
    would not be told from the tensor's own graph."""
    if isinstance(result, Tensor):
        return result.detach() if result.requires_grad else result
    made = [_outside_graph(item) for item in result]
    return type(result)(made)


COPY = "_hp_copy"
"""Attribute of a DTensor that is a copy where torch gives a view: the operator that made it."""


def _mark_copies(result: Any, operator: str) -> None:
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, Tensor):
            setattr(each, COPY, operator)


def _refuse_copies(plan: Plan, found: Sequence[Tensor]) -> None:
    """A write into what should have been a view would be lost."""
    for index in plan.call.targets:
        made_by = getattr(found[index], COPY, None)
        if made_by is not None:
            raise operator_error(
                plan.call.operator,
                f"the tensor written in place came out of {made_by} on a sharded dim, which gave "
                "each rank a copy; the write would be lost",
                plan.call.layouts,
                remedy="assign through the index instead (x[index] = value), or clone() it first "
                "if the copy is meant",
            )


def local_operands(plan: Plan, found: Sequence[Any]) -> list[Tensor]:
    """Local tensors of the operands, after the transitions the rule asks for."""
    given: list[Tensor] = []
    recording = torch.is_grad_enabled()
    for tensor in found:
        try:
            local = tensor._local
        except AttributeError:
            given.append(tensor)
            continue
        if not local.requires_grad:
            if any_requires_grad(tensor):
                local = of_function(plan.call.operator, tensor)
        elif not recording:
            expect_function(tensor)
        given.append(local)
    if plan.steps is not None:
        for index, step in enumerate(plan.steps):
            if step is not None:
                given[index] = _apply(plan, step, given[index])
    return given


def of_function(operator: str, tensor: Any) -> Tensor:
    """The local tensor of what an autograd.Function gave, with the function in its graph.

    Raises:
        OperatorError: the function cannot be put there.
    """
    local = bridged(tensor)
    if local is None:
        raise OperatorError(
            f"{operator}: an operand came out of torch.autograd.Function.apply, "
            f"which computed on a DTensor without its gradient. Remedy: {way_round(tensor)}."
        )
    tensor._local = local
    return local


def _apply(plan: Plan, step: Step, local: Tensor) -> Tensor:
    if step.adjoint_only and not (local.requires_grad and torch.is_grad_enabled()):
        return local
    policy = allowed()
    if not (policy.adjoints if step.adjoint_only else policy.reductions):
        source, target = step.transition.source, step.transition.target
        if step.adjoint_only:
            what = (
                "a replicated operand meets sharded ones and its gradient is not declared Partial: "
                f"expected {target}, found {source}"
            )
            remedy = "declare its gradient Partial in the contract of its boundary or parameter"
        else:
            what = (
                "an operand would have to be reduced or redistributed first: "
                f"expected {target}, found {source}"
            )
            remedy = (
                "declare that layout in the contract of its boundary or parameter, "
                "or redistribute it explicitly"
            )
        raise operator_error(plan.call.operator, what, plan.call.layouts, remedy=remedy)
    return move(step.transition, local, step.origin)


def move(transition: Transition, local: Tensor, origin: Origin) -> Tensor:
    if extreme.needs_gradient(local) and extreme.takes_extreme(transition):
        return extreme.finish(transition, local, origin)
    return transition.apply(local, origin=origin)


def _substitute(value: Any, supply: Iterator[Tensor]) -> Any:
    """The same arguments with local tensors, taken in the order `_key` found them."""
    kind = type(value)
    if kind is tuple or kind is list:
        made = [item if type(item) in _PLAIN_KINDS else _substitute(item, supply) for item in value]
        return made if kind is list else tuple(made)
    if issubclass(kind, Tensor):
        return next(supply)
    if kind is dict:
        return {name: _substitute(item, supply) for name, item in value.items()}
    return value


def _written(plan: Plan, found: Sequence[Tensor]) -> Any:
    """Operators in place return the object that was written."""
    targets = [found[index] for index in plan.call.targets]
    for target in targets:
        if hasattr(target, "_local"):
            target._follow_local()  # type: ignore[attr-defined]
        else:  # a plain one that is taken whole, and stays so
            mark_whole(target)
    return targets if plan.call.returns_list else targets[0]


def _wrap(outputs: Any, result: Any, found: Sequence[Any], given: Sequence[Tensor]) -> Any:
    if isinstance(result, Tensor):
        if outputs is None:
            return result
        layout = outputs.of(result) if type(outputs) is Everywhere else outputs
        for index, local in enumerate(given):
            if local is result and getattr(found[index], "_layout", None) == layout:
                return found[index]  # the function returned its argument, as `contiguous` may
        return make(result, layout)
    if isinstance(result, tuple | list):
        single = outputs is None or isinstance(outputs, Layout | Everywhere)
        each = [outputs] * len(result) if single else outputs
        wrapped = [_wrap(output, item, found, given) for item, output in zip(result, each)]
        if hasattr(result, "_fields"):
            return type(result)(*wrapped)
        return type(result)(wrapped)
    return result


def make(local: Tensor, layout: Layout) -> DTensor:
    """Wraps a result."""
    return _dtensor_class()._of(local, layout)


@cache
def _dtensor_class() -> type[DTensor]:
    from hp_dtensor.dtensor import DTensor

    return DTensor
