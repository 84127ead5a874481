"""Rules of operators that reduce dims, or that need whole dims of one operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.engine import Derivation, derive, parse
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.transition import Transition


def letters(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def dims_of(call: Call, ndim: int, name: str = "dim") -> tuple[int, ...]:
    """The dims an operator names, non-negative; all of them for None or ()."""
    given = call.get(name)
    if given is None or given == ():
        return tuple(range(ndim))
    each = given if isinstance(given, tuple | list) else (given,)
    return tuple(_dim(call, dim, ndim) for dim in each)


def _dim(call: Call, dim: int, ndim: int) -> int:
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise call.error(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % limit


def reduce_dims(call: Call, *, linear: bool, outputs: int = 1) -> tuple[Derivation, list[int]]:
    """Drops the named dims (or keeps them with size one)."""
    operand = call.input
    names = letters(len(operand.shape))
    gone = dims_of(call, len(names))
    if call.get("keepdim", False):
        kept = ["1" if i in gone else name for i, name in enumerate(names)]
    else:
        kept = [name for i, name in enumerate(names) if i not in gone]
    text = f"{' '.join(names)} -> {' , '.join([' '.join(kept)] * outputs)}"
    return derive(call.operator, parse(text, linear=linear), [operand.layout]), list(gone)


def _everything(layout: Layout) -> Layout:
    """Layout of a sum over all elements, of any sharding: a summand on each rank."""
    values: list[Placement] = []
    grads: list[Placement] = []
    for value, grad in zip(layout.placements, layout.grad_placements):
        cut = is_sharding(value) or isinstance(value, Partial)
        values.append(Partial() if cut else Replicate())
        grads.append(Replicate() if cut else grad)
    return Layout(layout.mesh, values, (), grads)


def _reduces_everything(call: Call) -> bool:
    whole = len(dims_of(call, len(call.input.shape))) == len(call.input.shape)
    return whole and not call.get("keepdim", False)


def _sums(layout: Layout) -> bool:
    return all(p.reduce_op == "sum" for p in layout.placements if isinstance(p, Partial))


def _sum(call: Call) -> Recipe:
    layout = call.input.layout
    if _reduces_everything(call) and _sums(layout):
        return Recipe(None, _everything(layout))
    derivation, _ = reduce_dims(call, linear=True)
    return Recipe(derivation.operands, derivation.outputs[0])


def _mean(call: Call) -> Recipe:
    """The divisor is the global count, whatever this rank holds."""
    layout = call.input.layout
    gone = dims_of(call, len(layout.shape))
    count = math.prod(layout.shape[dim] for dim in gone)
    keepdim, dtype = bool(call.get("keepdim", False)), call.get("dtype")
    if _reduces_everything(call) and _sums(layout):
        recipe = Recipe(None, _everything(layout))
    else:
        derivation, _ = reduce_dims(call, linear=True)
        recipe = Recipe(derivation.operands, derivation.outputs[0])

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local = args[0]
        total = local.sum(dim=gone, keepdim=keepdim, dtype=dtype) if gone else local
        return total / count

    if any(is_sharding(p) for p in layout.placements):
        return Recipe(recipe.operands, recipe.outputs, run)
    return recipe


def _reduced(call: Call, *, outputs: int = 1) -> Recipe:
    """Not a sum: the reduced dims must be whole."""
    derivation, _ = reduce_dims(call, linear=False, outputs=outputs)
    made = derivation.outputs[0] if outputs == 1 else derivation.outputs
    return Recipe(derivation.operands, made)


def _extreme(call: Call) -> Recipe:
    """`max`, `min`: of everything, along a dim (values and indices), or of two tensors."""
    other = call.get("dim")
    if isinstance(other, Operand):
        layouts = [operand.layout for operand in call.operands]
        derivation = derive(call.operator, parse("..., ... -> ...", linear=False), layouts)
        return Recipe(derivation.operands, derivation.outputs[0])
    return _reduced(call, outputs=1 if other is None else 2)


def whole_dims(call: Call, dims: Sequence[int], *, linear: bool, outputs: int = 1) -> Recipe:
    """The shape stays; the named dims must be whole on every rank."""
    operand = call.input
    names = letters(len(operand.shape))
    inside = [f"[{name}]" if i in dims else name for i, name in enumerate(names)]
    text = f"{' '.join(inside)} -> {' , '.join([' '.join(names)] * outputs)}"
    derivation = derive(call.operator, parse(text, linear=linear), [operand.layout])
    made = derivation.outputs[0] if outputs == 1 else derivation.outputs
    rest = (None,) * (len(call.operands) - 1)
    return Recipe((*derivation.operands, *rest), made)


def _along(call: Call, *, linear: bool, outputs: int = 1) -> Recipe:
    ndim = len(call.input.shape)
    dim = call.get("dim", -1)
    if dim is None:
        raise call.error("the dim must be given", "pass dim=")
    return whole_dims(
        call,
        dims_of(call, ndim) if "dim" in call.arguments else (_dim(call, dim, ndim),),
        linear=linear,
        outputs=outputs,
    )


# -- norms -------------------------------------------------------------------------------------


def summable_norm(local: Tensor, order: float) -> Tensor:
    """This rank's contribution to a norm: what is added up (or compared, for infinity)."""
    if math.isinf(order):
        if local.numel() == 0:
            return local.new_full((), 0.0 if order > 0 else math.inf)
        return torch.linalg.vector_norm(local, order)
    if order == 0:
        return local.ne(0).sum().to(local.abs().dtype)
    if order == 2:
        return local.abs().square().sum() if local.is_complex() else local.square().sum()
    return local.abs().pow(order).sum()


