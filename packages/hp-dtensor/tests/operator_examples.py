"""One example at least for every operator that has a rule: arguments, by the rule's name.

Every torch function of that name (in torch, as a method, in place, in torch.nn.functional) is run
on them. Where signatures differ, there are several, and each function takes the first that fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.rules.recipe import is_inplace, words
from hp_dtensor.rules.table import functions_named, named

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers and halves, so that most sums are exact."""
    generator = torch.Generator().manual_seed(seed + 17 * len(shape))
    return torch.randint(-6, 7, shape, generator=generator).double() / 2


def integers(*shape: int, low: int = 0, high: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 3)
    return torch.randint(low, high, shape, generator=generator)


def given(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


X = numbers(4, 6)
Y = numbers(4, 6, seed=1)
ROW = numbers(6, seed=2)
UNIT = torch.linspace(0.05, 0.95, 24, dtype=torch.float64).view(4, 6)
ABOVE_ONE = UNIT + 1.25
WHOLE = integers(4, 6)
TRUTH = X > 0
MOSTLY = torch.ones(4, 6, dtype=torch.bool)
MOSTLY[0, 5] = MOSTLY[2, 0] = MOSTLY[3, 3] = False
CUBE = numbers(3, 4, 6)
IMAGE = numbers(2, 4, 6, 6)
DISTINCT = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6)[:, [3, 0, 5, 1, 4, 2]]
POSITIVE_DEFINITE = torch.eye(3, dtype=torch.float64) * 4 + numbers(2, 3, 3).tanh() * 0.3
POSITIVE_DEFINITE = (POSITIVE_DEFINITE + POSITIVE_DEFINITE.mT) / 2
LABELS = torch.tensor([2, 0, 5, 3])
INDEX = torch.tensor([3, 0, 1])

