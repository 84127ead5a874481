"""Rules of convolutions, of windows over images and of resizing them.

A convolution is a contraction over the input channels of each group, so channels cut like those
of a linear layer: groups (depthwise convolutions have one channel each) stay where they are, input
channels cut alike give pending sums, output channels stay cut. Along one cut dim that the windows
run over, ranks exchange what lies beside their parts (`hp_dtensor.rules.halo`); otherwise those
dims are made whole meanwhile (`hp_dtensor.rules.regrouped`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.distributed.tensor import Partial

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.concatenation import with_placed, without_axes
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.halo import Halo, Window
from hp_dtensor.rules.own_part import of_nothing, own_shape
from hp_dtensor.rules.parts import cutting_axes
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.regrouped import on_whole
from hp_platform.collectives import Origin

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


def _windows_of(call: Call, ndim: int) -> list[Window]:
    """The windows over each dim, as in torch's documentation."""
    kernel = call.get("weight").shape[-ndim:]
    stride = _each(call.get("stride", 1) or 1, ndim)
    dilation = _each(call.get("dilation", 1), ndim)
    padding = call.get("padding", 0)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    if padding == "same":
        pads = [(each // 2, each - each // 2) for each in reach]
    else:
        pads = [(p, p) for p in ([0] * ndim if padding == "valid" else _each(padding, ndim))]
    return [
        Window(n, r, s, *p) for n, r, s, p in zip(call.input.shape[-ndim:], reach, stride, pads)
    ]


def _lengths(call: Call, ndim: int, transposed: bool) -> list[int]:
    """Output sizes of the dims the window runs over."""
    windows = _windows_of(call, ndim)
    if not transposed:
        return [window.count for window in windows]
    extra = _each(call.get("output_padding", 0), ndim)
    return [
        (w.size - 1) * w.stride - w.before - w.after + w.reach + e + 1
        for w, e in zip(windows, extra)
    ]


def _convolution(call: Call, *, ndim: int, transposed: bool = False) -> Recipe:
    shape = call.input.shape
    if len(shape) not in (ndim + 1, ndim + 2):
        raise call.error(
            f"the input has {len(shape)} dims",
            f"give [channels, ...] or [batch, channels, ...] with {ndim} more dims",
        )
    spatial = range(len(shape) - ndim, len(shape))
    cut = [dim for dim in spatial if cutting_axes(call.input.layout, dim)]
    if not cut:
        return _of_channels(call, ndim, transposed, call.layouts)
    _check_filters(call, cut)
    if len(cut) == 1 and not transposed:
        window = _windows_of(call, ndim)[cut[0] - spatial[0]]
        halo = Halo.of(call.input.layout, cut[0], window)
        if halo is not None and (ndim == 1 or call.get("padding", 0) != "same"):
            return _beside_others(call, ndim, halo)
    return on_whole(call, spatial, partial(_convolution, ndim=ndim, transposed=transposed))


def _check_filters(call: Call, cut: Sequence[int]) -> None:
    """An axis that cuts what the windows run over cannot also cut the filters."""
    axes = {axis for dim in cut for axis in cutting_axes(call.input.layout, dim)}
    for name in ("weight", "bias"):
        operand = call.get(name)
        if not isinstance(operand, Operand):
            continue
        for axis in axes:
            if is_sharding(operand.layout.placements[axis]):
                mesh_axis = call.input.layout.abstract_mesh.axis_names[axis]
                raise call.error(
                    f"mesh axis {mesh_axis!r} cuts dims {list(cut)} of the input, which the window "
                    f"runs over, and the {name} too",
                    f"redistribute the {name} to Replicate() on {mesh_axis!r}, or the input",
                )


def _beside_others(call: Call, ndim: int, halo: Halo) -> Recipe:
    """Every rank has the whole filters, and of their gradient a summand."""
    axis, given = halo.axis, call.layouts
    layouts = [without_axes(layout, [axis]) for layout in given]
    recipe = _of_channels(call, ndim, False, layouts, halo)
    assert recipe.operands is not None

    def summand(layout: Layout) -> Layout:
        grads = list(layout.grad_placements)
        grads[axis] = Partial()
        return layout.with_placements(layout.placements, grads)

    image, *filters = [each for each in recipe.operands if each is not None]
    needed = with_placed(image, {axis: given[0].placements[axis]})
    return evolve(
        recipe,
        operands=(needed, *map(summand, filters)),
        communicates="the elements that windows reach beside each rank's part gathered",
    )


def _of_channels(
    call: Call,
    ndim: int,
    transposed: bool,
    layouts: Sequence[Layout],
    halo: Halo | None = None,
) -> Recipe:
    """Windows over whole dims, or over the extended part of a cut one."""
    shape, weight = call.input.shape, call.get("weight").shape
    groups = call.get("groups", 1)
    batch = "n " if len(shape) == ndim + 2 else ""
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
        layouts,
        sizes=sizes,
        names=("input", "weight", "bias")[: len(call.operands)],
    )
    at = _TRANSPOSED if transposed else _PARAMETERS
    output, origin = derivation.outputs[0], Origin("hp_dtensor", call.operator, "operator")
    if halo is not None:
        output = with_placed(output, {halo.axis: halo.placement})
        cut = {halo.axis: halo.layout.placements[halo.axis]}
        halo = evolve(halo, layout=with_placed(derivation.operands[0], cut))

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        given = dict(zip(at, args)) | kwargs
        if halo is not None:
            given["input"] = halo.extended(given["input"], origin)
            given["padding"] = [
                0 if i == halo.dim - len(shape) + ndim else p
                for i, p in enumerate(_each(_number(given.get("padding", 0)), ndim))
            ]
        local: Tensor = given["input"]
        here = local.shape[-1 - ndim]
        filters: Tensor = given["weight"]
        if 0 in local.shape or 0 in filters.shape:
            return _without_channels(own_shape(output), ndim, given)
        if groups == 1:
            return func(**given)
        # Filters of a transposed convolution have its output channels along dim 1.
        channels_here = own_shape(output)[-1 - ndim] if transposed else here
        given["groups"] = channels_here // filters.shape[1]
        found: Tensor = func(**given)
        return found

    return Recipe(derivation.operands, output, run)


def _number(padding: Any) -> Any:
    return 0 if isinstance(padding, str) else padding


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
        raise call.error(
            "ceil_mode and return_indices have no rule on sharded or partial tensors",
            "leave them out, or redistribute the input to Replicate() and compute on to_local()",
        )
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
        raise call.error(
            "return_indices has no rule on sharded or partial tensors",
            "leave it out, or redistribute the input to Replicate() and compute on to_local()",
        )
    return _windows(call, ndim, lengths)


def _resized(call: Call) -> Recipe | None:
    """`interpolate`: batch and channels stay as they are."""
    ndim = len(call.input.shape) - 2
    size, factor = call.get("size"), call.get("scale_factor")
    if ndim < 1 or (size is None) == (factor is None):
        return None
    sizes = call.input.shape[-ndim:]
    if size is not None:
        return _windows(call, ndim, _each(size, ndim))
    factors = factor if isinstance(factor, tuple | list) else [factor] * ndim
    return _windows(call, ndim, [math.floor(n * f) for n, f in zip(sizes, factors)])


def _windows(call: Call, ndim: int, lengths: list[int]) -> Recipe:
    first = len(call.input.shape) - ndim
    spatial = range(first, len(call.input.shape))
    return on_whole(call, spatial, partial(_windows_whole, ndim=ndim, lengths=lengths))


def _windows_whole(call: Call, *, ndim: int, lengths: list[int]) -> Recipe:
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
    resizing = ("input", "size", "scale_factor", "mode", "align_corners")
    found["interpolate"] = Rule("interpolate", _resized, resizing)
    return found