def finished_norm(total: Tensor, order: float) -> Tensor:
    if math.isinf(order) or order in (0, 1):
        return total
    return total.sqrt() if order == 2 else total.pow(1.0 / order)


def norm_reduction(order: float) -> Partial:
    if math.isinf(order):
        return Partial("max" if order > 0 else "min")
    return Partial("sum")


def norm_layouts(
    layout: Layout, order: float, shape: tuple[int, ...] = ()
) -> tuple[Layout, Layout]:
    """Layouts of the contributions to a norm over all elements, and of the finished norm."""
    pending = [norm_reduction(order) if is_sharding(p) else Replicate() for p in layout.placements]
    source = Layout(layout.mesh, pending, shape)
    return source, source.with_placements([Replicate()] * len(pending))


def settled(layout: Layout) -> Layout:
    """Pending sums replaced by replicas: what an operator that is not linear needs."""
    if not any(isinstance(p, Partial) for p in layout.placements):
        return layout
    values = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    return layout.with_placements(values)


def _norm(call: Call) -> Recipe:
    """The norm of all elements is the global one, on every rank; of dims, they must be whole."""
    order = call.get("ord", call.get("p", 2))
    order = 2.0 if order in (None, "fro") else order
    if not isinstance(order, int | float):
        raise call.error(f"the norm {order!r} has no rule", "use full_tensor(), or a p-norm")
    if not _reduces_everything(call):
        derivation, _ = reduce_dims(call, linear=False)
        return Recipe(derivation.operands, derivation.outputs[0])
    needed = settled(call.input.layout)
    if not any(is_sharding(p) for p in needed.placements):
        return Recipe((needed,), needed.with_shape(()) if not needed.shape else _scalar(needed))
    source, target = norm_layouts(needed, float(order))
    transition = Transition.compile(source, target)
    dtype = call.get("dtype")

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local = args[0] if dtype is None else args[0].to(dtype)
        part = summable_norm(local, float(order))
        if math.isinf(order) and part.requires_grad:
            raise call.error(
                f"the norm of order {order} of a sharded tensor has no gradient",
                "compute it under torch.no_grad(), or of detach()",
            )
        return finished_norm(transition.apply(part), float(order))

    # Each rank's gradient reaches its own elements only, and the sum is made above: the norm is
    # an ordinary replicated value.
    return Recipe((needed,), target, run)


def _scalar(layout: Layout) -> Layout:
    return Layout(layout.mesh, layout.placements, (), layout.grad_placements)


def rules() -> Mapping[str, Rule]:
    found: dict[str, Rule] = {}
    reduced = ("input", "dim", "keepdim")
    for name in ("sum", "nansum"):
        found[name] = Rule(name, _sum, reduced)
    found["mean"] = Rule("mean", _mean, reduced)
    for name in (
        "prod",
        "all",
        "any",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "logsumexp",
        "nanmean",
        "count_nonzero",
    ):
        found[name] = Rule(name, _reduced, reduced)
    for name in ("var", "std"):
        found[name] = Rule(name, _reduced, ("input", "dim", "unbiased", "keepdim"))
    for name in ("var_mean", "std_mean"):
        found[name] = Rule(
            name, partial(_reduced, outputs=2), ("input", "dim", "unbiased", "keepdim")
        )
    for name in ("max", "min"):
        found[name] = Rule(name, _extreme, reduced)
    found["vector_norm"] = Rule("vector_norm", _norm, ("input", "ord", "dim", "keepdim"))
    found["norm"] = Rule("norm", _norm, ("input", "p", "dim", "keepdim"))
    for name in ("softmax", "log_softmax", "softmin", "logcumsumexp", "cumprod"):
        found[name] = Rule(name, partial(_along, linear=False), ("input", "dim"))
    for name in ("cumsum", "flip", "fliplr", "flipud"):
        found[name] = Rule(name, partial(_along, linear=True), ("input", "dim"))
    for name in ("sort", "cummax", "cummin"):
        found[name] = Rule(name, partial(_along, linear=False, outputs=2), ("input", "dim"))
    found["argsort"] = Rule("argsort", partial(_along, linear=False), ("input", "dim"))
    return found
