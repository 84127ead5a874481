"""Rules of convolutions: channels may be cut, the dims that the window runs over may not.

A convolution is a contraction over the input channels of each group, so channels cut like those
of a linear layer: groups (depthwise convolutions have one channel each) stay where they are, input
channels cut alike give pending sums, output channels stay cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import of_nothing, own_shape
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule

_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)


def _each(value: Any, count: int) -> list[int]:
    return [int(v) for v in value] if isinstance(value, tuple | list) else [int(value)] * count


def _lengths(call: Call, ndim: int, transposed: bool) -> list[int]:
    """Output sizes of the dims the window runs over, as in torch's documentation."""
    sizes = call.input.shape[-ndim:]
    kernel = call.get("weight").shape[-ndim:]
    stride = _each(call.get("stride", 1) or 1, ndim)
    dilation = _each(call.get("dilation", 1), ndim)
    padding = call.get("padding", 0)
    if padding == "same":
        return list(sizes)
    pads = [0] * ndim if padding == "valid" else _each(padding, ndim)
    if transposed:
        extra = _each(call.get("output_padding", 0), ndim)
        return [
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1
            for n, s, p, d, k, e in zip(sizes, stride, pads, dilation, kernel, extra)
        ]
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, s, p, d, k in zip(sizes, stride, pads, dilation, kernel)
    ]


def _convolution(call: Call, *, ndim: int, transposed: bool = False) -> Recipe:
    shape, weight = call.input.shape, call.get("weight").shape
    groups = call.get("groups", 1)
    batch = "n " if len(shape) == ndim + 2 else ""
    if len(shape) not in (ndim + 1, ndim + 2):
        raise call.error(
            f"the input has {len(shape)} dims",
            f"give [channels, ...] or [batch, channels, ...] with {ndim} more dims",
        )
    inside = " ".join(f"[l{i}]" for i in range(ndim))
    kernel = " ".join(f"[k{i}]" for i in range(ndim))
    outside = " ".join(f"[m{i}]" for i in range(ndim))
    channels = weight[0] // groups if transposed else weight[1]
    made = weight[1] if transposed else weight[0] // groups
    filters = "(g c) o" if transposed else "(g o) c"
    text = f"{batch}(g c) {inside}, {filters} {kernel}"
    if isinstance(call.get("bias"), Operand):
        text += " + (g o)"
    text += f" -> {batch}(g o) {outside}"
    sizes = {"g": groups, "c": channels, "o": made}
    sizes |= {f"m{i}": n for i, n in enumerate(_lengths(call, ndim, transposed))}
    derivation = derive(
        call.operator,
        parse(_without_ones(text, sizes)),
        call.layouts,
        sizes=sizes,
        names=("input", "weight", "bias")[: len(call.operands)],
    )
    at = _TRANSPOSED if transposed else _PARAMETERS

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        given = dict(zip(at, args)) | kwargs
        local: Tensor = given["input"]
        here = local.shape[-1 - ndim]
        filters: Tensor = given["weight"]
        if 0 in local.shape or 0 in filters.shape:
            return _without_channels(own_shape(derivation.outputs[0]), ndim, given)
        if groups == 1:
            return func(*args, **kwargs)
        given["groups"] = here // (filters.shape[0] // groups if transposed else filters.shape[1])
        if transposed:
            given["groups"] = max(here * groups // shape[-1 - ndim], 1)
        found: Tensor = func(**given)
        return found

    return Recipe(derivation.operands, derivation.outputs[0], run)


def _without_channels(shape: Sequence[int], ndim: int, given: Mapping[str, Any]) -> Tensor:
    """The sum over no channels: the bias, where this rank is the one that adds it."""
    bias = given.get("bias")
    found = of_nothing(shape, given["input"], given["weight"])
    return found if bias is None else found + bias.view(-1, *[1] * ndim)


def _without_ones(text: str, sizes: Mapping[str, int]) -> str:
    """A group or channel count of one is no factor."""
    for letter, other in (("g", "c"), ("g", "o")):
        if sizes["g"] == 1:
            text = text.replace(f"({letter} {other})", other)
    if sizes["c"] == 1 and sizes["g"] > 1:
        text = text.replace("(g c)", "g").replace(", g o [", ", g o [")
        text = text.replace("(g o) c [", "(g o) 1 [")
    if sizes["o"] == 1 and sizes["g"] > 1:
        text = text.replace("(g o)", "g").replace(" o [k", " 1 [k")
    return text


def _pool(call: Call, *, ndim: int) -> Recipe:
    """Windows run over whole dims; batch and channels stay as they are."""
    shape = call.input.shape
    kernel = _each(call.get("kernel_size"), ndim)
    stride = _each(call.get("stride") or kernel, ndim)
    padding = _each(call.get("padding", 0), ndim)
    if call.get("ceil_mode", False) or call.get("return_indices", False):
        raise call.error("ceil_mode and return_indices have no rule", "leave them out")
    dilation = _each(call.get("dilation", 1), ndim)
    lengths = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(shape[-ndim:], padding, dilation, kernel, stride)
    ]
    return _windows(call, ndim, lengths)


def _adaptive(call: Call, *, ndim: int) -> Recipe:
    wanted = call.get("output_size")
    sizes = wanted if isinstance(wanted, tuple | list) else [wanted] * ndim
    lengths = [n if s is None else int(s) for n, s in zip(call.input.shape[-ndim:], sizes)]
    if call.get("return_indices", False):
        raise call.error("return_indices has no rule", "leave it out")
    return _windows(call, ndim, lengths)


def _windows(call: Call, ndim: int, lengths: list[int]) -> Recipe:
    inside = " ".join(f"[l{i}]" for i in range(ndim))
    outside = " ".join(f"[m{i}]" for i in range(ndim))
    derivation = derive(
        call.operator,
        parse(f"... {inside} -> ... {outside}", linear=False),
        [call.input.layout],
        sizes={f"m{i}": n for i, n in enumerate(lengths)},
    )
    output = derivation.outputs[0]

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if args[0].numel():
            return func(*args, **kwargs)
        shape = own_shape(output)
        nothing = of_nothing(shape, args[0])
        # torch.adaptive_max_pool1d gives indices, too: one window tells.
        one = func(args[0].new_zeros([n or 1 for n in args[0].shape]), *args[1:], **kwargs)
        if isinstance(one, Tensor):
            return nothing
        return tuple(nothing if n == 0 else each.new_empty(shape) for n, each in enumerate(one))

    return Recipe(derivation.operands, output, None if output.is_even else run)


def rules() -> Mapping[str, Rule]:
    found: dict[str, Rule] = {}
    pool = ("input", "kernel_size", "stride", "padding")
    for ndim in (1, 2, 3):
        found[f"conv{ndim}d"] = Rule(f"conv{ndim}d", partial(_convolution, ndim=ndim), _PARAMETERS)
        found[f"conv_transpose{ndim}d"] = Rule(
            f"conv_transpose{ndim}d", partial(_convolution, ndim=ndim, transposed=True), _TRANSPOSED
        )
        found[f"avg_pool{ndim}d"] = Rule(f"avg_pool{ndim}d", partial(_pool, ndim=ndim), pool)
        found[f"max_pool{ndim}d"] = Rule(
            f"max_pool{ndim}d", partial(_pool, ndim=ndim), (*pool, "dilation")
        )
        for kind in ("avg", "max"):
            name = f"adaptive_{kind}_pool{ndim}d"
            found[name] = Rule(name, partial(_adaptive, ndim=ndim), ("input", "output_size"))
    return found
