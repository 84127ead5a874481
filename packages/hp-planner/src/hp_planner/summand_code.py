"""What a block's forward does with what its output layer returns, read from its source.

Where a block is sharded as one, its output layer returns a summand on every rank, and the sum is
taken when the block is left. Up to there a forward may do what is linear: a rank that adds a whole
tensor to its summand adds it as often as there are ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from attrs import frozen

from hp_planner.code_reading import forward_tree, own_attribute
from hp_planner.layer_names import DOWN, OUTPUT

OUTPUT_LAYERS = frozenset({*OUTPUT, *DOWN})
_LINEAR_CALLS = frozenset(
    {"dropout", "to", "float", "half", "type", "type_as", "contiguous", "clone", "view", "reshape"}
    | {"transpose", "permute", "flatten", "unflatten", "unsqueeze", "squeeze", "mul", "div"}
)
_QUESTIONS = frozenset({"isinstance", "hasattr", "getattr", "len", "size", "dim", "numel"})
_FACTS = frozenset({"shape", "dtype", "device", "ndim", "is_cuda"})


@frozen
class SummandCode:
    """What a forward does with a summand.

    Attributes:
        problem: the first thing that is not linear; empty if there is none.
        parts: the module's own parts that it is handed to, with which it goes on.
    """

    problem: str = ""
    parts: tuple[str, ...] = ()


def summand_code(cls: type) -> SummandCode:
    """Reads the forward of `cls`, its own variables, statement by statement.

    Nothing is found where there is no source, and where the forward itself calls no output layer.
    """
    tree = forward_tree(cls)
    if tree is None:
        return SummandCode()
    reading = _Reading()
    reading.follow(tree.body)
    return SummandCode(reading.problem, tuple(dict.fromkeys(reading.parts)))


class _Reading:
    """Variables that hold summands, and the first thing done to one that is not linear."""

    def __init__(self) -> None:
        self.problem = ""
        self.parts: list[str] = []
        self._summands: set[str] = set()

    def follow(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.Assign):
                self._assign(statement.targets, statement.value)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign([statement.target], statement.value)
            elif isinstance(statement, ast.AugAssign):
                self._assign(
                    [statement.target], ast.BinOp(statement.target, statement.op, statement.value)
                )
            elif isinstance(statement, ast.If):
                self.is_summand(statement.test)
                self._branch(statement.body, statement.orelse)
            elif isinstance(statement, ast.For | ast.While):
                # Twice, for what the end of the body hands to its beginning.
                self.follow(statement.body)
                self.follow([*statement.body, *statement.orelse])
            elif isinstance(statement, ast.With):
                self.follow(statement.body)
            elif isinstance(statement, ast.Return | ast.Expr) and statement.value is not None:
                self.is_summand(statement.value)

    def is_summand(self, value: ast.expr) -> bool:
        """Whether the value is, or holds, a rank's summand."""
        match value:
            case ast.Name():
                return value.id in self._summands
            case ast.Call():
                return self._call(value)
            case ast.BinOp():
                return self._operation(value)
            case ast.Attribute():
                return value.attr not in _FACTS and self.is_summand(value.value)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return self.is_summand(value.operand)
            case ast.Subscript() | ast.Starred():
                return self.is_summand(value.value)
            case ast.Tuple() | ast.List():
                return self._any_summand(value.elts)
            case ast.IfExp():
                return self._any_summand((value.body, value.orelse))
            case ast.NamedExpr():
                self._assign([value.target], value.value)
                return self.is_summand(value.target)
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr) and self.is_summand(part):
                self._not_linear(value)
        return False

    def _any_summand(self, values: Iterable[ast.expr]) -> bool:
        found = [self.is_summand(value) for value in values]  # all of them are to be read
        return any(found)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            if len(values) != len(parts):
                values = [value] * len(parts)
            found = [self.is_summand(each) for each in values]
            for part, holds in zip(parts, found):
                if isinstance(part, ast.Name):
                    (self._summands.add if holds else self._summands.discard)(part.id)

    def _branch(self, *bodies: list[ast.stmt]) -> None:
        before, after = set(self._summands), set[str]()
        for body in bodies:
            self._summands = set(before)
            self.follow(body)
            after |= self._summands
        self._summands = after

    def _call(self, call: ast.Call) -> bool:
        given = [*call.args, *(word.value for word in call.keywords)]
        part = own_attribute(call.func)
        holds = self._any_summand(given)
        if part in OUTPUT_LAYERS and not holds:
            return True
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        if isinstance(call.func, ast.Attribute) and not part:
            whole = not self.is_summand(call.func.value)
            if name in ("mul", "div") and holds and not whole:
                self._not_linear(call)
            holds |= not whole
        if not holds or name in _QUESTIONS:
            return False
        if part:
            self.parts.append(part)
        elif name not in _LINEAR_CALLS:
            self._not_linear(call)
        return True

    def _operation(self, value: ast.BinOp) -> bool:
        left, right = self.is_summand(value.left), self.is_summand(value.right)
        if not (left or right):
            return False
        joins = any(isinstance(side, ast.Tuple | ast.List) for side in (value.left, value.right))
        match value.op:
            case ast.Add() | ast.Sub():
                linear = (left and right) or joins
            case ast.Mult() | ast.MatMult():
                linear = not (left and right)
            case ast.Div():
                linear = not right
            case _:
                linear = False
        if not linear:
            self._not_linear(value)
        return True

    def _not_linear(self, value: ast.expr) -> None:
        text = ast.unparse(value)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        self.problem = self.problem or f"its forward goes on with its output layer's sum: {shown}"