# Where a function of one or two numbers is defined and smooth.
DOMAINS: Mapping[str, tuple[Arguments, ...]] = {
    name: arguments
    for names, arguments in (
        (
            "acos asin arccos arcsin atanh arctanh erfinv logit ndtri entr",
            (given(UNIT),),
        ),
        (
            "acosh arccosh log log10 log2 log1p sqrt rsqrt reciprocal lgamma digamma gammaln psi "
            "mvlgamma multigammaln erfcx log_ndtr",
            (given(ABOVE_ONE), given(ABOVE_ONE, 1)),
        ),
        (
            "bessel_j0 bessel_j1 bessel_y0 bessel_y1 airy_ai spherical_bessel_j0 "
            "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 "
            "scaled_modified_bessel_k0 scaled_modified_bessel_k1",
            (given(ABOVE_ONE),),
        ),
        (
            " ".join(
                f"{prefix}chebyshev_polynomial_{kind}"
                for prefix in ("", "shifted_")
                for kind in "tuvw"
            )
            + " hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l"
            " legendre_polynomial_p",
            (given(UNIT, 3),),
        ),
        ("igamma igammac gammainc gammaincc zeta", (given(ABOVE_ONE, UNIT + 1),)),
        ("xlogy xlog1py", (given(X, ABOVE_ONE),)),
        ("float_power pow __pow__ __rpow__ __ipow__", (given(ABOVE_ONE, 2.0),)),
        (
            "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm "
            "__and__ __or__ __xor__ __rand__ __ror__ __rxor__ __iand__ __ior__ __ixor__ "
            "__lshift__ __rshift__ __ilshift__ __irshift__",
            (given(WHOLE, integers(4, 6, seed=4)), given(WHOLE, 2)),
        ),
        ("__rlshift__ __rrshift__", (given(WHOLE, 2),)),
        ("bitwise_not __invert__", (given(WHOLE),)),
        ("logical_and logical_or logical_xor", (given(TRUTH, Y > 0),)),
        ("logical_not", (given(TRUTH),)),
        ("ldexp", (given(X, integers(4, 6)),)),
        ("lerp", (given(X, Y, 0.25),)),
        ("addcmul addcdiv", (given(X, Y, ABOVE_ONE),)),
        ("where", (given(TRUTH, X, Y), given(X, TRUTH, Y))),
        ("masked_fill", (given(X, TRUTH, 2.0),)),
        ("fill_ constant_", (given(X, 2.0),)),
        ("clamp clip hardtanh", (given(X, -1.0, 1.0),)),
        ("clamp_min", (given(X, -1.0),)),
        ("clamp_max", (given(X, 1.0),)),
        ("threshold", (given(X, 0.25, 0.0),)),
        ("nextafter heaviside copysign", (given(X, Y),)),
        ("polygamma", (given(1, ABOVE_ONE), given(ABOVE_ONE, 1))),
        ("polar", (given(ABOVE_ONE, UNIT),)),
        ("complex", (given(X, Y),)),
        ("view_as_real real imag", (given(torch.complex(X, Y)),)),
        ("view_as_complex", (given(numbers(4, 3, 2)),)),
        ("equal allclose", (given(X, X), given(X, Y))),
        ("__contains__", (given(X, 1.0),)),
        ("isin", (given(X, torch.tensor([1.0, -0.5], dtype=torch.float64)),)),
        ("bucketize", (given(X, torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)),)),
        ("prelu", (given(X, ROW),)),
        ("broadcast_tensors", (given(X, ROW),)),
        (
            "remainder fmod __mod__ __imod__ floor_divide __floordiv__ __ifloordiv__",
            (given(X, 2.0),),
        ),
        ("__rmod__ __rfloordiv__ __rdiv__ __rtruediv__", (given(ABOVE_ONE, 3.0),)),
        ("div divide true_divide __truediv__ __itruediv__ __idiv__", (given(X, ABOVE_ONE),)),
        ("isclose hypot atan2 arctan2 fmax fmin maximum minimum", (given(X + 0.25, Y),)),
        ("logaddexp logaddexp2", (given(X, Y),)),
        ("eq ne lt le gt ge greater greater_equal less less_equal not_equal", (given(X, Y),)),
        ("__eq__ __ne__ __lt__ __le__ __gt__ __ge__", (given(X, Y),)),
        ("add sub subtract rsub __rsub__ __radd__ __iadd__ __isub__", (given(X, Y), given(X, 2.0))),
        ("mul multiply __rmul__ __imul__", (given(X, ROW), given(X, Y))),
        ("to type", (given(X, torch.float32),)),
        ("type_as", (given(X, torch.zeros((), dtype=torch.float32)),)),
        ("copy_", (given(X, Y),)),
        ("dropout dropout1d alpha_dropout feature_dropout", (given(X, 0.5, False),)),
        ("dropout2d", (given(IMAGE, 0.5, False),)),
        ("dropout3d", (given(numbers(2, 3, 2, 2, 2), 0.5, False),)),
    )
    for name in names.split()
}

SMOOTH: tuple[Arguments, ...] = (given(X + 0.25), given(X + 0.25, Y), given(X + 0.25, 1.5))

