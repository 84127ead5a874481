"""Newton-Schulz: the orthogonal polar factor of a batch of matrices by a quintic iteration.

With X scaled to Frobenius norm at most 1 and rows <= cols, every step is

    A = X X^T,    X <- a X + (b A + c A^2) X

which applies s -> a s + b s^3 + c s^5 to each singular value (Jordan et al. 2024; paper
section 6.6).

Since every step multiplies X from the left by a polynomial of A, the product of these polynomials
can be formed on the small side and applied once (Gram Newton-Schulz, Zhang et al. 2026). Rounding
makes small eigenvalues of A negative and each step enlarges them, so after `RESTART` steps X and A
are formed anew. This is less work for elongated matrices; which form runs follows from the shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from hp_muon.coefficients import Triple, coefficient_set
from hp_muon.errors import MuonError

DEFAULT_EPS = 1e-7
RESTART = 3
"""Steps in Gram space before X is formed anew."""

_CPU_CHUNK_ELEMENTS = 2**18
"""Matrices of one shape iterate together on a CPU as long as they stay in its cache."""


@torch.no_grad()
def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "asym5",
    eps: float = DEFAULT_EPS,
    dtype: torch.dtype | None = None,
    gram: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Approximates U V^T of every matrix M = U S V^T; not differentiable.

    Args:
        matrices: [..., rows, cols], floating point. Leading dims are a batch.
        steps: number of iterations.
        coefficients: a key of `COEFFICIENTS`, or (a, b, c) triples, one a step.
        eps: added to the Frobenius norm; a zero matrix gives zero.
        dtype: of iteration and result; the input's dtype when omitted. The norm is taken in
            float32 (float64 for float64) in either case. On a CPU without bfloat16 dot products
            the products of a bfloat16 iteration run in float32, and only the result is rounded.
        gram: whether to iterate in Gram space; where that is less work and the coefficients are
            as accurate there, when omitted.
        out: a tensor of the result's shape and dtype to write to.

    Returns:
        [..., rows, cols] in `dtype`.

    Raises:
        MuonError: not floating point, fewer than two dims, eps <= 0, too many steps for the set,
            or gram=True with coefficients that lose accuracy there.
    """
    if matrices.ndim < 2 or not matrices.is_floating_point():
        raise MuonError(
            "newton_schulz takes floating-point matrices [..., rows, cols], found shape "
            f"{tuple(matrices.shape)} of {matrices.dtype}"
        )
    if eps <= 0:
        raise MuonError(f"newton_schulz needs eps > 0, or zero would become NaN; found eps={eps}")
    table = coefficient_set(coefficients)
    triples = table.steps(steps)
    check_gram(gram, coefficients)
    rows, cols = matrices.shape[-2:]
    result = _result(matrices, dtype or matrices.dtype, out)
    if matrices.numel() == 0:
        return result
    in_gram = uses_gram(rows, cols, steps, coefficients) if gram is None else gram
    batch = matrices.reshape(-1, rows, cols)
    target = result.view(-1, rows, cols)
    if rows > cols:
        batch, target = batch.mT, target.mT
    chunk = _chunk(batch)
    work = _Workspace.of(batch, chunk, _product_dtype(result.dtype, batch.device))
    for start in range(0, batch.shape[0], chunk):
        part = batch[start : start + chunk]
        x = _normalise(part, table.safety, eps, work.x[: part.shape[0]])
        iterate = _iterate_gram if in_gram else _iterate
        target[start : start + chunk] = iterate(x, triples, work)
    return result


def uses_gram(
    rows: int, cols: int, steps: int, coefficients: str | Sequence[Sequence[float]]
) -> bool:
    """Whether `newton_schulz` iterates matrices of this shape in Gram space by itself."""
    if not coefficient_set(coefficients).gram:
        return False
    # Smaller products run less efficiently, so a small saving in operations is none in time.
    direct, gram = (newton_schulz_operations(rows, cols, steps, gram=g) for g in (False, True))
    return gram < 0.95 * direct


