"""Everything that hp-platform's source asks of torch_npu, found in the source itself.

The device module is reached in two ways only: as `self._module` in `AcceleratorDevice`, and by
`torch.get_device_module`. The compiled part is reached by `importlib.import_module`. Whatever
is done with them must be an immediate call, or the names below could not be complete; anything
else is an `UnseenUseError`.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

import hp_platform

ROOT = Path(hp_platform.__file__).parent


class UnseenUseError(AssertionError):
    """The source uses torch_npu in a way that the contract cannot see."""


@dataclass
class Uses:
    """What is asked for.

    Attributes:
        calls: (name in the device module, number of positional arguments, keywords).
        methods: (class in the device module, method, parameter names after self).
        compiled: attribute chains under the compiled module that are called.
        fields: attributes set on what those return.
        keys: keys of the communicator's configuration.
        collectives: functions of torch.distributed that are called.
        modules: modules of torch_npu that are imported.
    """

    calls: set = field(default_factory=set)
    methods: set = field(default_factory=set)
    compiled: set = field(default_factory=set)
    fields: set = field(default_factory=set)
    keys: set = field(default_factory=set)
    collectives: set = field(default_factory=set)
    modules: set = field(default_factory=set)


def uses(root: Path = ROOT) -> Uses:
    """Reads the package's source, without its `testing`.

    Raises:
        UnseenUseError: something of torch_npu is used in another way than by an immediate call.
    """
    found = Uses()
    for path in sorted(root.glob("*.py")):
        tree = ast.parse(path.read_text())
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for function in ast.walk(tree):
            if isinstance(function, ast.ClassDef) and function.name in ("Stream", "Event"):
                _add_protocol(function, found)
        for node in ast.walk(tree):
            _add_device_module(node, parents, path, found)
            _add_import(node, parents, path, found)
            _add_collective(node, parents, path, found)
            _add_keys(node, found)
            _refuse_other_mentions(node, parents, path)
    return found


def _add_protocol(definition: ast.ClassDef, found: Uses) -> None:
    for node in definition.body:
        if isinstance(node, ast.FunctionDef):
            names = tuple(arg.arg for arg in node.args.args[1:])
            found.methods.add((definition.name, node.name, names))


def _add_device_module(node: ast.AST, parents: dict, path: Path, found: Uses) -> None:
    is_module = isinstance(node, ast.Attribute) and ast.unparse(node) == "self._module"
    is_got = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_device_module")
    if is_module or is_got:
        for name in _names_of(node, parents):
            call = _immediate_call(name, parents, path)
            if call is not None:
                keywords = frozenset(keyword.arg for keyword in call.keywords)
                found.calls.add((call.func.attr, len(call.args), keywords))


def _add_import(node: ast.AST, parents: dict, path: Path, found: Uses) -> None:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"):
        return
    module = ast.literal_eval(node.args[0])
    found.modules.add(module)
    for name in _names_of(node, parents, or_none=True):
        parent = parents[name]
        while isinstance(parent, ast.Attribute):
            name, parent = parent, parents[parent]
        if not (isinstance(parent, ast.Call) and parent.func is name):
            raise UnseenUseError(
                f"{path.name}:{name.lineno}: {ast.unparse(parent)} is no immediate call"
            )
        chain = ast.unparse(name).partition(".")[2]
        found.compiled.add((f"{module}.{chain}", len(parent.args), len(parent.keywords)))
        for result in _names_of(parent, parents, or_none=True):
            target = parents[result]
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                found.fields.add(target.attr)
            elif not isinstance(target, ast.Return):
                raise UnseenUseError(
                    f"{path.name}:{result.lineno}: {ast.unparse(target)} is unknown use"
                )


def _add_collective(node: ast.AST, parents: dict, path: Path, found: Uses) -> None:
    name = None
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist":
        name = node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(dist, "):
        name = ast.literal_eval(node.args[1])
    if name is not None and inspect.isfunction(inspect.unwrap(getattr(dist, name, object()))):
        found.collectives.add(name)


def _add_keys(node: ast.AST, found: Uses) -> None:
    if isinstance(node, ast.FunctionDef) and node.name == "as_config":
        for inner in ast.walk(node):
            if isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store):
                found.keys.add(ast.literal_eval(inner.slice))


def _refuse_other_mentions(node: ast.AST, parents: dict, path: Path) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        if any(name.split(".")[0] == "torch_npu" for name in names):
            raise UnseenUseError(f"{path.name}:{node.lineno}: torch_npu is imported directly")
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
        ("torch.npu", "torch_npu.")
    ):
        raise UnseenUseError(f"{path.name}:{node.lineno}: {ast.unparse(node)} is used directly")


def _names_of(node: ast.AST, parents: dict, or_none: bool = False) -> list[ast.AST]:
    """The node itself, or the loads of the variable that it is assigned to."""
    parent = parents[node]
    if isinstance(parent, ast.Expr):
        return []
    if isinstance(parent, ast.Return):  # `_module` itself returns the module
        return []
    if not isinstance(parent, ast.Assign):
        return [node]
    (target,) = parent.targets
    function = parent
    while not isinstance(function, ast.FunctionDef):
        function = parents[function]
    return [
        name
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and name.id == target.id and name is not target
    ]


def _immediate_call(node: ast.AST, parents: dict, path: Path) -> ast.Call | None:
    attribute = parents[node]
    call = parents.get(attribute)
    fine = isinstance(attribute, ast.Attribute) and isinstance(call, ast.Call)
    if not fine or call.func is not attribute:
        raise UnseenUseError(
            f"{path.name}:{node.lineno}: {ast.unparse(attribute)} is no immediate call"
        )
    return call