SQUARE = numbers(6, 6)
BY_NAME: Mapping[str, tuple[Arguments, ...]] = {
    "new_zeros": (given(X, (2, 3)),),
    "new_ones": (given(X, (2, 3)),),
    "new_full": (given(X, (2, 3), 1.5),),
    "full_like": (given(X, 1.5),),
    "linear": (given(CUBE, numbers(5, 6), numbers(5)),),
    "matmul": (given(CUBE, numbers(6, 5)),),
    "__matmul__": (given(CUBE, numbers(6, 5)),),
    "mm": (given(X, numbers(6, 5)),),
    "mv": (given(X, ROW),),
    "dot": (given(ROW, numbers(6)),),
    "vdot": (given(ROW, numbers(6)),),
    "inner": (given(X, numbers(5, 6)),),
    "tensordot": (given(CUBE, numbers(4, 6, 5)), given(CUBE, numbers(4, 6, 5), 2)),
    "vecdot": (given(X, Y),),
    "chain_matmul": (given(X, numbers(6, 5), numbers(5, 3)),),
    "multi_dot": (given([X, numbers(6, 5), numbers(5, 3)]),),
    "bilinear": (given(X, numbers(4, 5), numbers(3, 6, 5), numbers(3)),),
    "ger": (given(numbers(4), ROW),),
    "outer": (given(numbers(4), ROW),),
    "addr": (given(X, numbers(4), ROW),),
    "addmv": (given(numbers(4), X, ROW),),
    "addbmm": (given(numbers(4, 5), CUBE, numbers(3, 6, 5)),),
    "bmm": (given(CUBE, numbers(3, 6, 5)),),
    "baddbmm": (given(numbers(3, 4, 5), CUBE, numbers(3, 6, 5)),),
    "addmm": (given(numbers(4, 5), X, numbers(6, 5)),),
    "einsum": (given("ij,kj->ik", X, numbers(5, 6)),),
    "inv": (given(POSITIVE_DEFINITE),),
    "inverse": (given(POSITIVE_DEFINITE),),
    "cholesky": (given(POSITIVE_DEFINITE),),
    "matrix_exp": (given(POSITIVE_DEFINITE / 4),),
    "matrix_power": (given(POSITIVE_DEFINITE / 4, 2),),
    "solve": (given(POSITIVE_DEFINITE, numbers(2, 3, 4)),),
    "solve_triangular": (given(POSITIVE_DEFINITE.tril(), numbers(2, 3, 4), upper=False),),
    "histc": (given(X, 4, -3, 3),),
    "det": (given(POSITIVE_DEFINITE),),
    "logdet": (given(POSITIVE_DEFINITE),),
    "slogdet": (given(POSITIVE_DEFINITE),),
    "sum": (given(X, 1), given(X)),
    "nansum": (given(X, 1),),
    "count_nonzero": (given(X, 1),),
    "mean": (given(X, 1),),
    "nanmean": (given(X, 1),),
    "all": (given(MOSTLY, 1),),
    "any": (given(X, 1),),
    "prod": (given(X + 0.25, 1),),
    "var": (given(X, 1),),
    "std": (given(X, 1),),
    "var_mean": (given(X, 1),),
    "std_mean": (given(X, 1),),
    "max": (given(DISTINCT, 1),),
    "min": (given(DISTINCT, 1),),
    "amax": (given(X, 1),),
    "amin": (given(X, 1),),
    "argmax": (given(DISTINCT, 1),),
    "argmin": (given(DISTINCT, 1),),
    "aminmax": (given(X, dim=1), given(X)),
    "topk": (given(DISTINCT, 2),),
    "vector_norm": (given(X, 2, 1),),
    "norm": (given(X, 2, 1),),
    "normalize": (given(X + 0.25),),
    "softmax": (given(X, 1),),
    "log_softmax": (given(X, 1),),
    "softmin": (given(X, 1),),
    "logsumexp": (given(X, 1),),
    "cross_entropy": (given(X, LABELS),),
    "nll_loss": (given(X.log_softmax(1), LABELS),),
    "linear_cross_entropy": (given(X, numbers(7, 6), LABELS),),
    "cumsum": (given(X, 1),),
    "logcumsumexp": (given(X, 1),),
    "cumprod": (given(X + 0.25, 1),),
    "cummax": (given(DISTINCT, 1),),
    "cummin": (given(DISTINCT, 1),),
    "msort": (given(DISTINCT),),
    "sort": (given(DISTINCT, 1),),
    "argsort": (given(DISTINCT, 1),),
    "kthvalue": (given(DISTINCT, 2, 1),),
    "diff": (given(X),),
    "median": (given(DISTINCT, 1),),
    "nanmedian": (given(DISTINCT, 1),),
    "mode": (given(DISTINCT, 1),),
    "quantile": (given(DISTINCT, 0.3, 1),),
    "nanquantile": (given(DISTINCT, 0.3, 1),),
    "masked_select": (given(X, TRUTH),),
    "masked_scatter": (given(X, TRUTH, numbers(24, seed=5)),),
    "nonzero": (given(X),),
    "argwhere": (given(X),),
    "unique": (given(WHOLE),),
    "unique_consecutive": (given(WHOLE),),
    "bincount": (given(WHOLE.reshape(-1)),),
    "view": (given(CUBE, 3, 2, 2, 6),),
    "reshape": (given(CUBE, (12, 6)),),
    "view_as": (given(CUBE, numbers(12, 6)),),
    "reshape_as": (given(CUBE, numbers(12, 6)),),
    "flatten": (given(CUBE, 0, 1),),
    "ravel": (given(CUBE),),
    "unflatten": (given(X, 1, (3, 2)),),
    "squeeze": (given(numbers(4, 1, 6), 1),),
    "unsqueeze": (given(X, 1),),
    "permute": (given(CUBE, (2, 0, 1)),),
    "transpose": (given(CUBE, 0, 1),),
    "swapaxes": (given(CUBE, 0, 1),),
    "swapdims": (given(CUBE, 0, 1),),
    "movedim": (given(CUBE, 0, 2),),
    "moveaxis": (given(CUBE, 0, 2),),
    "expand": (given(numbers(4, 1), 4, 3),),
    "broadcast_to": (given(numbers(4, 1), (4, 3)),),
    "expand_as": (given(numbers(4, 1), X),),
    "__getitem__": (given(X, (slice(1, 4), slice(None))), given(X, 1)),
    "__setitem__": (given(X, slice(1, 3), 2.0),),
    "index_put": (given(X, (INDEX,), numbers(3, 6)),),
    "narrow": (given(X, 1, 1, 3),),
    "narrow_copy": (given(X, 1, 1, 3),),
    "select": (given(X, 1, 2),),
    "unbind": (given(numbers(3, 4), 1),),
    "chunk": (given(X, 2, 1),),
    "unsafe_chunk": (given(X, 2, 1),),
    "diagonal": (given(CUBE, 0, 1, 2), given(CUBE, offset=0, dim1=1, dim2=2)),
    "trace": (given(SQUARE),),
    "unfold": (given(X, 1, 3, 2),),
    "split": (given(X, 4, 1),),
    "split_with_sizes": (given(X, (2, 4), 1),),
    "unsafe_split": (given(X, 4, 1),),
    "unsafe_split_with_sizes": (given(X, (2, 4), 1),),
    "tensor_split": (given(X, 3, 1),),
    "vsplit": (given(X, 2),),
    "hsplit": (given(X, 3),),
    "dsplit": (given(CUBE, 2),),
    "select_scatter": (given(X, ROW, 0, 1),),
    "slice_scatter": (given(X, numbers(4, 2), 1, 1, 3),),
    "gather": (given(X, 1, integers(4, 3)),),
    "take_along_dim": (given(X, integers(4, 3), 1),),
    "index_select": (given(X, 0, INDEX),),
    "index_add": (given(X, 0, INDEX, numbers(3, 6)),),
    "index_copy": (given(X, 0, INDEX, numbers(3, 6)),),
    "index_fill": (given(X, 0, INDEX, 2.0),),
    "scatter_add": (given(X, 1, integers(4, 3), numbers(4, 3)),),
    "scatter": (given(X, 1, torch.tensor([[0, 3], [5, 1], [2, 4], [1, 0]]), numbers(4, 2)),),
    "scatter_reduce": (given(X, 1, integers(4, 3), numbers(4, 3), "sum"),),
    "cat": (given([X, Y], 1),),
    "concat": (given([X, Y], 1),),
    "concatenate": (given([X, Y], 1),),
    "stack": (given([X, Y], 1),),
    "vstack": (given([X, Y]),),
    "row_stack": (given([X, Y]),),
    "hstack": (given([X, Y]),),
    "dstack": (given([X, Y]),),
    "column_stack": (given([numbers(4), Y]),),
    "repeat": (given(X, 2, 3),),
    "tile": (given(X, (2, 3)),),
    "repeat_interleave": (given(X, 2, 1),),
    "pad": (given(X, (1, 2)),),
    "constant_pad_nd": (given(X, (1, 2)),),
    "flip": (given(X, (1,)),),
    "rot90": (given(CUBE, 1, (1, 2)),),
    "roll": (given(X, 1, 1),),
    "tril": (given(X),),
    "triu": (given(X),),
    "scaled_dot_product_attention": (
        given(numbers(2, 4, 3, 2), numbers(2, 4, 5, 2), numbers(2, 4, 5, 2, seed=1)),
    ),
    "embedding": (given(integers(2, 3), numbers(5, 4)),),
    "conv1d": (given(numbers(2, 4, 6), numbers(4, 1, 3), numbers(4), 1, 1, 1, 4),),
    "conv2d": (given(IMAGE, numbers(6, 4, 3, 3), numbers(6)),),
    "conv3d": (given(numbers(2, 2, 3, 3, 3), numbers(4, 2, 2, 2, 2), numbers(4)),),
    "conv_transpose1d": (given(numbers(2, 4, 5), numbers(4, 6, 3), numbers(6)),),
    "conv_transpose2d": (given(numbers(2, 4, 3, 3), numbers(4, 2, 3, 3), numbers(2)),),
    "conv_transpose3d": (given(numbers(1, 2, 2, 2, 2), numbers(2, 2, 2, 2, 2)),),
    "avg_pool1d": (given(CUBE, 2),),
    "avg_pool2d": (given(IMAGE, 2),),
    "avg_pool3d": (given(numbers(2, 2, 4, 4, 4), 2),),
    "max_pool1d": (given(CUBE + ROW * 0.01, 2),),
    "max_pool2d": (given(IMAGE, 2),),
    "max_pool3d": (given(numbers(2, 2, 4, 4, 4), 2),),
    "adaptive_avg_pool1d": (given(CUBE, 2),),
    "adaptive_avg_pool2d": (given(IMAGE, 2),),
    "adaptive_avg_pool3d": (given(numbers(2, 2, 4, 4, 4), 2),),
    "adaptive_max_pool1d": (given(CUBE, 2),),
    "adaptive_max_pool2d": (given(IMAGE, 2),),
    "adaptive_max_pool3d": (given(numbers(2, 2, 4, 4, 4), 2),),
    "interpolate": (given(CUBE, scale_factor=2),),
    "layer_norm": (given(CUBE, (6,), ROW, numbers(6)),),
    "rms_norm": (given(CUBE, (6,), ROW),),
    "group_norm": (given(numbers(2, 4, 6), 2, numbers(4), numbers(4, seed=1)),),
    "batch_norm": (given(CUBE, numbers(4), torch.ones(4).double(), numbers(4), numbers(4)),),
    "instance_norm": (given(CUBE),),
    "kl_div": (given(X.log_softmax(1), UNIT),),
    "poisson_nll_loss": (given(X, UNIT),),
    "binary_cross_entropy": (given(UNIT, 1 - UNIT),),
    "binary_cross_entropy_with_logits": (given(X, UNIT),),
    "hinge_embedding_loss": (given(X + 0.25, TRUTH.double() * 2 - 1),),
    "soft_margin_loss": (given(X, TRUTH.double() * 2 - 1),),
    "cosine_similarity": (given(X + 0.25, Y),),
    "pairwise_distance": (given(X, Y),),
    "one_hot": (given(WHOLE, 5),),
    "glu": (given(X),),
    "pixel_shuffle": (given(numbers(2, 4, 3, 3), 2),),
    "pixel_unshuffle": (given(IMAGE, 2),),
    "channel_shuffle": (given(IMAGE, 2),),
}

