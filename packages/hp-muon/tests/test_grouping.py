"""Which axes cut the matrix plane, and who holds what of it: laws over simulated meshes."""

from __future__ import annotations

import math

import pytest
import torch

from hp_dtensor import (
    AbstractMesh,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
)
from hp_muon import MatrixView, MuonError
from hp_muon.grouping import cutting_axes, geometry_of

MESH = AbstractMesh(("r", "dp", "tp"), (2, 4, 2))
R = Replicate()
OWNER = (0, 1, 0, 0)

CASES = [
    ((8, 6), (R, Shard(0), R), None, (1,)),
    ((8, 6), (R, Shard(0), Shard(1)), None, (1, 2)),
    ((8, 6), (R, StridedShard(0, 2), Shard(0)), None, (1, 2)),
    ((3, 6), (R, Shard(0), R), None, (1,)),
    ((1, 6), (R, Shard(0), R), None, ()),
    ((8, 6), (R, R, R), None, ()),
    ((8, 6), (R, RaggedShard((0,), OWNER), R), None, ()),
    ((8, 6), (R, RaggedShard((0, 1), OWNER), R), None, ()),
    ((8, 6), (R, RaggedShard((0,), (1, 3, 0, 4)), R), None, (1,)),
    ((8, 6), (R, RaggedShard((0, 1), (1, 3, 0, 4)), R), None, (1,)),
    ((8, 6), (R, RaggedShard((0,), OWNER), Shard(1)), None, (2,)),
    ((6, 4, 5), (R, Shard(0), R), None, ()),
    ((6, 4, 5), (R, Shard(0), Shard(1)), None, (2,)),
    ((6, 4, 5), (R, StridedShard(0, 2), Shard(0)), None, ()),
    ((6, 4, 5), (R, Shard(2), Shard(0)), None, (1,)),
    ((6, 4, 5), (R, RaggedShard((0, 1), (2, 1, 0, 3)), R), None, ()),
    ((6, 4, 5), (R, RaggedShard((0, 1), (5, 1, 0, 6)), R), None, (1,)),
    ((12, 6), (R, R, SectionedShard(0, (8, 4))), None, (2,)),
    ((8, 6), (R, Shard(0), R), MatrixView("(h d) m -> h d m", h=4), ()),
    ((8, 6), (R, Shard(0), R), MatrixView("(h d) m -> h d m", h=2), (1,)),
    ((8, 6), (R, Shard(0), R), MatrixView("(d h) m -> h d m", h=4), (1,)),
    ((8, 6), (R, StridedShard(0, 2), Shard(0)), MatrixView("(h d) m -> h d m", h=2), (1,)),
    ((8, 6), (R, Shard(1), Shard(0)), MatrixView("(h d) m -> h d m", h=2), (1,)),
]


@pytest.mark.parametrize(("shape", "placements", "view", "expected"), CASES)
def test_an_axis_cuts_when_it_intersects_the_matrix_plane(shape, placements, view, expected):
    layout = Layout(MESH, placements, shape)
    resolved = (view or MatrixView.default(len(shape))).resolve(shape)
    assert cutting_axes(layout, resolved) == expected


@pytest.mark.parametrize(("shape", "placements", "view", "expected"), CASES)
def test_the_groups_together_hold_every_matrix_exactly_once(shape, placements, view, expected):
    layout = Layout(MESH, placements, shape)
    resolved = (view or MatrixView.default(len(shape))).resolve(shape)
    full = torch.arange(math.prod(shape)).reshape(shape)
    wanted = sorted(tuple(m.flatten().tolist()) for m in resolved.matrices(full))
    found = []
    for coord in MESH.coordinates():
        geometry = geometry_of(layout, resolved, "p", coord)
        assert geometry.pieces[geometry.own].shape == layout.local_shape(coord)
        if any(coord[a] for a in (*geometry.cutting, *geometry.replicated)):
            continue
        group = torch.full(geometry.flat_shape, -1)
        for piece, values in zip(geometry.pieces, members(layout, geometry, coord)):
            group[piece.block] = full.reshape(-1)[values].reshape(piece.shape)
        stack = geometry.view.matrices(group.reshape(geometry.view.shape))
        found += [tuple(m.flatten().tolist()) for m in stack]
    assert sorted(found) == wanted


def members(layout, geometry, coord):
    """Global indices held along the cutting axes, row-major."""
    sizes = MESH.sizes
    for position in torch.cartesian_prod(*(torch.arange(s) for s in sizes)).tolist():
        if all(
            p == c for a, (p, c) in enumerate(zip(position, coord)) if a not in geometry.cutting
        ):
            yield layout.owned_indices(tuple(position))


def test_a_partial_parameter_is_refused_by_name():
    layout = Layout(MESH, (R, Partial(), R), (4, 4))
    with pytest.raises(MuonError, match=r"'w'.*Partial"):
        geometry_of(layout, MatrixView.default(2).resolve((4, 4)), "w", (0, 0, 0))
