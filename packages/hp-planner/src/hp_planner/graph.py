"""Reads a module into frozen data: the only place where the planner touches a live model.

The passes see a `ModuleGraph` and nothing else, so they cannot change the model, and the model
may live on the meta device. A node records what the passes confirm a name with: the module's
class, the signature of its forward, which names that forward uses, and the shapes of its own
parameters. From the config only plain values are kept.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

from attrs import field, frozen
from torch import nn

from hp_dtensor.plan_checks import tied_names

ConfigValue = str | int | float | bool | None

# What a model calls the sizes the planner needs; the first name found counts.
CONFIG_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


@frozen
class ParameterNode:
    """One parameter: qualified name, owning module, shape, bytes an element, trainable or not."""

    name: str
    module: str
    shape: tuple[int, ...]
    element_size: int
    requires_grad: bool

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@frozen
class Signature:
    """What is known of a module class's forward without running it.

    Attributes:
        owner: qualified name of the class that defines it.
        arguments: its named arguments, in order, without `self`, `*args` and `**kwargs`.
        names: the attributes and global names its code uses.
        returns_tuple: it returns a tuple display, as `return output, weights` does.
    """

    owner: str
    arguments: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    returns_tuple: bool = False


@frozen
class ModuleNode:
    """One module: qualified name, class, forward, own parameters, children, plain attributes."""

    name: str
    class_name: str
    bases: tuple[str, ...]
    forward: Signature
    parameters: tuple[ParameterNode, ...] = ()
    children: tuple[str, ...] = ()
    attributes: tuple[tuple[str, int], ...] = ()

    def attribute(self, *names: str) -> int | None:
        """The first integer attribute of these names, or None."""
        known = dict(self.attributes)
        return next((known[name] for name in names if name in known), None)

    def parameter(self, leaf: str) -> ParameterNode | None:
        return next((p for p in self.parameters if p.leaf == leaf), None)

    def is_a(self, base: str) -> bool:
        return base in self.bases


def _index(graph: ModuleGraph) -> dict[str, ModuleNode]:
    return {node.name: node for node in graph.modules}


@frozen
class ModuleGraph:
    """A model as data.

    Attributes:
        model: class name of the root module; model_type: the config's name of the family.
        modules: every module in the model's order, the root (name `""`) first.
        config: the config's plain values, sorted by name.
        tied: groups of two or more names of one parameter, in the model's order.
    """

    model: str
    model_type: str
    modules: tuple[ModuleNode, ...]
    config: tuple[tuple[str, ConfigValue], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    _modules_by_name: dict[str, ModuleNode] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_modules_by_name", _index(self))

    @property
    def parameters(self) -> Iterator[ParameterNode]:
        """Every name of every parameter: a tied parameter appears under each of its names."""
        return (p for node in self.modules for p in node.parameters)

    @property
    def aliases(self) -> dict[str, str]:
        """Every later name of a tied parameter, with the name it is planned under."""
        return {name: names[0] for names in self.tied for name in names[1:]}

    def module(self, name: str) -> ModuleNode:
        return self._modules_by_name[name]

    def find(self, name: str) -> ModuleNode | None:
        return self._modules_by_name.get(name)

    def size(self, name: str) -> int | None:
        """A size from the config under any of the names models give it (`CONFIG_NAMES`)."""
        values = dict(self.config)
        for candidate in CONFIG_NAMES[name]:
            value = values.get(candidate)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None


def parent(name: str) -> str:
    """Qualified name of the module that holds this one."""
    return name.rpartition(".")[0]


def join(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module else leaf


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is a proper descendant of `module`."""
    return name != module and (not module or name.startswith(module + "."))


def read_module(model: nn.Module) -> ModuleGraph:
    """The model as frozen data. Reads only; values of tensors are never looked at.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan() takes a torch.nn.Module, found {type(model).__name__}")
    signatures: dict[type, Signature] = {}
    nodes = tuple(
        _node(name, module, signatures)
        for name, module in model.named_modules(remove_duplicate=False)
    )
    config = getattr(model, "config", None)
    return ModuleGraph(
        model=type(model).__name__,
        model_type=str(getattr(config, "model_type", "") or ""),
        modules=nodes,
        config=_config_values(config),
        tied=tuple(tied_names(model)),
    )


def _node(name: str, module: nn.Module, signatures: dict[type, Signature]) -> ModuleNode:
    cls = type(module)
    if cls not in signatures:
        signatures[cls] = _signature(cls)
    return ModuleNode(
        name=name,
        class_name=cls.__name__,
        bases=tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__),
        forward=signatures[cls],
        parameters=tuple(
            ParameterNode(
                name=join(name, leaf),
                module=name,
                shape=tuple(parameter.shape),
                element_size=parameter.element_size(),
                requires_grad=parameter.requires_grad,
            )
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ),
        children=tuple(join(name, child) for child in module._modules),
        attributes=tuple(
            (key, int(value))
            for key, value in vars(module).items()
            if isinstance(value, int) and not key.startswith("_") and key != "training"
        ),
    )


def _signature(cls: type) -> Signature:
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward: Callable[..., Any] = inspect.unwrap(vars(owner)["forward"])
    code = getattr(forward, "__code__", None)
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind in (*named, inspect.Parameter.KEYWORD_ONLY)
    ]
    return Signature(
        owner=f"{owner.__module__}.{owner.__qualname__}",
        arguments=tuple(name for name in arguments if name != "self"),
        names=frozenset(code.co_names) if code is not None else frozenset(),
        returns_tuple=code is not None and _returns_tuple(code),
    )


def _returns_tuple(code: CodeType) -> bool:
    operations = [instruction.opname for instruction in dis.get_instructions(code)]
    return any(
        first == "BUILD_TUPLE" and second == "RETURN_VALUE"
        for first, second in pairwise(operations)
    )


def _config_values(config: object) -> tuple[tuple[str, ConfigValue], ...]:
    """Plain values of a config object or mapping, read through its own attribute names."""
    if config is None:
        return ()
    values = dict(config) if isinstance(config, dict) else dict(vars(config))
    values.setdefault("model_type", getattr(config, "model_type", None))
    for names in CONFIG_NAMES.values():
        for name in names:
            if name not in values and not isinstance(config, dict):
                values[name] = getattr(config, name, None)
    plain = {
        key: value
        for key, value in values.items()
        if not key.startswith("_") and isinstance(value, str | int | float | bool)
    }
    return tuple(sorted(plain.items()))