# A square matrix, two tensors, or one.
GENERAL: tuple[Arguments, ...] = (given(X + 0.25), given(X, Y), given(SQUARE))

UNTRIED: Mapping[str, str] = {
    "empty_like": "its values are arbitrary",
    "new_empty": "its values are arbitrary",
    "cuda": "needs a device that the test machine lacks",
    "grouped_mm": "takes no float64; compared in test_rules_products.py",
    "_grouped_mm": "takes no float64; compared in test_rules_products.py",
    "__idiv__": "Python 3 has no such operator, and Tensor.__idiv__ is `__itruediv__`",
    "bool": "compared in test_rules_table.py",
}
"""Rules without an example here, and why."""

WITHOUT_DERIVATIVE = words(
    """
    acosh_ asinh_ atanh_ arccosh_ arcsinh_ arctanh_ floor_divide floor_divide_ __floordiv__
    __rfloordiv__ __ifloordiv__ __rmod__ heaviside heaviside_ igamma igamma_ igammac igammac_
    gammainc gammaincc zeta
    """
)
"""Functions for which torch has no derivative in some of their arguments, and says so: "the
derivative for ... is not implemented". Only their values are compared."""

DETACHED: Mapping[str, tuple[int, ...]] = {"batch_norm": (1, 2), "soft_margin_loss": (1,)}
"""Positions of arguments that take no gradient."""


