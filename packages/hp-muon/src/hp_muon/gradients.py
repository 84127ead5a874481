"""A parameter's gradient on this rank, refused where it cannot be what it should."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_muon.errors import MuonError
from hp_muon.state import local_tensor


def local_gradient(parameter: Tensor, local: Tensor, name: str) -> Tensor | None:
    """The local gradient; None where the parameter has none.

    Raises:
        MuonError: it is Partial, placed or shaped unlike its parameter, or sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    placements = getattr(gradient, "placements", None)
    expected = getattr(parameter, "placements", None)
    if placements is not None:
        if any(placement.is_partial() for placement in placements):
            raise MuonError(
                f"gradient of parameter {name!r} is placed {tuple(placements)}: a Partial gradient "
                "is not summed yet; redistribute it before the step"
            )
        if expected is not None and tuple(placements) != tuple(expected):
            raise MuonError(
                f"gradient of parameter {name!r} is placed {tuple(placements)}, the parameter "
                f"{tuple(expected)}; redistribute the gradient before the step"
            )
    found = local_tensor(gradient)
    if found.layout is not torch.strided:
        raise MuonError(f"gradient of parameter {name!r} is {found.layout}; Muon needs a dense one")
    if found.shape != local.shape:
        raise MuonError(
            f"gradient of parameter {name!r} has local shape {tuple(found.shape)}, the parameter "
            f"{tuple(local.shape)}"
        )
    return found
