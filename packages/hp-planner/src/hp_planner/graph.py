"""Reads a module into frozen data: the only place where the planner touches a live model.

The passes see a `ModuleGraph` and nothing else, so they cannot change the model, and the model
may live on the meta device. A node records what the passes confirm a name with: the module's
class, the signature of its forward, which names that forward uses, and the shapes of its own
parameters. From the config only plain values are kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import field, frozen
from torch import nn

from hp_dtensor.plan_checks import tied_names
from hp_planner.code_reading import (
    Signature,
    StreamCode,
    layer_problem,
    read_signature,
    stream_code,
)
from hp_planner.data_flow import Feeds, feeds
from hp_planner.dropout_calls import Call, called_rates, dropout_calls
from hp_planner.order import Order
from hp_planner.random_draws import Draw, may_draw, random_draws
from hp_planner.summand_code import EXPERTS, OUTPUT_LAYERS, SummandCode, summand_code

DROPOUT = "torch.nn.modules.dropout.Dropout"
MODULE_LIST = "torch.nn.modules.container.ModuleList"

ConfigValue = str | int | float | bool | None

# What a model calls the sizes the planner needs; the first name found counts.
CONFIG_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
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
class ModuleNode:
    """One module: qualified name, class, forward, own parameters, children, plain attributes.

    Attributes:
        training: it draws dropout masks and the like.
        streams: for each child that is a list of modules, how the forward runs through it.
        as_layer: why its forward may mix positions outside its parts; None if it is in no list.
        config: integers that the forward reads as `self.config.name`.
        stated: the order of its fused weight, where an override states it.
        rates: dropout rates above zero that it holds: `p` of a dropout module, others by name.
        feeds: for each part that its forward calls, the parts in what that is called with.
        summand: what its forward does with what its output layer returns.
        experts_sum: what it does with what its experts return.
        draws: random numbers that its forward draws by itself, in the mode it is in.
    """

    name: str
    class_name: str
    bases: tuple[str, ...]
    forward: Signature
    parameters: tuple[ParameterNode, ...] = ()
    children: tuple[str, ...] = ()
    attributes: tuple[tuple[str, int], ...] = ()
    training: bool = True
    streams: tuple[tuple[str, StreamCode], ...] = ()
    as_layer: str | None = None
    config: tuple[tuple[str, int], ...] = ()
    stated: Order | None = None
    rates: tuple[tuple[str, float], ...] = ()
    feeds: Feeds = ()
    summand: SummandCode = field(factory=SummandCode)
    experts_sum: SummandCode = field(factory=SummandCode)
    draws: tuple[Draw, ...] = ()

    def attribute(self, *names: str) -> int | None:
        """The first integer attribute of these names, or None."""
        known = dict(self.attributes)
        return next((known[name] for name in names if name in known), None)

    def parameter(self, leaf: str) -> ParameterNode | None:
        return next((p for p in self.parameters if p.leaf == leaf), None)

    def is_a(self, base: str) -> bool:
        return base in self.bases

    @property
    def drops(self) -> bool:
        """Whether it is a `nn.Dropout`, no other class, that drops anything."""
        return self.bases[:1] == (DROPOUT,) and bool(self.rates)


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
        used_directly: weights and biases that some forward reads past the layer that holds them.
    """

    model: str
    model_type: str
    modules: tuple[ModuleNode, ...]
    config: tuple[tuple[str, ConfigValue], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    used_directly: frozenset[str] = field(init=False, eq=False, repr=False)
    _modules_by_name: dict[str, ModuleNode] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        direct = (
            join(node.name, name)
            for node in self.modules
            for name in node.forward.own
            if "." in name and name.endswith((".weight", ".bias"))
        )
        object.__setattr__(self, "used_directly", frozenset(direct))
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


def generalized(name: str) -> str:
    """The name with its numbers opened, as an override would write it."""
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))


