"""Gradients that are not finite: found and agreed on by the ranks before a step writes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hp_muon.errors import MuonError
from hp_muon.wording import counted
from hp_platform import MeshAxis, Origin, aligned_empty, all_reduce, pad_to_alignment

_ORIGIN = Origin("hp_muon", "finite gradients", "optimizer")


def check_gradients(
    names: Mapping[int, str], gradients: Mapping[int, Tensor | None], axes: Sequence[MeshAxis]
) -> None:
    """Stops every rank of the axes, before any exchange of the step, if one has such a gradient.

    Collective over the axes, one byte a parameter. The host waits for the answer.

    Args:
        names: of the Muon parameters by index, the same on every rank.
        gradients: local ones, None where there is none.
        axes: the ranks that step together.

    Raises:
        MuonError: names the parameters.
    """
    order = sorted(names)
    bad = _are_bad([gradients[index] for index in order])
    if axes:
        numel = pad_to_alignment(len(order), torch.uint8)
        buffer = aligned_empty(numel, torch.uint8, axes[0].device).zero_()
        buffer[: len(order)] = bad
        for axis in axes:
            all_reduce(buffer, axis, op="max", origin=_ORIGIN).wait()
        bad = buffer[: len(order)]
    if not bool(bad.any()):
        return
    found = [names[index] for index, flag in zip(order, bad.tolist()) if flag]
    raise MuonError(
        f"gradients of {counted(len(found), 'parameter')} are not finite: {found[:10]}. Nothing "
        "was stepped; skip this step on every rank (optimizer.zero_grad()), use a GradScaler with "
        "float16, or go back to a checkpoint"
    )


def _are_bad(gradients: Sequence[Tensor | None]) -> Tensor:
    """[parameters] uint8: 1 where a gradient is there and is not finite."""
    kept = [(at, g) for at, g in enumerate(gradients) if g is not None and g.numel()]
    if not kept:
        return torch.zeros(len(gradients), dtype=torch.uint8)
    present = [gradient for _, gradient in kept]
    # A maximum does not overflow, as a sum would. In float32, as the momentum takes them.
    norms = torch._foreach_norm(present, torch.inf)
    device = present[0].device
    zero = torch.zeros((), device=device)
    every: list[Tensor] = [zero] * len(gradients)
    for (at, _), norm in zip(kept, norms):
        every[at] = norm.to(device, torch.float32)
    return torch.stack(every).isfinite().logical_not().to(torch.uint8)
