"""What a rule sees and what it answers: `Call` in, `Recipe` out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.tensor import Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.rules.engine import OperatorError, operator_error

Run = Callable[[Callable[..., Any], Any, Any], Any]  # (function, local args, local kwargs)


@frozen
class Operand:
    """A tensor among the arguments. A plain 0-dimensional one counts as replicated."""

    index: int
    layout: Layout
    dtype: torch.dtype
    plain: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


@frozen
class Recipe:
    """How to run an operator on local tensors.

    Attributes:
        operands: the layout each operand needs (None: as it is), or None for all as they are.
        outputs: layout of the result, a sequence of them for several, None for plain results.
        run: called instead of the function with local arguments; None calls the function.
        composite: called instead of everything above, with the DTensors themselves: the operator
            written in terms of others. What it communicates, those do.
        communicates: what `run` does with other ranks, for the error where that is not allowed.
        copies: a result is a copy where torch gives a view; writing into it is refused.
    """

    operands: tuple[Layout | None, ...] | None
    outputs: Any
    run: Run | None = None
    composite: Callable[..., Any] | None = None
    communicates: str = ""
    copies: bool = False


@frozen(eq=False)
class Rule:
    """An operator's layout rule.

    Attributes:
        name: the operator's name in errors.
        derive: from a call to its recipe, once per distinct call; None where the rule does not
            cover the arguments, which are then treated as having no rule.
        parameters: names of positional arguments; `*name` collects the rest.
        views: the result shares the input's memory, so that writing into it must land there.
        refuses: the rule only says why the operator cannot be had, and what to use.
    """

    name: str
    derive: Callable[[Call], Recipe | None]
    parameters: tuple[str, ...] = ("input",)
    views: bool = False
    refuses: bool = False


@frozen
class Call:
    """One call as a rule sees it: tensors replaced by `Operand`, arguments bound by name."""

    operator: str
    operands: tuple[Operand, ...]
    arguments: Mapping[str, Any]
    inplace: bool = False
    targets: tuple[int, ...] = (0,)
    returns_list: bool = False

    @property
    def target(self) -> int:
        return self.targets[0]

    @property
    def input(self) -> Operand:
        return self.arguments["input"]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def layouts(self) -> list[Layout]:
        return [operand.layout for operand in self.operands]

    def error(self, what: str, remedy: str = "") -> OperatorError:
        return operator_error(self.operator, what, self.layouts, None, remedy)

    @classmethod
    def bind(
        cls,
        rule: Rule,
        operator: str,
        operands: Sequence[Operand],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call:
        """Names the arguments after the rule's parameters.

        Raises:
            OperatorError: there are more positional arguments than the rule knows.
        """
        supply = iter(operands)
        values = _placeholders(args, supply)
        named = {name: _placeholders(value, supply) for name, value in kwargs.items()}
        arguments: dict[str, Any] = {}
        for position, parameter in enumerate(rule.parameters):
            if parameter.startswith("*"):
                rest = values[position:]
                single = len(rest) == 1 and isinstance(rest[0], tuple | list)
                if rest:
                    arguments[parameter[1:]] = tuple(rest[0]) if single else tuple(rest)
                values = values[:position]
                break
            if position < len(values):
                arguments[parameter] = values[position]
        if len(values) > len(rule.parameters):
            raise OperatorError(
                f"{operator}: {len(values)} positional arguments, but its rule knows "
                f"{rule.parameters}. Remedy: name the arguments."
            )
        arguments.update(named)
        many = bool(args) and isinstance(args[0], tuple | list)
        writes_out = kwargs.get("out") is not None
        inplace = is_inplace(operator) or kwargs.get("inplace") is True or writes_out
        targets: tuple[int, ...] = (0,)
        if writes_out:
            out = named["out"]
            if not isinstance(out, Operand):
                raise OperatorError(f"{operator}: out= must be one DTensor, found {type(out)}")
            targets = (out.index,)
        elif many:
            targets = tuple(range(len(args[0])))
        return cls(operator, tuple(operands), arguments, inplace, targets, many)


def with_targets_gradients(call: Call, recipe: Recipe) -> Recipe:
    """What is written in place stays the object it is, with the gradient it has declared.

    Along axes where every operand is replicated, what an operator needs of gradients only has to
    be the same for all: what the target has declared.
    """
    if recipe.operands is None or not isinstance(recipe.outputs, Layout):
        return recipe
    target = call.operands[call.target].layout
    needed = recipe.operands[call.target] if call.target < len(recipe.operands) else None
    if needed is None or needed.placements != target.placements:
        return recipe
    changed = [
        axis
        for axis, (mine, theirs) in enumerate(zip(target.grad_placements, needed.grad_placements))
        if mine != theirs
    ]
    if not changed:
        return recipe

    def as_declared(layout: Layout | None) -> Layout | None:
        if layout is None:
            return None
        grads = list(layout.grad_placements)
        for axis in changed:
            if isinstance(layout.placements[axis], Replicate):
                grads[axis] = target.grad_placements[axis]
        return layout.with_placements(layout.placements, grads)

    return evolve(
        recipe,
        operands=tuple(as_declared(layout) for layout in recipe.operands),
        outputs=as_declared(recipe.outputs),
    )


def is_inplace(name: str) -> bool:
    """Whether a torch function writes its first argument, by PyTorch's naming rule."""
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i")
            and name
            not in (
                "__invert__",
                "__int__",
                "__index__",
                "__iter__",
            )
        )
    return name.endswith("_") and not name.endswith("__")


def _placeholders(value: Any, supply: Any) -> Any:
    if isinstance(value, Tensor):
        return next(supply)
    if type(value) in (tuple, list):
        return type(value)([_placeholders(item, supply) for item in value])
    if type(value) is dict:
        return {name: _placeholders(item, supply) for name, item in value.items()}
    return value


def replicated(name: str, mesh: Any, axes: int) -> Rule:
    """The rule of an operator without one, where every operand is replicated."""

    def derive(call: Call) -> Recipe | None:
        return Recipe(None, Everywhere(mesh, axes))

    return Rule(name, derive, ("*all",))


@frozen
class Everywhere:
    """Output layout "replicated, of whatever shape comes out"."""

    mesh: Any
    axes: int

    def of(self, local: Tensor) -> Layout:
        return Layout(self.mesh, [Replicate()] * self.axes, local.shape)


def words(text: str) -> tuple[str, ...]:
    """Names separated by spaces and line ends: the tables of operators."""
    return tuple(text.split())
