"""Coefficient sets of the Newton-Schulz iteration, as data.

One (a, b, c) a step; each maps a singular value s to a s + b s^3 + c s^5.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from attrs import frozen

from hp_muon.errors import MuonError

Triple = tuple[float, float, float]


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
        gram: whether the iteration in Gram space, with its restart, is as accurate as the direct
            one in half precision too.
        source: where the numbers were published.
    """

    name: str
    triples: tuple[Triple, ...]
    repeats: bool
    safety: float
    gram: bool
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
            gram=True,
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
            gram=True,
            source="asymmetric five-step set; HyperParallel-FSDP paper, section 6.6",
        ),
        Coefficients(
            "polar_express",
            (*_deflate(_POLAR_EXPRESS, 1.01), (1.875, -1.25, 0.375)),
            repeats=True,
            safety=1.01,
            gram=False,
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
        gram=False,
        source="caller",
    )
