"""NorMuon: rows of an orthogonalized update brought to a common size (Li et al. 2025).

    v <- beta2 v + (1 - beta2) mean over cols of O^2,    O' = O / (sqrt(v) + eps)

and O' is scaled back to the Frobenius norm of O, so that scale rules mean what they mean for plain
Muon (arXiv 2510.05491, where the norm is written out as that of an orthogonal matrix). The second
moment has one entry a row, and is held by the compute owner of the matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8


def normalise_rows(updates: Tensor, moments: Tensor, beta2: float) -> None:
    """One step of NorMuon on `updates` [n, rows, cols] and `moments` [n, rows], both in place.

    Moments are float32. A zero update stays zero.
    """
    exact = updates.float()
    moments.lerp_(exact.square().mean(dim=-1), 1 - beta2)
    scaled = exact / (moments.sqrt() + EPS).unsqueeze(-1)
    before = torch.linalg.matrix_norm(exact, keepdim=True)
    after = torch.linalg.matrix_norm(scaled, keepdim=True)
    updates.copy_(scaled * (before / torch.where(after > 0, after, 1)))
