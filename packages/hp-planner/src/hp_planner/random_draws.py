"""Random numbers that a forward draws by itself, read from its source.

Every rank draws from its own generator: what should be the same on all ranks differs between them,
and parts that should differ may be given the same numbers. The reading follows the methods of the
module and the functions beside it that a forward calls, and leaves out what the module's own
settings switch off: `if self.training and self.jitter_noise > 0` with a noise of zero.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from hp_planner.methods import (
    Method,
    called_function,
    called_method,
    forward_method,
    forward_methods,
    own_attribute,
)

_OF_LIBRARY = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "poisson", "binomial", "multinomial"}
    | {"rand_like", "randn_like", "randint_like", "bernoulli", "gumbel_softmax", "rrelu", "rrelu_"}
)
_OF_TENSOR = frozenset(
    {"bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "random_", "exponential_"}
    | {"cauchy_", "log_normal_", "geometric_", "rsample"}
)
_LIBRARIES = frozenset({"torch", "F", "functional"})
_GENERATORS = ("random", "np.random", "numpy.random")
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@frozen
class _Unknown:
    """What only a run can tell."""


_UNKNOWN = _Unknown()
_PLAIN = (int, float, bool, str, type(None))


def may_draw(cls: type) -> bool:
    """Whether any code that the forward of `cls` may run draws, whatever its settings."""
    found = list(forward_methods(cls))
    for method in found:
        for node in ast.walk(method.tree):
            if isinstance(node, ast.Call):
                if _drawn(node):
                    return True
                inner = called_function(method, node.func)
                if inner is not None and all(inner.tree is not m.tree for m in found):
                    found.append(inner)
    return False


@frozen
class Draw:
    """A call that draws.

    Attributes:
        code: as written, without its arguments.
        settings: numbers of the module without which it would not be made, such as a noise.
    """

    code: str
    settings: tuple[tuple[str, float], ...] = ()


def random_draws(module: object) -> tuple[Draw, ...]:
    """Calls by which the forward of `module` draws, with its settings as they are."""
    method = forward_method(type(module))
    if method is None:
        return ()
    reading = _Reading(module)
    reading.run(method, {})
    return tuple(dict.fromkeys(reading.found))


def _drawn(call: ast.Call) -> str:
    """The call as written if it draws, empty for any other."""
    if not isinstance(call.func, ast.Attribute) or own_attribute(call.func):
        return ""
    name, receiver = call.func.attr, call.func.value
    library = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
    by_library = name in _OF_LIBRARY and library in _LIBRARIES
    by_generator = ast.unparse(receiver) in _GENERATORS and name != "seed"
    if not (by_library or by_generator or name in _OF_TENSOR):
        return ""
    return f"{ast.unparse(receiver)}.{name}" if by_library or by_generator else f".{name}"


class _Reading:
    """Follows a module's code with the values that are known without a run.

    Attributes:
        found: calls that draw.
    """

    def __init__(self, module: object) -> None:
        self.found: list[Draw] = []
        self._settings: dict[str, float] = {}
        self._module = module
        self._calls: list[Method] = []
        self._known: dict[str, Any] = {}
        # Draws that matter only if they are less than something, by variable: layers left out.
        self._chances: dict[str, str] = {}
        self._seeded = False

    def run(self, method: Method, given: dict[str, Any]) -> None:
        before = self._known, self._chances, self._seeded
        self._calls.append(method)
        self._known, self._chances = given, {}
        self._seeded |= any(_seeds(node) for node in ast.walk(method.tree))
        self._follow(method.tree.body)
        self._calls.pop()
        self._known, self._chances, self._seeded = before

    def _follow(self, statements: Iterable[ast.stmt]) -> bool:
        """Whether they never go on to what comes after."""
        for statement in statements:
            if isinstance(statement, ast.If):
                if self._if(statement):
                    return True
                continue
            if isinstance(statement, ast.Assign | ast.AnnAssign) and self._chance(statement):
                continue
            if isinstance(statement, ast.For | ast.While):
                # What the body assigns may be from an earlier pass.
                self._known |= dict.fromkeys(_assigned(statement), _UNKNOWN)
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [inner.body for inner in getattr(statement, "handlers", [])]
            blocks += [inner.body for inner in getattr(statement, "cases", [])]
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.expr):
                    self._look(part)
            for block in blocks:
                self._branch(block)
            self._assign(statement)
            if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
                return True
        return False

    def _if(self, statement: ast.If) -> bool:
        value = self._look(statement.test)
        if value is not _UNKNOWN:
            before = dict(self._settings)
            self._settings |= self._numbers(statement.test)
            ends = self._follow(statement.body if value else statement.orelse)
            self._settings = before
            return ends
        one, other = self._branch(statement.body), self._branch(statement.orelse)
        return one and other

    def _numbers(self, test: ast.expr) -> dict[str, float]:
        """Settings above zero that a test reads."""
        read = [node for node in ast.walk(test) if isinstance(node, ast.Attribute)]
        values = {node.attr: self._held(node) for node in read}
        return {name: value for name, value in values.items() if type(value) is float and value > 0}

    def _note(self, code: str) -> None:
        self.found.append(Draw(code, tuple(self._settings.items())))

    def _branch(self, body: list[ast.stmt]) -> bool:
        """Statements that may be run or not: what they assign is unknown afterwards."""
        before = dict(self._known)
        ends = self._follow(body)
        after = self._known
        self._known = {
            name: before[name] if before.get(name) is value else _UNKNOWN
            for name, value in {**before, **after}.items()
            if name in before and name in after
        }
        return ends

    def _assign(self, statement: ast.stmt) -> None:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For):
            targets = [statement.target]
        value: Any = _UNKNOWN
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            value = self._value(statement.value)
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    self._known[node.id] = value if node is target else _UNKNOWN
                    self._chances.pop(node.id, None)

    def _chance(self, statement: ast.Assign | ast.AnnAssign) -> bool:
        """`chance = torch.rand([])`: what it is compared with tells whether it matters."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        drawn = _uniform(statement.value)
        if not drawn or self._seeded or not isinstance(targets[0], ast.Name):
            return False
        self._chances[targets[0].id] = drawn
        return True

    def _look(self, value: ast.expr) -> Any:
        """Notes what an expression draws; its value where that is known."""
        match value:
            case ast.BoolOp():
                for part in value.values:
                    found = self._look(part)
                    if found is not _UNKNOWN and bool(found) is isinstance(value.op, ast.Or):
                        return found
                return self._value(value)
            case ast.IfExp():
                test = self._look(value.test)
                for chosen, taken in ((value.body, True), (value.orelse, False)):
                    if test is _UNKNOWN or bool(test) is taken:
                        self._look(chosen)
                return self._value(value)
            case ast.Compare(ops=[ast.Lt()]) if self._never(value):
                return False
            case ast.Name(ctx=ast.Load()) if value.id in self._chances:
                self._note(self._chances[value.id])
            case ast.Call():
                self._call(value)
        for inner in ast.iter_child_nodes(value):
            if isinstance(inner, ast.expr):
                self._look(inner)
            elif isinstance(inner, ast.keyword):
                self._look(inner.value)
            elif isinstance(inner, ast.comprehension):
                self._look(inner.iter)
        return self._value(value)

    def _never(self, compared: ast.Compare) -> bool:
        """A uniform draw compared with a probability of zero."""
        limit = self._value(compared.comparators[0])
        chance = isinstance(compared.left, ast.Name) and compared.left.id in self._chances
        drawn = chance or _uniform(compared.left)
        return bool(drawn) and isinstance(limit, int | float) and limit <= 0

    def _call(self, call: ast.Call) -> None:
        drawn = _drawn(call)
        if drawn and not self._seeded:
            self._note(drawn)
        caller = self._calls[-1]
        method = called_method(type(self._module), caller, call.func) or called_function(
            caller, call.func
        )
        if method is None or any(method.tree is other.tree for other in self._calls):
            return
        given: dict[str, Any] = {}
        if not any(isinstance(value, ast.Starred) for value in call.args):
            given = dict(zip(method.parameters, (self._value(value) for value in call.args)))
        given |= {word.arg: self._value(word.value) for word in call.keywords if word.arg}
        self.run(method, given)

    def _value(self, value: ast.expr | None) -> Any:
        match value:
            case ast.Constant():
                return value.value
            case ast.Name():
                return self._known.get(value.id, _UNKNOWN)
            case ast.Attribute():
                found = self._held(value)
                return found if isinstance(found, _PLAIN) else _UNKNOWN
            case ast.UnaryOp(op=ast.Not()):
                inner = self._value(value.operand)
                return inner if inner is _UNKNOWN else not inner
            case ast.BoolOp():
                return self._of_all([self._value(each) for each in value.values], value.op)
            case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
                left, right = self._value(value.left), self._value(value.comparators[0])
                if left is _UNKNOWN or right is _UNKNOWN:
                    return _UNKNOWN
                return _compared(_COMPARISONS[type(op)], left, right)
        return _UNKNOWN

    def _of_all(self, values: list[Any], op: ast.boolop) -> Any:
        decides = isinstance(op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) is decides for value in values):
            return decides
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decides

    def _held(self, value: ast.Attribute) -> Any:
        """`self.a.b`, read from the objects' own values."""
        if isinstance(value.value, ast.Name):
            holder: Any = self._module if value.value.id == "self" else _UNKNOWN
        elif isinstance(value.value, ast.Attribute):
            holder = self._held(value.value)
        else:
            holder = _UNKNOWN
        found = vars(holder).get(value.attr, _UNKNOWN) if hasattr(holder, "__dict__") else _UNKNOWN
        return found


def _assigned(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _compared(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    try:
        return bool(compare(left, right))
    except TypeError:
        return _UNKNOWN


def _uniform(value: ast.expr | None) -> str:
    """`torch.rand([])`, `random.random()`, also as a number: between zero and one."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "item":
            return _uniform(value.func.value)
        if value.func.attr in ("rand", "random"):
            return _drawn(value)
    return ""


def _seeds(node: ast.AST) -> bool:
    """`np.random.seed(0)`: what is drawn after it is the same on every rank."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("seed", "manual_seed")
    )