def read_module(model: nn.Module) -> ModuleGraph:
    """The model as frozen data. Reads only; values of tensors are never looked at.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan() takes a torch.nn.Module, found {type(model).__name__}")
    codes = _Codes()
    in_lists = {id(layer) for m in model.modules() if isinstance(m, nn.ModuleList) for layer in m}
    nodes = tuple(
        _node(name, module, codes, id(module) in in_lists) for name, module in model.named_modules()
    )
    config = getattr(model, "config", None)
    return ModuleGraph(
        model=type(model).__name__,
        model_type=str(getattr(config, "model_type", "") or ""),
        modules=nodes,
        config=_config_values(config),
        tied=tuple(tied_names(model)),
    )


@frozen
class _Codes:
    """Readings by class, each made once."""

    signatures: dict[type, Signature] = field(factory=dict)
    layers: dict[type, str] = field(factory=dict)
    streams: dict[tuple[type, str], StreamCode] = field(factory=dict)
    flows: dict[type, Feeds] = field(factory=dict)
    drops: dict[type, tuple[Call, ...]] = field(factory=dict)
    drawing: dict[type, bool] = field(factory=dict)
    summands: dict[tuple[type, frozenset[str]], SummandCode] = field(factory=dict)

    def feeds(self, cls: type) -> Feeds:
        if cls not in self.flows:
            self.flows[cls] = feeds(cls)
        return self.flows[cls]

    def dropouts(self, cls: type) -> tuple[Call, ...]:
        if cls not in self.drops:
            self.drops[cls] = dropout_calls(cls)
        return self.drops[cls]

    def signature(self, cls: type) -> Signature:
        if cls not in self.signatures:
            self.signatures[cls] = read_signature(cls)
        return self.signatures[cls]

    def summand(self, cls: type, outputs: frozenset[str] = OUTPUT_LAYERS) -> SummandCode:
        if (cls, outputs) not in self.summands:
            self.summands[cls, outputs] = summand_code(cls, outputs)
        return self.summands[cls, outputs]

    def draws(self, cls: type) -> bool:
        if cls not in self.drawing:
            self.drawing[cls] = not cls.__module__.startswith("torch.") and may_draw(cls)
        return self.drawing[cls]

    def layer(self, cls: type) -> str:
        if cls not in self.layers:
            self.layers[cls] = layer_problem(cls)
        return self.layers[cls]

    def stream(self, cls: type, child: str) -> StreamCode:
        if (cls, child) not in self.streams:
            self.streams[cls, child] = stream_code(cls, child)
        return self.streams[cls, child]


def _node(name: str, module: nn.Module, codes: _Codes, in_list: bool) -> ModuleNode:
    cls = type(module)
    lists = [key for key, child in module._modules.items() if isinstance(child, nn.ModuleList)]
    return ModuleNode(
        name=name,
        class_name=cls.__name__,
        bases=tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__),
        forward=codes.signature(cls),
        summand=codes.summand(cls),
        experts_sum=codes.summand(cls, EXPERTS) if "experts" in module._modules else SummandCode(),
        training=module.training,
        streams=tuple((key, codes.stream(cls, key)) for key in lists),
        as_layer=codes.layer(cls) if in_list and module._modules else None,
        config=_read_config(module, codes.signature(cls)),
        rates=tuple(dict((*_rates(module), *_called(module, codes))).items()),
        draws=random_draws(module) if codes.draws(cls) else (),
        feeds=codes.feeds(cls) if any(_rates(part) for part in module.children()) else (),
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


def _rates(module: nn.Module) -> tuple[tuple[str, float], ...]:
    """Rates of dropout above zero; a module that drops calls its own `p`."""
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and (name == "p" if is_dropout else "drop" in name)
    )


def _called(module: nn.Module, codes: _Codes) -> tuple[tuple[str, float], ...]:
    """Rates that its forward hands to functions; what a dropout module draws is its `p`."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return ()
    return called_rates(codes.dropouts(type(module)), module)


def _read_config(module: nn.Module, forward: Signature) -> tuple[tuple[str, int], ...]:
    held = vars(module).get("config")
    names = sorted(name[7:] for name in forward.own if name.startswith("config."))
    values = ((name, getattr(held, name, None)) for name in names if "." not in name)
    return tuple((name, value) for name, value in values if type(value) is int)


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
    text = getattr(config, "get_text_config", lambda: config)()
    if text is not config:
        # A model with towers keeps the decoder's sizes in a configuration of its own.
        values = dict(_config_values(text)) | {k: v for k, v in values.items() if v is not None}
    plain = {
        key: value
        for key, value in values.items()
        if not key.startswith("_") and isinstance(value, str | int | float | bool)
    }
    return tuple(sorted(plain.items()))