def newton_schulz_operations(rows: int, cols: int, steps: int, *, gram: bool) -> float:
    """Floating-point operations of one matrix, additions and multiplications.

    Direct, a step is X X^T, its square, and a product with X. In Gram space a step is a square
    and, but for the first of a run of `RESTART` steps, a product of polynomials and two products
    that carry the Gram matrix on; each run forms a Gram matrix and applies its polynomial to X.
    """
    short, long = min(rows, cols), max(rows, cols)
    wide, cube = 2.0 * short * short * long, 2.0 * short**3
    if not gram:
        return steps * (2 * wide + cube)
    runs = -(-steps // RESTART)
    return runs * 2 * wide + (steps + 3 * (steps - runs)) * cube


def check_gram(gram: bool | None, coefficients: str | Sequence[Sequence[float]]) -> None:
    """Refuses Gram space for coefficients that it was not found accurate with.

    Raises:
        MuonError: gram is True and the set does not allow it.
    """
    table = coefficient_set(coefficients)
    if gram and not table.gram:
        raise MuonError(
            f"coefficients {table.name!r} lose accuracy in Gram space in half precision; use "
            "gram=None or False, or 'asym5' or 'quintic'"
        )


@frozen(eq=False)
class _Workspace:
    """Buffers of one call, [chunk, short, long] and [chunk, short, short], shared by its chunks."""

    x: Tensor
    other: Tensor
    gram: Tensor
    polynomial: Tensor
    product: Tensor
    spare: Tensor

    @classmethod
    def of(cls, batch: Tensor, chunk: int, dtype: torch.dtype) -> _Workspace:
        _, short, long = batch.shape
        wide = torch.empty(2, chunk, short, long, dtype=dtype, device=batch.device)
        small = torch.empty(4, chunk, short, short, dtype=dtype, device=batch.device)
        return cls(*wide.unbind(), *small.unbind())


def _result(matrices: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(matrices.shape, dtype=dtype, device=matrices.device)
    if out.shape != matrices.shape or out.dtype != dtype or not out.is_contiguous():
        raise MuonError(
            f"newton_schulz: out must be a contiguous {tuple(matrices.shape)} of {dtype}, found "
            f"{tuple(out.shape)} of {out.dtype}"
        )
    return out


def _chunk(batch: Tensor) -> int:
    """Matrices that iterate together: all of them on an accelerator, a cacheful on a CPU.

    So large matrices run one by one on a CPU and small ones, whose products are short against
    the cost of a call, as a batch.
    """
    count, short, long = batch.shape
    if batch.device.type != "cpu":
        return count
    return min(count, max(_CPU_CHUNK_ELEMENTS // (short * long), 1))


def _normalise(batch: Tensor, safety: float, eps: float, out: Tensor) -> Tensor:
    """Writes batch / (norm * safety + eps) to `out`; all sums are in float32 at least."""
    exact_dtype = torch.promote_types(batch.dtype, torch.float32)
    exact = out.copy_(batch) if out.dtype == exact_dtype else batch.to(exact_dtype, copy=True)
    # Scaling by the largest entry's power of two first keeps the squares of huge or tiny entries
    # finite, and rounds nothing: small singular values feel every rounding some hundredfold.
    highest, lowest = exact.amax((-2, -1), keepdim=True), exact.amin((-2, -1), keepdim=True)
    largest = torch.maximum(highest, -lowest)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    unit = torch.where((largest > 0) & largest.isfinite(), unit, 1)
    exact.div_(unit)
    norm = torch.linalg.vector_norm(exact, dim=(-2, -1), keepdim=True)
    exact.div_(norm * safety + eps / unit)
    return exact if exact is out else out.copy_(exact)


def _iterate(x: Tensor, triples: Sequence[Triple], work: _Workspace) -> Tensor:
    """[n, rows, cols] with rows <= cols; three products a step. Overwrites `x`."""
    n = x.shape[0]
    gram, polynomial, other = work.gram[:n], work.polynomial[:n], work.other[:n]
    for a, b, c in triples:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x


def _iterate_gram(x: Tensor, triples: Sequence[Triple], work: _Workspace) -> Tensor:
    """The same, with A and the product of polynomials carried on the small side. Overwrites `x`."""
    n = x.shape[0]
    gram, polynomial, other = work.gram[:n], work.polynomial[:n], work.other[:n]
    for start in range(0, len(triples), RESTART):
        run = triples[start : start + RESTART]
        product, spare = work.product[:n], work.spare[:n]
        torch.bmm(x, x.mT, out=gram)
        for position, (a, b, c) in enumerate(run):
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            if position == 0:
                product.copy_(polynomial)
            else:
                torch.bmm(polynomial, product, out=spare)
                product, spare = spare, product
            if position < len(run) - 1:
                torch.bmm(gram, polynomial, out=spare)
                torch.bmm(spare, polynomial, out=gram)
        torch.bmm(product, x, out=other)
        x, other = other, x
    return x


def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype is torch.bfloat16 and device.type == "cpu" and not _cpu_multiplies_bfloat16():
        return torch.float32
    return dtype


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot products; emulated, they are an order slower."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
