"""Rules of norms, losses and selections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.reduction import dims_of, letters
from hp_dtensor.rules.shape import resized
from hp_dtensor.transition import Transition


def _normalize(call: Call) -> Recipe:
    """`layer_norm`, `rms_norm`: the normalised dims are whole; weight and bias have those dims."""
    shape = call.get("normalized_shape")
    inner = 1 if isinstance(shape, int) else len(tuple(shape))
    names = " ".join(f"[n{i}]" for i in range(inner))
    plain = names.replace("[", "").replace("]", "")
    text = ", ".join([f"... {names}"] + [plain] * (len(call.operands) - 1)) + f" -> ... {plain}"
    derivation = derive(
        call.operator,
        parse(text, linear=False),
        call.layouts,
        names=("input", "weight", "bias")[: len(call.operands)],
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _cross_entropy(call: Call) -> Recipe:
    """Classes are whole; rows may be cut, and then the mean is over the rows of all ranks."""
    for name in ("size_average", "reduce"):
        if call.get(name) is not None:
            raise call.error(f"{name} is deprecated and has no rule", "use reduction=")
    logits = call.input
    names = letters(len(logits.shape))
    classes = 1 if len(names) > 1 else 0
    rows = [name for i, name in enumerate(names) if i != classes]
    left = " ".join(f"[{name}]" if i == classes else name for i, name in enumerate(names))
    soft = len(call.get("target").shape) == len(names)
    parts = [left, left if soft else " ".join(rows)]
    if isinstance(call.get("weight"), Operand):
        parts.append(f"[{names[classes]}]")
    per_row = derive(
        call.operator,
        parse(f"{', '.join(parts)} -> {' '.join(rows)}", linear=False),
        call.layouts,
    )
    reduction = call.get("reduction", "mean")
    output = per_row.outputs[0]
    if reduction == "none":
        return Recipe(per_row.operands, output)
    pending = [Partial() if is_sharding(p) else p for p in output.placements]
    grads = [
        Replicate() if is_sharding(p) else g
        for p, g in zip(output.placements, output.grad_placements)
    ]
    scalar = Layout(output.mesh, pending, (), grads)
    if reduction == "sum" or not any(is_sharding(p) for p in output.placements):
        return Recipe(per_row.operands, scalar)
    if soft:
        raise call.error("a mean over cut rows with class probabilities has no rule")
    return Recipe(per_row.operands, scalar, _mean_over_ranks(call, scalar))


def _mean_over_ranks(call: Call, scalar: Layout) -> Callable[..., Tensor]:
    """This rank's share of the mean: its sum over the weight of the rows of all ranks."""
    ignored = call.get("ignore_index", -100)
    counted = Transition.compile(
        Layout(scalar.mesh, scalar.placements, ()),
        Layout(scalar.mesh, [Replicate()] * len(scalar.placements), ()),
    )

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        kwargs = {**kwargs, "reduction": "sum"}
        target = args[1]
        total = func(*args, **kwargs)
        valid = target != ignored
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        if weight is None:
            share = valid.sum().to(total.dtype)
        else:
            share = (weight[target * valid] * valid).sum().to(total.dtype)
        return total / counted.run_forward(share.detach())

    return run


def _mse(call: Call) -> Recipe:
    layouts = call.layouts
    each = derive(call.operator, parse("..., ... -> ...", linear=False), layouts)
    output = each.outputs[0]
    reduction = call.get("reduction", "mean")
    if reduction == "none":
        return Recipe(each.operands, output)
    if any(is_sharding(p) for p in output.placements):
        raise call.error(
            "a reduced loss over cut operands has no rule", "reduction='none', .mean()"
        )
    return Recipe(each.operands, Layout(output.mesh, output.placements, (), output.grad_placements))


# -- selections ------------------------------------------------------------------------------------


def _topk(call: Call) -> Recipe:
    ndim = len(call.input.shape)
    (dim,) = dims_of(call, ndim) if call.get("dim") is not None else (ndim - 1,)
    names = letters(ndim)
    left = " ".join(f"[{name}]" if i == dim else name for i, name in enumerate(names))
    out = " ".join("[k]" if i == dim else name for i, name in enumerate(names))
    derivation = derive(
        call.operator,
        parse(f"{left} -> {out} , {out}", linear=False),
        [call.input.layout],
        sizes={"k": call.get("k")},
    )
    return Recipe(derivation.operands, derivation.outputs)


def _one_hot(call: Call) -> Recipe:
    classes = call.get("num_classes", -1)
    if classes < 0:
        raise call.error(
            "the number of classes would depend on each rank's values", "pass num_classes"
        )
    derivation = derive(
        call.operator,
        parse("... -> ... [c]", linear=False),
        [call.input.layout],
        sizes={"c": classes},
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _gather(call: Call) -> Recipe:
    """The gathered dim is whole; along the others, index and input must be cut alike."""
    source, index = call.input.layout, call.get("index").layout
    (dim,) = dims_of(call, len(source.shape))
    names = letters(len(source.shape))
    for i, (a, b) in enumerate(zip(source.shape, index.shape)):
        if i != dim and a != b:
            raise call.error(
                f"dim {i} of the index has size {b}, the input {a}", "narrow the input first"
            )
    left = " ".join(f"[{name}]" if i == dim else name for i, name in enumerate(names))
    right = " ".join("[k]" if i == dim else name for i, name in enumerate(names))
    derivation = derive(
        call.operator, parse(f"{left}, {right} -> {right}", linear=False), [source, index]
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _index_select(call: Call) -> Recipe:
    source, index = call.input.layout, call.get("index").layout
    (dim,) = dims_of(call, len(source.shape))
    names = letters(len(source.shape))
    left = " ".join(f"[{name}]" if i == dim else name for i, name in enumerate(names))
    right = " ".join("k" if i == dim else name for i, name in enumerate(names))
    derivation = derive(
        call.operator, parse(f"{left}, k -> {right}", linear=False), [source, index]
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _glu(call: Call) -> Recipe:
    (dim,) = (
        dims_of(call, len(call.input.shape))
        if call.get("dim") is not None
        else (len(call.input.shape) - 1,)
    )
    return resized(call, {dim: call.input.shape[dim] // 2}, linear=False)


def rules() -> Mapping[str, Rule]:
    loss = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    found = {
        "layer_norm": Rule(
            "layer_norm", _normalize, ("input", "normalized_shape", "weight", "bias", "eps")
        ),
        "rms_norm": Rule("rms_norm", _normalize, ("input", "normalized_shape", "weight", "eps")),
        "cross_entropy": Rule("cross_entropy", _cross_entropy, (*loss, "label_smoothing")),
        "topk": Rule("topk", _topk, ("input", "k", "dim", "largest", "sorted")),
        "one_hot": Rule("one_hot", _one_hot, ("input", "num_classes")),
        "gather": Rule("gather", _gather, ("input", "dim", "index")),
        "index_select": Rule("index_select", _index_select, ("input", "dim", "index")),
        "glu": Rule("glu", _glu, ("input", "dim")),
    }
    for name in ("mse_loss", "l1_loss"):
        found[name] = Rule(name, _mse, ("input", "target", "size_average", "reduce", "reduction"))
    return found
