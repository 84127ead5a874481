"""The source of a module's forward, and of the methods and functions that it calls.

Read without running it. What has no source, such as a method made at run time, is not found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any

from attrs import frozen


@frozen(eq=False)
class Method:
    """A method of a module class, or a function beside it, with its source.

    Attributes:
        owner: the class whose body defines it.
        scope: global names of the file it is in.
    """

    tree: ast.FunctionDef
    owner: type
    scope: Mapping[str, Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Named parameters in order, without `self`."""
        found = (*self.tree.args.posonlyargs, *self.tree.args.args, *self.tree.args.kwonlyargs)
        return tuple(each.arg for each in found if each.arg != "self")


def forward_method(cls: type) -> Method | None:
    """The forward of a module class; None where its source cannot be read."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return _method(owner, vars(owner)["forward"])


def forward_tree(cls: type) -> ast.FunctionDef | None:
    """The source of the forward of a module class; None where it cannot be read."""
    found = forward_method(cls)
    return found.tree if found is not None else None


def called_method(cls: type, caller: Method, function: ast.expr) -> Method | None:
    """What `self.name(...)` or `super().name(...)` in `caller` runs; None for anything else.

    Methods of PyTorch's own are nobody's helpers, nor is what has no source.
    """
    name = own_attribute(function)
    if name:
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    elif isinstance(function, ast.Attribute) and _is_super(function.value):
        name, order = function.attr, cls.__mro__
        above = order[order.index(caller.owner) + 1 :] if caller.owner in order else ()
        owner = next((base for base in above if name in vars(base)), None)
    else:
        return None
    if owner is None or owner.__module__.startswith("torch."):
        return None
    return _method(owner, vars(owner)[name])


def called_function(caller: Method, function: ast.expr) -> Method | None:
    """The function that a call of a bare name in `caller` runs, if it is of the same file."""
    found = caller.scope.get(function.id) if isinstance(function, ast.Name) else None
    if not isinstance(found, FunctionType) or found.__module__ != caller.scope.get("__name__"):
        return None
    return _method(caller.owner, found)


def forward_methods(cls: type) -> tuple[Method, ...]:
    """The forward, and the methods of the module that it calls, and so on; each once."""
    first = forward_method(cls)
    found = [first] if first is not None else []
    for method in found:
        for node in ast.walk(method.tree):
            called = called_method(cls, method, node.func) if isinstance(node, ast.Call) else None
            if called is not None and not any(_same(called, other) for other in found):
                found.append(called)
    return tuple(found)


def _same(one: Method, other: Method) -> bool:
    return (one.owner, one.tree.name) == (other.owner, other.tree.name)


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _method(owner: type, function: Any) -> Method | None:
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return None
    tree = _source(function)
    return Method(tree, owner, function.__globals__) if tree is not None else None


@cache
def _source(function: FunctionType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def own_attribute(node: ast.AST) -> str:
    """`name` for the expression `self.name`, empty for any other."""
    is_own = (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return node.attr if is_own and isinstance(node, ast.Attribute) else ""
