"""The rule of attention: batch and heads may be cut, and the queries where no order is implied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import of_nothing
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule


def _attention(call: Call) -> Recipe:
    """With fewer key and value heads than query heads, both are cut alike.

    Queries may be cut along the sequence, where no causal order ties them to their numbers.
    """
    if call.get("dropout_p", 0.0) > 0:
        raise call.error(
            "attention dropout draws from each rank's own generator",
            "set dropout_p=0, or attend explicitly and use hp_dtensor.random.dropout",
        )
    query, key = call.get("query"), call.get("key")
    rows = "[q]" if call.get("is_causal", False) else "q"
    sizes: dict[str, int] = {}
    if len(query.shape) < 4 or not call.get("enable_gqa", False):
        text = f"... {rows} [d], ... [k] [d], ... [k] [e]{{mask}} -> ... q e"
        mask = f", ... {rows} [k]"
    else:
        groups = key.shape[-3]
        if not groups or query.shape[-3] % groups:
            raise call.error(
                f"{query.shape[-3]} query heads over {groups} key heads",
                "make the number of query heads a multiple of the number of key heads",
            )
        text = f"... (g r) {rows} [d], ... g [k] [d], ... g [k] [e]{{mask}} -> ... (g r) q e"
        sizes = {"g": groups, "r": query.shape[-3] // groups}
        if sizes["r"] == 1:
            text = text.replace("(g r)", "g")
        mask = _mask_of_groups(call, rows)
    pattern = parse(text.format(mask=mask if len(call.operands) == 4 else ""), linear=False)
    names = ("query", "key", "value", "attn_mask")
    derivation = derive(
        call.operator, pattern, call.layouts, sizes=sizes, names=names, yielding=(3,)
    )
    output = derivation.outputs[0]

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if tensors[0].numel() == 0:
            return of_nothing((*tensors[0].shape[:-1], tensors[2].shape[-1]), *tensors)
        found: Tensor = func(*args, **kwargs)
        return found

    return Recipe(derivation.operands, output, None if output.is_even else run)


def _mask_of_groups(call: Call, rows: str) -> str:
    """A mask's heads are the queries', or one for all of them."""
    mask = call.get("attn_mask")
    shape = mask.shape if isinstance(mask, Operand) else ()
    if len(shape) < 3:
        return f", {rows} [k]"
    heads = (
        "1"
        if shape[-3] == 1
        else ("g" if call.get("query").shape[-3] == call.get("key").shape[-3] else "(g r)")
    )
    return f", ... {heads} {rows} [k]"


def rules() -> Mapping[str, Rule]:
    return {
        "scaled_dot_product_attention": Rule(
            "scaled_dot_product_attention",
            _attention,
            ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        )
    }
