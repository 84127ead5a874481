"""Over which axes all ranks that exchange anything reach an agreement."""

from __future__ import annotations

import pytest
import torch
from attrs import define

from hp_muon.channels import Channels


@define(eq=False)
class Mesh:
    """A device mesh as far as its ranks go."""

    mesh: torch.Tensor

    @property
    def shape(self):
        return tuple(self.mesh.shape)


def agreement(*used):
    """`used`: (mesh, index of the axis, subgroup, what stands for its process group)."""
    channels = Channels.__new__(Channels)
    channels._axes = list(used)
    return channels.agreement


SQUARE, PAIR, OTHER_PAIR = map(Mesh, map(torch.tensor, ([[0, 1], [2, 3]], [[0, 1]], [[2, 3]])))


@pytest.mark.parametrize(
    ("used", "wanted"),
    [
        ([], ()),
        ([(SQUARE, 1, None, "columns"), (SQUARE, 0, None, "rows")], ("rows", "columns")),
        # A whole axis reaches further than a part of it.
        ([(SQUARE, 0, (0,), "part"), (SQUARE, 0, None, "rows")], ("rows",)),
        ([(SQUARE, 0, None, "rows"), (SQUARE, 1, None, "columns"), (PAIR, 1, None, "pair")],
         ("rows", "columns")),
        # Along one axis of a square, a maximum does not reach the whole square.
        ([(SQUARE, 0, None, "rows"), (PAIR, 1, None, "pair")], None),
        ([(SQUARE, 0, None, "rows"), (SQUARE, 1, (0,), "part"), (PAIR, 1, None, "pair")], None),
        ([(PAIR, 1, None, "pair"), (OTHER_PAIR, 1, None, "other")], None),
    ],
)  # fmt: skip
def test_an_agreement_needs_axes_in_use_that_reach_every_rank_in_use(used, wanted):
    assert agreement(*used) == wanted
