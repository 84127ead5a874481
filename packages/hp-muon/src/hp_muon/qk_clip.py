"""QK-clip: after a step, shrinks the query and key rows of heads whose logits grew too large.

With S the largest attention logit of a head since the last step and S > tau, the head's logits are
multiplied by tau / S: its query rows by (tau / S)^alpha and its key rows by (tau / S)^(1 - alpha)
(Kimi K2, arXiv 2507.20534, section 2.1). It is an example of a post-update hook and needs nothing
of the optimizer: `Muon(..., post_update=clip)`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

import torch
from attrs import define, field
from torch import Tensor

from hp_dtensor import layout_of
from hp_muon.errors import MuonError
from hp_muon.state import local_tensor


@define(eq=False)
class QKClip:
    """A hook for `Muon(post_update=...)`.

    Attributes:
        weights: glob patterns of parameter names [heads x head dim, ...] and the power of tau / S
            that their rows are scaled by: 0.5 and 0.5 for a query and a key projection.
        tau: the largest logit that is left alone.
        logits: largest logits of every head, float32 [heads], by parameter name; `observe` fills
            it, and every rank must give the same numbers.
    """

    weights: Mapping[str, float]
    tau: float = 100.0
    logits: dict[str, Tensor] = field(factory=dict, init=False)

    def observe(self, name: str, largest: Tensor) -> None:
        """Notes the largest attention logits [heads] that weight `name` produced in a forward."""
        known = self.logits.get(name)
        largest = largest.detach().float()
        self.logits[name] = largest if known is None else torch.maximum(known, largest)

    def __call__(self, name: str, parameter: Tensor) -> None:
        """Scales this rank's rows of the heads above `tau`, and forgets their logits.

        Raises:
            MuonError: the rows do not divide by the heads, or a rank does not hold whole rows.
        """
        largest = self.logits.pop(name, None)
        powers = [power for glob, power in self.weights.items() if fnmatch.fnmatchcase(name, glob)]
        if largest is None or not powers:
            return
        layout, local = layout_of(parameter), local_tensor(parameter)
        rows = parameter.shape[0] if layout is None else layout.shape[0]
        if rows % len(largest):
            raise MuonError(
                f"parameter {name!r} has {rows} rows, which do not divide by the {len(largest)} "
                "heads whose logits were observed"
            )
        if layout is not None and layout.flat_dims > 1:
            raise MuonError(
                f"parameter {name!r} is {layout}: QK-clip scales rows, and this rank holds parts "
                "of rows; shard it over dim 0 or 1"
            )
        factors = (self.tau / largest.clamp(min=self.tau)) ** powers[0]
        factors = factors.repeat_interleave(rows // len(largest)).to(local.device)
        if layout is not None:
            factors = factors[layout.dim_indices(0).to(local.device)]
        with torch.no_grad():
            local.mul_(factors.reshape(-1, *[1] * (local.ndim - 1)).to(local.dtype))
