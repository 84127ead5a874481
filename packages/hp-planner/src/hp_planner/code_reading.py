"""What a module's forward does, read from its code without running it.

Two readings. The byte code gives the names that a forward uses, those of the module's own methods
that it calls included. The source, where it can be found, tells how hidden states pass from layer
to layer; where it cannot, nothing about that is taken for granted.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from attrs import frozen

from hp_planner.methods import forward_tree, own_attribute

# Calls in a layer's forward, besides those of its parts, that treat every position alike.
POINTWISE_CALLS = frozenset(
    {"dropout", "to", "float", "type", "type_as", "half", "contiguous", "clone"}
    | {"clamp", "isinf", "finfo", "any", "isinstance", "hasattr", "len", "warning_once", "warn"}
    | {"is_autocast_enabled", "all", "ValueError", "item"}
)


@frozen
class Signature:
    """What is known of a module class's forward without running it.

    Attributes:
        owner: qualified name of the class that defines it.
        arguments: its named arguments, in order, without `self`, `*args` and `**kwargs`.
        names: the attributes and global names used by it and by the methods it calls.
        own: attributes it reads of the module, dotted where it goes on: `num_heads`,
            `config.num_heads`.
        returns_tuple: it returns a tuple display, as `return output, weights` does.
    """

    owner: str
    arguments: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    returns_tuple: bool = False


@frozen
class StreamCode:
    """How a model's forward takes the hidden states through a list of layers.

    Attributes:
        problem: why that is not a plain chain, layer after layer; empty if it is.
        norm: the module that takes the hidden states after the last layer.
        later: attributes of the model that its forward uses after that.
    """

    problem: str = ""
    norm: str = ""
    later: tuple[str, ...] = ()


def read_signature(cls: type) -> Signature:
    """The forward of a module class."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward: Callable[..., Any] = inspect.unwrap(vars(owner)["forward"])
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind in (*named, inspect.Parameter.KEYWORD_ONLY)
    ]
    codes = tuple(_codes(cls, getattr(forward, "__code__", None)))
    return Signature(
        owner=f"{owner.__module__}.{owner.__qualname__}",
        arguments=tuple(name for name in arguments if name != "self"),
        names=frozenset(name for code in codes for name in code.co_names),
        own=frozenset(name for code in codes for name in _own_names(code)),
        returns_tuple=bool(codes) and _returns_tuple(codes[0]),
    )


def _codes(cls: type, first: CodeType | None) -> Iterator[CodeType]:
    """The forward's code, functions inside it, and the class's methods it calls by name."""
    waiting, seen = [first] if first is not None else [], set()
    while waiting:
        code = waiting.pop(0)
        if code in seen:
            continue
        seen.add(code)
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in sorted({name.split(".")[0] for name in _own_names(code)}):
            method = inspect.unwrap(getattr(cls, name, None) or len)
            if isinstance(method, FunctionType) and not method.__module__.startswith("torch."):
                waiting.append(method.__code__)


def _own_names(code: CodeType) -> Iterator[str]:
    """`self.a.b` as `a.b`, for every chain of attributes that begins at `self`."""
    chain: list[str] | None = None
    for instruction in dis.get_instructions(code):
        begins = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        if begins or chain is None or instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            if chain:
                yield ".".join(chain)
            chain = [] if begins and instruction.argval == "self" else None
        else:
            chain.append(instruction.argval)
    if chain:
        yield ".".join(chain)


def _returns_tuple(code: CodeType) -> bool:
    operations = [instruction.opname for instruction in dis.get_instructions(code)]
    return any(
        first == "BUILD_TUPLE" and second == "RETURN_VALUE"
        for first, second in pairwise(operations)
    )


def layer_problem(cls: type) -> str:
    """Why a layer's forward, outside the parts it calls, may not treat every position alike.

    Parts are attributes of the module, called as `self.name(...)`. Empty if every other call is
    known to act on one position at a time, and nothing is sliced or asked for its shape.
    """
    tree = forward_tree(cls)
    if tree is None:
        return f"the source of {cls.__name__}.forward cannot be read"
    for node in (inner for statement in tree.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Call) and not own_attribute(node.func):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called not in POINTWISE_CALLS:
                return f"{cls.__name__}.forward calls {called or 'a computed function'}"
        if isinstance(node, ast.Attribute) and node.attr in ("shape", "mT", "T"):
            return f"{cls.__name__}.forward reads {node.attr}"
        part = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant)
        if part and not _in_annotation(tree, node):
            return f"{cls.__name__}.forward takes part of a tensor or of a list"
    return ""


