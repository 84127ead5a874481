"""Rules of operators that act on each element by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Placement, is_sharding
from hp_dtensor.rules.by_value import on_gathered
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule, words

# What a value of 0 stays, and a sum of summands goes through: linear in the operand.
LINEAR = words(
    """
    neg negative positive clone contiguous detach deg2rad rad2deg conj conj_physical resolve_conj
    resolve_neg zero_ real imag
    """
)

NONLINEAR = words(
    """
    abs absolute acos acosh asin asinh atan atanh atan2 ceil clamp clip clamp_min clamp_max
    copysign cos cosh digamma erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod frac gelu elu
    celu selu relu relu6 leaky_relu hardsigmoid hardswish hardtanh hypot i0 isfinite isinf isnan
    isneginf isposinf ldexp lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit maximum minimum mish nan_to_num nextafter pow
    float_power reciprocal remainder round rsqrt sigmoid sign sgn signbit silu sin sinc sinh
    softplus logsigmoid softsign tanhshrink sqrt square tan tanh threshold trunc fix xlogy
    addcmul addcdiv where masked_fill eq ne lt le gt ge greater greater_equal less
    less_equal not_equal isclose bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift floor_divide fill_ constant_ __rpow__
    __floordiv__ __rfloordiv__ __rmod__ __mod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __invert__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __lshift__ __rshift__ __ipow__
    __iand__ __ior__ __ixor__ __ifloordiv__ __imod__ __rlshift__ __rrshift__ __rshift__
    __ilshift__ __irshift__ bitwise_right_shift
    angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh hardshrink softshrink heaviside
    gcd lcm igamma igammac isreal mvlgamma polygamma erfcx entr expit gammaln gammainc
    gammaincc i0e i1 i1e log_ndtr ndtr ndtri psi xlog1py zeta bessel_j0 bessel_j1 bessel_y0
    bessel_y1 airy_ai spherical_bessel_j0 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
    modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 multigammaln
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w polar
    """
)

_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}


def pointwise(call: Call, *, linear: bool, join: str = ",") -> Recipe:
    """Every operand broadcasts; the output is cut where an operand is."""
    layouts = [operand.layout for operand in call.operands]
    leader = call.target if call.inplace else None
    if call.inplace and "out" in call.arguments:
        layouts, leader = layouts[:-1], None
    if any(layout.flat_dims > 1 for layout in layouts):
        recipe = _identical(call, layouts)
    else:
        pattern = parse(f" {join} ".join(["..."] * len(layouts)) + " -> ...", linear=linear)
        masks = [i for i, each in enumerate(call.operands) if each.dtype == torch.bool]
        yielding = masks if len(masks) < len(layouts) else ()
        derivation = derive(call.operator, pattern, layouts, leader=leader, yielding=yielding)
        recipe = Recipe(derivation.operands, derivation.outputs[0])
    if len(layouts) < len(call.operands):
        return Recipe((*(recipe.operands or ()), None), recipe.outputs)
    return recipe


def _identical(call: Call, layouts: list[Layout]) -> Recipe:
    """Flattened dims follow no pattern: operands must be alike, or 0-dimensional."""
    placed = [layout for layout in layouts if layout.shape]
    first = placed[0]
    for layout in placed:
        if (layout.shape, layout.placements) != (first.shape, first.placements):
            raise call.error(
                "operands placed RaggedShard must all be laid out alike",
                "redistribute the others to the same placements",
            )
        if any(isinstance(p, Partial) for p in layout.placements):
            raise call.error("pending sums beside ragged shards", "redistribute to RaggedShard")
    for layout in layouts:
        if not layout.shape and not layout.is_replicated:
            raise call.error("a 0-dimensional operand is not replicated", "redistribute it")
    columns = list(zip(*(layout.grad_placements for layout in layouts)))
    summed = [Partial() in column for column in columns]
    kept: list[Placement] = [
        p if is_sharding(p) else (Partial() if s else Replicate())
        for p, s in zip(first.placements, summed)
    ]
    # A number meets only this rank's elements.
    numbers: list[Placement] = [Partial() if is_sharding(p) else p for p in kept]
    needed = [
        layout.with_placements(layout.placements, kept if layout.shape else numbers)
        for layout in layouts
    ]
    return Recipe(tuple(needed), first.with_placements(first.placements, kept))


def _where(call: Call) -> Recipe | None:
    """With the condition alone it lists positions, whose number depends on values."""
    if "other" not in call.arguments:
        return on_gathered(call, torch.where, truth=True)
    return pointwise(call, linear=False)


def _additive(call: Call) -> Recipe:
    """`a + b`, `a - b`: a Python number is a constant that only one rank may add."""
    numbers = [
        value
        for name, value in call.arguments.items()
        if name in ("input", "other") and not isinstance(value, Operand)
    ]
    return pointwise(call, linear=all(number == 0 for number in numbers), join="+")


def _divide(call: Call) -> Recipe:
    """Linear in the numerator, where nothing is rounded."""
    if call.get("rounding_mode") is not None:
        return pointwise(call, linear=False)
    return pointwise(call, linear=not _is_partial(call.get("other")))


def _reverse_divide(call: Call) -> Recipe:
    return pointwise(call, linear=False)


def _is_partial(operand: Any) -> bool:
    return isinstance(operand, Operand) and any(
        isinstance(p, Partial) for p in operand.layout.placements
    )


def _cast(call: Call) -> Recipe:
    """To another dtype or device; linear unless it rounds to integers."""
    target: Any = _CASTS.get(call.operator)
    for value in call.arguments.values():
        if isinstance(value, torch.dtype):
            target = value
        elif isinstance(value, Operand) and value is not call.input:
            target = value.dtype
    source = call.input
    linear = target is None or target.is_floating_point or not source.dtype.is_floating_point
    derivation = derive(
        call.operator,
        parse("... -> ...", linear=linear and target is not torch.bool),
        [source.layout],
    )
    rest = (None,) * (len(call.operands) - 1)
    return Recipe((*derivation.operands, *rest), derivation.outputs[0])


def _ragged_or(call: Call, rule: Callable[[Call], Recipe]) -> Recipe:
    """Unary operators on flattened dims keep the layout."""
    if call.input.layout.flat_dims > 1:
        return Recipe(None, call.input.layout)
    return rule(call)


def _copy(call: Call) -> Recipe:
    """The source is laid out like the target, and its gradient is the target's."""
    target, source = call.operands[0].layout, call.operands[1].layout
    if source.shape == target.shape:
        return Recipe((target, target), target)
    return pointwise(call, linear=False)