@frozen
class Example:
    """A torch function and dense arguments for it.

    Attributes:
        rule: name of its rule.
        function: the torch function itself.
        call: makes the call on arguments like `args`, none of which it changes.
    """

    rule: str
    function: Callable[..., Any]
    call: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def has_derivative(self) -> bool:
        return self.function.__name__.removeprefix("special_") not in WITHOUT_DERIVATIVE

    @property
    def label(self) -> str:
        return f"{self.rule} by {self.function!r}"


def functions_of(name: str) -> Iterator[Callable[..., Any]]:
    """The torch functions that the rule `name` is for, each once."""
    seen: list[Any] = []
    for function in functions_named(name):
        if function not in seen and named().get(_rule_name(function, name)) is named()[name]:
            seen.append(function)
            yield function


def _rule_name(function: Any, name: str) -> str:
    own = getattr(function, "__name__", name)
    return own if own in named() else name


def arguments_of(name: str) -> tuple[Arguments, ...]:
    return (*BY_NAME.get(name, ()), *DOMAINS.get(name, ()), *SMOOTH, *GENERAL)


def example_of(name: str, function: Callable[..., Any]) -> Example | None:
    """The first arguments that the dense function takes."""
    for args, kwargs in arguments_of(name):
        call = _call(function, kwargs, DETACHED.get(name, ()))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = call(*args)
        except Exception:
            continue
        if found is not NotImplemented:
            return Example(name, function, call, args)
    return None


def _call(
    function: Callable[..., Any], kwargs: Mapping[str, Any], detached: tuple[int, ...]
) -> Callable[..., Any]:
    writes = is_inplace(function.__name__)

    def call(*args: Any) -> Any:
        args = tuple(each.detach() if i in detached else each for i, each in enumerate(args))
        if not writes:
            return function(*args, **kwargs)
        target = args[0].clone()
        function(target, *args[1:], **kwargs)
        return target

    return call


def examples() -> Iterator[Example]:
    """Every torch function that has a rule, with arguments.

    Raises:
        LookupError: no arguments fit a function; add some above.
    """
    for name in named():
        if name in UNTRIED or named()[name].refuses:
            continue
        for function in functions_of(name):
            found = example_of(name, function)
            if found is None:
                raise LookupError(f"no example for {name}: {function!r}")
            yield found