def _in_annotation(tree: ast.FunctionDef, node: ast.AST) -> bool:
    arguments = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
    extra = [a for a in (tree.args.vararg, tree.args.kwarg) if a is not None]
    notes = [a.annotation for a in (*arguments, *extra)] + [tree.returns]
    notes += [n.annotation for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)]
    return any(node is part for note in notes if note is not None for part in ast.walk(note))


def stream_code(cls: type, layers: str) -> StreamCode:
    """How the forward of `cls` runs its list of layers, the attribute called `layers`."""
    tree = forward_tree(cls)
    if tree is None:
        return StreamCode(f"the source of {cls.__name__}.forward cannot be read")
    uses = [node for node in ast.walk(tree) if own_attribute(node) == layers]
    found = [
        (block, index)
        for block in _blocks(tree)
        for index, statement in enumerate(block)
        if isinstance(statement, ast.For)
        and any(own_attribute(node) == layers for node in ast.walk(statement.iter))
    ]
    if len(found) != 1 or len(uses) != 1:
        return StreamCode(f"{cls.__name__}.forward has no single loop over {layers}")
    block, index = found[0]
    loop = block[index]
    assert isinstance(loop, ast.For)
    stream = _stream_of(loop)
    if not stream:
        return StreamCode(f"the loop of {cls.__name__}.forward over {layers} is not a plain chain")
    norm = _taker(block[index + 1 :], stream)
    if not norm:
        return StreamCode(f"{cls.__name__}.forward has no norm right after its layers")
    used = {
        name
        for node in ast.walk(tree)
        if (name := own_attribute(node)) and getattr(node, "lineno", 0) > (loop.end_lineno or 0)
    }
    return StreamCode(norm=norm, later=tuple(sorted(used - {norm})))


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield body


def _stream_of(loop: ast.For) -> str:
    """The variable that each layer takes and gives, if nothing else is done with it."""
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    stream, result = "", ""
    for statement in loop.body:
        call = _layer_call(statement, targets)
        if call is not None and isinstance(statement, ast.Assign):
            taken = call.args[0] if call.args else _keyword(call, "hidden_states")
            target = statement.targets[0]
            names = isinstance(taken, ast.Name) and isinstance(target, ast.Name)
            if stream or not names or len(statement.targets) != 1:
                return ""
            assert isinstance(taken, ast.Name)
            assert isinstance(target, ast.Name)
            stream, result = taken.id, target.id
            rest = [*call.args[1:], *(k.value for k in call.keywords if k.arg != "hidden_states")]
            if any(stream in _names(value) for value in rest):
                return ""
        elif stream and result != stream and _picks_first(statement, stream, result):
            result = stream
        elif not _only_collects(statement, {stream or "hidden_states", result}):
            return ""
    return stream if stream and result == stream else ""


def _layer_call(statement: ast.stmt, targets: set[str]) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Assign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value if value.func.id in targets else None
    return None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def _picks_first(statement: ast.stmt, stream: str, result: str) -> bool:
    """`stream = result[0]`."""
    return ast.unparse(statement) == f"{stream} = {result}[0]"


def _only_collects(statement: ast.stmt, streams: set[str]) -> bool:
    """It leaves the hidden states alone, or keeps a copy of them for the caller."""
    if not streams & _names(statement):
        return True
    if isinstance(statement, ast.If):
        return all(_only_collects(inner, streams) for inner in (*statement.body, *statement.orelse))
    if isinstance(statement, ast.AugAssign | ast.Assign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        kept = [ast.unparse(target) for target in targets]
        return all(name.startswith("all_") for name in kept)
    return False


def _taker(statements: list[ast.stmt], stream: str) -> str:
    """The module of the first statement that uses the stream: `x = self.norm(stream)`."""
    for statement in statements:
        if stream not in _names(statement):
            continue
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Call) and len(value.args) == 1:
            argument = value.args[0]
            if isinstance(argument, ast.Name) and argument.id == stream:
                return own_attribute(value.func)
        return ""
    return ""


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
