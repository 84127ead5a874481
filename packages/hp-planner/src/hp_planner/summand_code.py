"""What a block's forward does with what its output layer returns, read from its source.

Where a block is sharded as one, its output layer returns a summand on every rank, and the sum is
taken when the block is left. Up to there a forward may do what is linear: a rank that adds a whole
tensor to its summand adds it as often as there are ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from attrs import frozen

from hp_planner.layer_names import DOWN, OUTPUT, SHARED_EXPERT
from hp_planner.methods import Method, called_method, forward_method, own_attribute

OUTPUT_LAYERS = frozenset({*OUTPUT, *DOWN})
EXPERTS = frozenset({"experts", *SHARED_EXPERT})
_LINEAR_CALLS = frozenset(
    {"dropout", "to", "float", "half", "type", "type_as", "contiguous", "clone", "view", "reshape"}
    | {"transpose", "permute", "flatten", "unflatten", "unsqueeze", "squeeze", "mul", "div"}
)
_SUMS = frozenset({"add", "add_", "sub", "sub_"})
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


def summand_code(cls: type, outputs: frozenset[str] = OUTPUT_LAYERS) -> SummandCode:
    """Reads the forward of `cls`, its own variables, statement by statement.

    Methods of the module that it calls are read where they are called, with what they are given.

    Args:
        outputs: the parts whose results are summands.
    """
    method = forward_method(cls)
    if method is None:
        return SummandCode(f"the source of {cls.__name__}.forward cannot be read")
    reading = _Reading(cls, outputs, method)
    reading.follow(method.tree.body)
    problem = reading.problem
    if not problem and not reading.found:
        problem = f"{cls.__name__}.forward is not seen to call its output layer"
    return SummandCode(problem, tuple(dict.fromkeys(reading.parts)))


class _Reading:
    """Variables that hold summands, and the first thing done to one that is not linear.

    Attributes:
        found: an output layer is called.
    """

    def __init__(self, cls: type, outputs: frozenset[str], method: Method) -> None:
        self.problem, self.found = "", False
        self.parts: list[str] = []
        self._cls, self._outputs = cls, outputs
        self._calls = [method]  # the method that is read, and those that call it
        self._summands: set[str] = set()
        self._returned = False

    def follow(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign():
                    self._assign(statement.targets, statement.value)
                case ast.AnnAssign(value=ast.expr() as value):
                    self._assign([statement.target], value)
                case ast.AugAssign():
                    changed = ast.BinOp(statement.target, statement.op, statement.value)
                    self._assign([statement.target], changed)
                case ast.If():
                    self.is_summand(statement.test)
                    self._branch(statement.body, statement.orelse)
                case ast.For():
                    self._assign([statement.target], statement.iter)
                    self._loop(statement)
                case ast.While():
                    self.is_summand(statement.test)
                    self._loop(statement)
                case ast.With():
                    self._any_summand(item.context_expr for item in statement.items)
                    self.follow(statement.body)
                case ast.Try():
                    handlers = [handler.body for handler in statement.handlers]
                    self._branch([*statement.body, *statement.orelse], *handlers)
                    self.follow(statement.finalbody)
                case ast.Match():
                    self.is_summand(statement.subject)
                    self._branch([], *(case.body for case in statement.cases))
                case ast.Return(value=ast.expr() as value):
                    self._returned |= self.is_summand(value)
                case ast.Expr():
                    self.is_summand(statement.value)
                case ast.FunctionDef() | ast.ClassDef():
                    self._no_outputs(statement)

    def _loop(self, statement: ast.For | ast.While) -> None:
        # Twice, for what the end of the body hands to its beginning.
        self.follow(statement.body)
        self.follow([*statement.body, *statement.orelse])

    def _no_outputs(self, inner: ast.AST) -> None:
        """Functions within the forward are not followed."""
        for node in ast.walk(inner):
            if own_attribute(node) in self._outputs:
                self._tell(f"its forward calls {own_attribute(node)} in a function within it")

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
            case ast.Lambda():
                self._no_outputs(value)
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
                elif holds and not self.is_summand(part):  # an element, or an attribute
                    self._tell(f"its forward puts its output layer's sum into {_shown(part)}")

    def _branch(self, *bodies: list[ast.stmt]) -> None:
        before, after = set(self._summands), set[str]()
        for body in bodies:
            self._summands = set(before)
            self.follow(body)
            after |= self._summands
        self._summands = after

    def _call(self, call: ast.Call) -> bool:
        method = called_method(self._cls, self._calls[0], call.func)
        if method is not None:
            return self._enter(method, call)
        given = [*call.args, *(word.value for word in call.keywords)]
        part = own_attribute(call.func)
        holds = self._any_summand(given)
        if part in self._outputs and not holds:
            self.found = True
            return True
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        if isinstance(call.func, ast.Attribute) and not part:
            receiver = self.is_summand(call.func.value)
            wanted = holds == receiver if name in _SUMS else not (holds and receiver)
            if (name in _SUMS or name in ("mul", "div")) and not wanted:
                self._not_linear(call)
            holds |= receiver
        if not holds or name in _QUESTIONS:
            return False
        if part:
            self.parts.append(part)
        elif name not in _LINEAR_CALLS | _SUMS:
            self._not_linear(call)
        return True

    def _enter(self, method: Method, call: ast.Call) -> bool:
        """A method of the module's own: whether it returns a summand."""
        place = [self.is_summand(value) for value in call.args]
        named = {word.arg: self.is_summand(word.value) for word in call.keywords}
        spread = any(isinstance(value, ast.Starred) for value in call.args) or None in named
        if any(method.tree is other.tree for other in self._calls) or (
            spread and (any(place) or any(named.values()))
        ):
            self._tell(f"its forward calls {_shown(call)}, which is not followed")
            return False
        holding = {name for name, holds in zip(method.parameters, place) if holds}
        holding |= {name for name, holds in named.items() if holds and name is not None}
        before = self._summands, self._returned
        self._calls.insert(0, method)
        self._summands, self._returned = holding, False
        self.follow(method.tree.body)
        returned = self._returned
        self._calls.pop(0)
        self._summands, self._returned = before
        return returned

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
        self._tell(f"its forward goes on with its output layer's sum: {_shown(value)}")

    def _tell(self, problem: str) -> None:
        self.problem = self.problem or problem


def _shown(value: ast.expr) -> str:
    text = ast.unparse(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