def _frexp(call: Call) -> Recipe:
    each = pointwise(call, linear=False)
    return Recipe(each.operands, [each.outputs, each.outputs])


def _as_real(call: Call) -> Recipe:
    """Real and imaginary part as a new last dim of two."""
    made = derive(call.operator, parse("... -> ... [two]"), [call.input.layout], sizes={"two": 2})
    return Recipe(made.operands, made.outputs[0])


def _as_complex(call: Call) -> Recipe:
    made = derive(call.operator, parse("... [two] -> ..."), [call.input.layout])
    return Recipe(made.operands, made.outputs[0])


def _equal(input: Any, other: Any) -> bool:
    return input.shape == other.shape and bool((input == other).all())


def _allclose(
    input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


def _contains(input: Any, value: Any) -> bool:
    return bool((input == value).any())


_ANSWERS = {"equal": _equal, "allclose": _allclose, "__contains__": _contains}


def _answer(call: Call) -> Recipe:
    """A truth about the whole tensors, the same on every rank, which all must ask for."""
    return Recipe(None, None, composite=_ANSWERS[call.operator])


def _isin(call: Call) -> Recipe:
    """The elements looked for are whole on every rank."""
    elements, wanted = call.get("elements"), call.get("test_elements")
    if not isinstance(elements, Operand):
        raise call.error("the elements must be a DTensor", "wrap them")
    text = "..."
    if isinstance(wanted, Operand):
        text += ", " + " ".join(f"[w{i}]" for i in range(len(wanted.shape)))
    made = derive(call.operator, parse(f"{text} -> ...", linear=False), call.layouts)
    return Recipe(made.operands, made.outputs[0])


def _bucketize(call: Call) -> Recipe:
    """The boundaries are whole on every rank."""
    made = derive(call.operator, parse("..., [b] -> ...", linear=False), call.layouts)
    return Recipe(made.operands, made.outputs[0])


def _prelu(call: Call) -> Recipe:
    """A slope per channel, or one for all."""
    ndim = len(call.input.shape)
    names = [f"d{i}" for i in range(ndim)]
    slopes = call.get("weight").shape
    weight = "" if not slopes else ("1" if slopes == (1,) else names[min(1, ndim - 1)])
    text = f"{' '.join(names)}, {weight} -> {' '.join(names)}"
    made = derive(call.operator, parse(text, linear=False), call.layouts)
    return Recipe(made.operands, made.outputs[0])


def _broadcast(call: Call) -> Recipe:
    def expand(*tensors: Any) -> Any:
        given = tensors[0] if isinstance(tensors[0], tuple | list) else tensors
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
        return tuple(tensor.expand(shape) for tensor in given)

    return Recipe(None, None, composite=expand)


def _dropout(call: Call) -> Recipe:
    training = call.get("training", call.get("train", True))
    if training and call.get("p", 0.5) > 0:
        return no_generator(call)
    return pointwise(call, linear=True)


def no_generator(call: Call) -> Recipe:
    raise call.error(
        "each rank's own generator would give shards numbers that depend on the layout, and "
        "replicas different ones",
        "use hp_dtensor.random (rand, normal_, dropout, Dropout), whose values belong to the "
        "global tensor, and hp_dtensor.initializers.Initializing around a module's initialisers",
    )


def rules() -> Mapping[str, Rule]:
    """Rules by name of the torch function."""
    found: dict[str, Rule] = {}
    two = ("input", "other", "third")
    for name in LINEAR:
        found[name] = Rule(
            name, partial(_ragged_or, rule=partial(pointwise, linear=True)), ("input",)
        )
    for name in NONLINEAR:
        found[name] = Rule(name, partial(pointwise, linear=False), (*two, "fourth", "fifth"))
    found["where"] = Rule("where", _where, (*two, "fourth"))
    found["complex"] = Rule("complex", _additive, ("input", "other"))
    for name, parameters in (("polygamma", ("n", "input")),):
        found[name] = Rule(name, partial(pointwise, linear=False), parameters)
    for name in ("frexp",):
        found[name] = Rule(name, _frexp, ("input",))
    found["view_as_real"] = Rule("view_as_real", _as_real, ("input",), views=True)
    found["view_as_complex"] = Rule("view_as_complex", _as_complex, ("input",), views=True)
    for name in ("equal", "allclose", "__contains__"):
        found[name] = Rule(name, _answer, (*two, "fourth", "equal_nan"))
    found["isin"] = Rule("isin", _isin, ("elements", "test_elements"))
    for name in ("bucketize",):
        found[name] = Rule(name, _bucketize, ("input", "boundaries"))
    found["prelu"] = Rule("prelu", _prelu, ("input", "weight"))
    found["broadcast_tensors"] = Rule("broadcast_tensors", _broadcast, ("*tensors",))
    for name in ("add", "sub", "subtract", "rsub", "__rsub__", "__radd__", "__iadd__", "__isub__"):
        found[name] = Rule(name, _additive, two)
    for name in ("mul", "multiply", "__rmul__", "__imul__"):
        found[name] = Rule(name, partial(pointwise, linear=True), two)
    for name in ("div", "divide", "true_divide", "__truediv__", "__itruediv__", "__idiv__"):
        found[name] = Rule(name, _divide, two)
    for name in ("__rdiv__", "__rtruediv__"):
        found[name] = Rule(name, _reverse_divide, two)
    for name in (*_CASTS, "to", "type_as", "cpu", "cuda", "type"):
        found[name] = Rule(
            name, partial(_ragged_or, rule=_cast), ("input", "dtype", "other", "third", "fourth")
        )
    found["copy_"] = Rule("copy_", _copy, ("input", "other", "non_blocking"))
    for name in words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout"):
        found[name] = Rule(name, _dropout, ("input", "p", "training", "inplace"))
    return found
