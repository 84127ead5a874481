"""Rules of products: linear layers, matrix products, einsum, attention, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.shape import own_indices


def pattern_rule(name: str, text: str, parameters: tuple[str, ...], *, linear: bool = True) -> Rule:
    """A rule that is one pattern over the operands in order."""

    def rule(call: Call) -> Recipe:
        derivation = derive(call.operator, parse(text, linear=linear), call.layouts)
        return Recipe(derivation.operands, derivation.outputs[0])

    return Rule(name, rule, parameters)


def _linear(call: Call) -> Recipe:
    text = "... i, o i + o -> ... o" if len(call.operands) == 3 else "... i, o i -> ... o"
    derivation = derive(call.operator, parse(text), call.layouts, names=("input", "weight", "bias"))
    return Recipe(derivation.operands, derivation.outputs[0])


def _matmul(call: Call) -> Recipe:
    """As `torch.matmul`: vectors lose their dim, leading dims broadcast."""
    left, right = (len(operand.shape) for operand in call.operands[:2])
    if not left or not right:
        raise call.error("both arguments must have at least one dim")
    first = "k" if left == 1 else "... m k"
    second = "k" if right == 1 else "... k n"
    output = ("... " if max(left, right) > 2 else "") + ("m " if left > 1 else "")
    if left <= 2 and right <= 2:
        first, second = first.replace("... ", ""), second.replace("... ", "")
    text = f"{first}, {second} -> {output}{'n' if right > 1 else ''}"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _addmm(call: Call) -> Recipe:
    """`beta * input + alpha * a @ b`; the input broadcasts."""
    bias = {0: "", 1: "n", 2: "m n"}[len(call.operands[0].shape)]
    text = f"{bias} + m k, k n -> m n"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _einsum(call: Call) -> Recipe:
    """The equation is the pattern."""
    equation = str(call.get("equation", "")).replace(" ", "")
    if "->" not in equation:
        raise call.error("an equation without '->' has no rule", "write the output's dims")
    left, right = equation.split("->")
    dims = [_spaced(each) for each in left.split(",")]
    if any(len(set(each)) != len(each) for each in left.replace("...", "").split(",")):
        raise call.error("a letter twice in one operand has no rule", "take torch.diagonal first")
    text = f"{', '.join(dims)} -> {_spaced(right)}"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _spaced(dims: str) -> str:
    return " ".join(dims.replace("...", ".")).replace(".", "...")


# -- attention ---------------------------------------------------------------------------------


def _attention(call: Call) -> Recipe:
    """Batch and heads may be cut; with fewer key and value heads, both alike."""
    if call.get("dropout_p", 0.0) > 0:
        raise call.error(
            "attention dropout draws from each rank's own generator",
            "set dropout_p=0, or attend explicitly and use hp_dtensor.random.dropout",
        )
    query, key = call.get("query"), call.get("key")
    ndim = len(query.shape)
    if ndim < 4 or not call.get("enable_gqa", False):
        text = "... [q] [d], ... [k] [d], ... [k] [e]{mask} -> ... q e"
        sizes: dict[str, int] = {}
        mask = ", ... [q] [k]"
    else:
        groups = key.shape[-3]
        if not groups or query.shape[-3] % groups:
            raise call.error(f"{query.shape[-3]} query heads over {groups} key heads")
        text = "... (g r) [q] [d], ... g [k] [d], ... g [k] [e]{mask} -> ... (g r) q e"
        sizes = {"g": groups, "r": query.shape[-3] // groups}
        mask = ", ... (g r) [q] [k]" if _mask_dims(call) > 2 else ", [q] [k]"
    pattern = parse(text.format(mask=mask if len(call.operands) == 4 else ""), linear=False)
    names = ("query", "key", "value", "attn_mask")
    derivation = derive(call.operator, pattern, call.layouts, sizes=sizes, names=names)
    return Recipe(derivation.operands, derivation.outputs[0])


def _mask_dims(call: Call) -> int:
    mask = call.get("attn_mask")
    return len(mask.shape) if isinstance(mask, Operand) else 0


# -- embedding ---------------------------------------------------------------------------------


def _embedding(call: Call) -> Recipe:
    """A table cut along the vocabulary looks up what it holds; the rest are zeros to be summed."""
    if call.get("max_norm") is not None or call.get("sparse", False):
        raise call.error("max_norm and sparse gradients have no rule")
    if call.get("scale_grad_by_freq", False):
        raise call.error("scale_grad_by_freq has no rule")
    if call.layouts[0].partial_axes():
        raise call.error("the indices are a pending sum, and a lookup is not linear in them")
    derivation = derive(
        call.operator, parse("..., v d -> ... d"), call.layouts, names=("input", "weight")
    )
    table = derivation.operands[1]
    recipe = Recipe(derivation.operands, derivation.outputs[0])
    cut = any(is_sharding(p) and p.dim == 0 for p in table.placements)  # type: ignore[attr-defined]
    if not cut:
        return recipe
    return Recipe(recipe.operands, recipe.outputs, _masked_lookup(table, call.get("padding_idx")))


def _masked_lookup(table: Layout, padding_idx: int | None) -> Callable[..., Tensor]:
    held = own_indices(table, 0)
    padding = None if padding_idx is None else padding_idx % table.shape[0]
    start = int(held[0]) if len(held) else 0
    contiguous = len(held) == 0 or int(held[-1]) - start + 1 == len(held)
    at = None if padding is None else (held == padding).nonzero().flatten().tolist()
    local_padding = at[0] if at else None

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        ids, weight = args[0], args[1]
        if weight.shape[0] == 0:
            # Keeps the table in the graph, so that its (empty) gradient exists on every rank.
            zeros = weight.new_zeros((*ids.shape, weight.shape[1]))
            return zeros + weight.sum()
        if contiguous:
            position = ids - start
            mine = (position >= 0) & (position < weight.shape[0])
        else:
            own = held.to(ids.device)
            position = torch.searchsorted(own, ids.contiguous()).clamp_(max=len(held) - 1)
            mine = own[position] == ids
        found = F.embedding(position * mine, weight, local_padding)
        return found * mine.unsqueeze(-1).to(found.dtype)

    return run


def rules() -> Mapping[str, Rule]:
    found = {
        "linear": Rule("linear", _linear, ("input", "weight", "bias")),
        "matmul": Rule("matmul", _matmul, ("input", "other")),
        "__matmul__": Rule("matmul", _matmul, ("input", "other")),
        "mm": Rule("mm", _matmul, ("input", "other")),
        "mv": Rule("mv", _matmul, ("input", "other")),
        "dot": Rule("dot", _matmul, ("input", "other")),
        "inner": pattern_rule("inner", "i, i ->", ("input", "other")),
        "bmm": pattern_rule("bmm", "b m k, b k n -> b m n", ("input", "other")),
        "outer": pattern_rule("outer", "i, j -> i j", ("input", "other")),
        "baddbmm": pattern_rule(
            "baddbmm", "b m n + b m k, b k n -> b m n", ("input", "first", "second")
        ),
        "addmm": Rule("addmm", _addmm, ("input", "first", "second")),
        "einsum": Rule("einsum", _einsum, ("equation", "*operands")),
        "scaled_dot_product_attention": Rule(
            "scaled_dot_product_attention",
            _attention,
            ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        ),
        "embedding": Rule(
            "embedding",
            _embedding,
            (
                "input",
                "weight",
                "padding_idx",
                "max_norm",
                "norm_type",
                "scale_grad_by_freq",
                "sparse",
            ),
        ),
    }
    return found
