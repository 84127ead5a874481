"""Ways to change a model that people do change models: names, layouts, adapters, norms, biases.

Every mutator takes a model and changes it in place, whatever its family calls its parts; it gives
back whether there was something to change. What a planner makes of the result must be right, or a
refusal (`hp_integration.families.judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Mutator = Callable[[Any], bool]
WAYS_IN = ("q_proj", "query", "gate_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h", "q_b_proj")
WAYS_OUT = ("o_proj", "dense", "down_proj", "fc2", "dense_4h_to_h", "c_proj", "out_proj")
HALVES = (WAYS_IN, WAYS_OUT)


def linears(model: nn.Module, leaves: tuple[str, ...]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Owner, name and layer of the `nn.Linear` modules with one of these names."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if name in leaves and type(layer) is nn.Linear:
                yield owner, name, layer


def _first(model: nn.Module, leaves: tuple[str, ...]) -> tuple[nn.Module, str, Any] | None:
    return next(linears(model, leaves), None)


class Adapted(nn.Module):
    """A frozen layer beside a low-rank one, as adapter libraries wrap it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        whole: Tensor = self.base_layer(x)
        return whole + low


class AdaptedInPlace(nn.Linear):
    """A layer whose adapter's factors are parameters of its own."""

    def forward(self, input: Tensor) -> Tensor:
        own: Any = self
        low = nn.functional.linear(nn.functional.linear(input, own.lora_A), own.lora_B)
        return super().forward(input) + low


class Stored(nn.Module):
    """A projection that keeps its weight [in, out]."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().T.contiguous())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        made = x @ self.weight
        return made if self.bias is None else made + self.bias


class Scaled(nn.Linear):
    """A layer with one factor for every output feature."""

    scale: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Normed(nn.Sequential):
    """A layer whose result is normalised."""


def replaced(make: Callable[[nn.Linear], nn.Module], leaves: tuple[str, ...]) -> Mutator:
    def mutate(model: nn.Module) -> bool:
        found = _first(model, leaves)
        if found is not None:
            owner, name, layer = found
            setattr(owner, name, make(layer))
        return found is not None

    return mutate


def _adapted_in_place(layer: Any) -> nn.Module:
    layer.lora_A = nn.Parameter(torch.empty(4, layer.in_features))
    layer.lora_B = nn.Parameter(torch.empty(layer.out_features, 4))
    layer.__class__ = AdaptedInPlace
    made: nn.Module = layer
    return made


def _scaled(layer: Any) -> nn.Module:
    layer.scale = nn.Parameter(torch.ones(layer.out_features))
    layer.__class__ = Scaled
    made: nn.Module = layer
    return made


def _with_bias(layer: nn.Linear) -> nn.Module:
    layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    return layer


def _without_bias(layer: nn.Linear) -> nn.Module:
    layer.register_parameter("bias", None)
    return layer


def _normed(layer: nn.Linear) -> nn.Module:
    return Normed(layer, nn.LayerNorm(layer.out_features))


def renamed(leaves: tuple[str, ...]) -> Mutator:
    """The layer has another name; the forward finds it by the old one."""

    def mutate(model: nn.Module) -> bool:
        found = _first(model, leaves)
        if found is not None:
            owner, name, _ = found
            owner._modules["part_" + name[::-1]] = owner._modules.pop(name)
            hidden = {name: property(lambda self: self._modules["part_" + name[::-1]])}
            owner.__class__ = type(type(owner).__name__, (type(owner),), hidden)
        return found is not None

    return mutate


def exchanged(model: nn.Module) -> bool:
    """Two projections of one shape trade names, in the forward too."""
    for owner in model.modules():
        parts = owner._modules
        k, v = parts.get("k_proj"), parts.get("v_proj")
        if type(k) is nn.Linear and type(v) is nn.Linear and k.weight.shape == v.weight.shape:
            parts["k_proj"], parts["v_proj"] = v, k
            names = {"k_proj": property(lambda self: self._modules["v_proj"])}
            names["v_proj"] = property(lambda self: self._modules["k_proj"])
            owner.__class__ = type(type(owner).__name__, (type(owner),), names)
            return True
    return False


def wider_layer(model: nn.Module) -> bool:
    """The inner features of one MLP are more than those of the others."""
    for owner in model.modules():
        gate, up, down = (owner._modules.get(n) for n in ("gate_proj", "up_proj", "down_proj"))
        parts = [part for part in (gate, up, down) if type(part) is nn.Linear]
        if len(parts) != 3:
            continue
        hidden = parts[0].in_features
        for name in ("gate_proj", "up_proj"):
            setattr(owner, name, nn.Linear(hidden, 160, bias=parts[0].bias is not None))
        owner.down_proj = nn.Linear(160, hidden, bias=parts[2].bias is not None)
        return True
    return False


def own_parameter(model: nn.Module) -> bool:
    """An attention or MLP multiplies what it gives by a parameter of its own."""
    found = _first(model, WAYS_OUT)
    if found is None:
        return False
    owner: Any = found[0]
    owner.temper = nn.Parameter(torch.ones(found[2].out_features))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = super(made, self).forward(*args, **kwargs)
        if isinstance(given, tuple):
            return given[0] * self.temper, *given[1:]
        return given * self.temper

    made: Any = type(type(owner).__name__, (type(owner),), {"forward": forward})
    owner.__class__ = made
    return True


MUTATORS: dict[str, Mutator] = {
    "adapter around a way in": replaced(Adapted, WAYS_IN),
    "adapter around a way out": replaced(Adapted, WAYS_OUT),
    "adapter in a way in": replaced(_adapted_in_place, WAYS_IN),
    "adapter in a way out": replaced(_adapted_in_place, WAYS_OUT),
    "adapter in the head": replaced(_adapted_in_place, ("lm_head", "embed_out")),
    "scaled way in": replaced(_scaled, WAYS_IN),
    "way in stored [in, out]": replaced(Stored, WAYS_IN),
    "way out stored [in, out]": replaced(Stored, WAYS_OUT),
    "bias added to a way in": replaced(_with_bias, WAYS_IN),
    "bias added to a way out": replaced(_with_bias, WAYS_OUT),
    "bias added to the head": replaced(_with_bias, ("lm_head", "embed_out")),
    "bias taken from a way in": replaced(_without_bias, WAYS_IN),
    "bias taken from a way out": replaced(_without_bias, WAYS_OUT),
    "norm after a way in": replaced(_normed, WAYS_IN),
    "norm after a way out": replaced(_normed, WAYS_OUT),
    "way in renamed": renamed(WAYS_IN),
    "way out renamed": renamed(WAYS_OUT),
    "k and v exchanged": exchanged,
    "one wider MLP": wider_layer,
    "own parameter of a block": own_parameter,
}
CHANGES: dict[str, dict[str, Any]] = {
    "one key/value head": {"num_key_value_heads": 1},
    "heads longer than hidden / heads": {"head_dim": 24},
    "vocabulary of 127": {"vocab_size": 127},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "three heads": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "inner features of 97": {"intermediate_size": 97, "moe_intermediate_size": 33},
}
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "olmo2",
    "cohere",
    "phi",
    "phi3",
    "gpt_neox",
    "gpt2",
    "starcoder2",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v3",
    "falcon",
    "qwen3_next",
)
