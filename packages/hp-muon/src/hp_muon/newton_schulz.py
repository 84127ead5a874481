"""Newton-Schulz: the orthogonal polar factor of a batch of matrices by a quintic iteration.

With X scaled to Frobenius norm at most 1 and rows <= cols, every step is

    A = X X^T,    X <- a X + (b A + c A^2) X

which applies s -> a s + b s^3 + c s^5 to each singular value (Jordan et al. 2024; paper
section 6.6). The coefficient sets below are data; a caller may give its own triples.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from hp_muon.errors import MuonError

Triple = tuple[float, float, float]
DEFAULT_EPS = 1e-7


@frozen
class Coefficients:
    """One coefficient set.

    Attributes:
        name: how users select it.
        triples: (a, b, c) of each step, in order.
        repeats: whether the last triple serves any further steps; otherwise the triples were
            tuned as a sequence and more steps than triples is an error.
        safety: factor on the norm. Sets that map singular values slightly above 1 to infinity
            need it above 1, since rounding after normalisation may exceed 1.
        source: where the numbers were published.
    """

    name: str
    triples: tuple[Triple, ...]
    repeats: bool
    safety: float
    source: str

    def steps(self, steps: int) -> tuple[Triple, ...]:
        """The triples of `steps` steps.

        Raises:
            MuonError: fewer than one step, or more than a set tuned step by step holds.
        """
        if steps < 1:
            raise MuonError(f"Newton-Schulz needs at least 1 step, found steps={steps}")
        if steps <= len(self.triples):
            return self.triples[:steps]
        if not self.repeats:
            raise MuonError(
                f"coefficients {self.name!r} are tuned for {len(self.triples)} steps, found "
                f"steps={steps}; use at most {len(self.triples)} steps, or 'quintic', which repeats"
            )
        tail = itertools.repeat(self.triples[-1], steps - len(self.triples))
        return (*self.triples, *tail)


def _deflate(triples: Sequence[Triple], safety: float) -> tuple[Triple, ...]:
    """Rescales polynomials so that singular values up to `safety` stay in their interval."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in triples)


_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

COEFFICIENTS: dict[str, Coefficients] = {
    table.name: table
    for table in (
        Coefficients(
            "quintic",
            ((3.4445, -4.7750, 2.0315),),
            repeats=True,
            safety=1.0,
            source="Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/",
        ),
        Coefficients(
            "asym5",
            (
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            ),
            repeats=False,
            safety=1.0,
            source="asymmetric five-step set; HyperParallel-FSDP paper, section 6.6",
        ),
        Coefficients(
            "polar_express",
            (*_deflate(_POLAR_EXPRESS, 1.01), (1.875, -1.25, 0.375)),
            repeats=True,
            safety=1.01,
            source="Amsel et al. 2025, The Polar Express, https://arxiv.org/abs/2505.16932",
        ),
    )
}


def coefficient_set(coefficients: str | Sequence[Sequence[float]]) -> Coefficients:
    """The named set, or one made of the caller's own triples, one a step.

    Raises:
        MuonError: no such name, or an entry is not a triple.
    """
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise MuonError(
                f"unknown coefficients {coefficients!r}; use one of {sorted(COEFFICIENTS)}, or "
                "a sequence of (a, b, c) triples, one a step"
            )
        return COEFFICIENTS[coefficients]
    triples = tuple(tuple(float(number) for number in triple) for triple in coefficients)
    if not triples or any(len(triple) != 3 for triple in triples):
        raise MuonError(f"coefficients must be (a, b, c) triples, one a step, found {triples}")
    return Coefficients(
        "custom",
        tuple((a, b, c) for a, b, c in triples),
        repeats=False,
        safety=1.0,
        source="caller",
    )


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "asym5",
    eps: float = DEFAULT_EPS,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Approximates U V^T of every matrix M = U S V^T.

    Args:
        matrices: [..., rows, cols], floating point. Leading dims are a batch.
        steps: number of iterations.
        coefficients: a key of `COEFFICIENTS`, or (a, b, c) triples, one a step.
        eps: added to the Frobenius norm; a zero matrix gives zero.
        dtype: of iteration and result; the input's dtype when omitted. The norm is taken in
            float32 (float64 for float64) in either case. On a CPU without bfloat16 dot products
            the products of a bfloat16 iteration run in float32, and only the result is rounded.

    Returns:
        [..., rows, cols] in `dtype`.

    Raises:
        MuonError: not floating point, fewer than two dims, eps <= 0, or too many steps for the set.
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
    result_dtype = dtype or matrices.dtype
    rows, cols = matrices.shape[-2:]
    if matrices.numel() == 0:
        return torch.zeros_like(matrices, dtype=result_dtype)
    batch = matrices.reshape(-1, rows, cols)
    if rows > cols:
        batch = batch.mT
    batch = _normalise(batch, table.safety, eps, _product_dtype(result_dtype, matrices.device))
    batch = _iterate(batch, triples)
    if rows > cols:
        batch = batch.mT
    return batch.reshape(matrices.shape).to(result_dtype)


def _normalise(batch: Tensor, safety: float, eps: float, dtype: torch.dtype) -> Tensor:
    exact = batch.to(torch.promote_types(batch.dtype, torch.float32))
    # Scaling by the largest entry first keeps the squares of huge or tiny entries finite.
    largest = exact.abs().amax(dim=(-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1)
    norm = torch.linalg.matrix_norm(exact / unit, keepdim=True) * unit
    return (exact / (norm * safety + eps)).to(dtype)


def _iterate(batch: Tensor, triples: Sequence[Triple]) -> Tensor:
    """[n, rows, cols] with rows <= cols; three products a step, workspace shared by the batch."""
    for a, b, c in triples:
        gram = batch @ batch.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        batch = torch.baddbmm(batch, polynomial, batch, beta=a)
    return batch


def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype is torch.bfloat16 and device.type == "cpu" and not _cpu_multiplies_bfloat16():
        return torch.float32
    return dtype


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot products; emulated, they are an order slower."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
