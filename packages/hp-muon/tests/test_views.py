"""Logical matrices: reversible patterns, blocks, and refusals by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_muon import MatrixView, MuonError


@st.composite
def views(draw):
    """A random reversible pattern with sizes, and the storage shape it fits."""
    names = list("abcde")[: draw(st.integers(2, 5))]
    sizes = {name: draw(st.integers(1, 4)) for name in names}

    def grouped(order, least):
        groups = [[name] for name in order]
        while len(groups) > least and draw(st.booleans()):
            at = draw(st.integers(0, len(groups) - 2))
            groups[at : at + 2] = [groups[at] + groups[at + 1]]
        return groups

    left = grouped(draw(st.permutations(names)), 1)
    right = grouped(draw(st.permutations(names)), 2)
    text = " -> ".join(" ".join(f"({' '.join(g)})" for g in side) for side in (left, right))
    shape = [torch.Size([sizes[n] for n in group]).numel() for group in left]
    return MatrixView(text, **sizes), shape, sizes, right


@given(views())
def test_restore_is_the_inverse_of_matrices(drawn):
    view, shape, sizes, right = drawn
    resolved = view.resolve(shape)
    storage = torch.arange(torch.Size(shape).numel()).reshape(shape)
    matrices = resolved.matrices(storage)
    rows, cols = (torch.Size([sizes[n] for n in group]).numel() for group in right[-2:])
    assert (resolved.rows, resolved.cols) == (rows, cols)
    assert matrices.shape == (resolved.count, rows, cols)
    assert torch.equal(resolved.restore(matrices), storage)


@given(views(), st.data())
def test_a_cut_at_multiples_of_the_block_cuts_no_matrix(drawn, data):
    view, shape, _, _ = drawn
    resolved = view.resolve(shape)
    storage = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = {tuple(m.flatten().tolist()) for m in resolved.matrices(storage)}
    for dim, length in enumerate(shape):
        block = resolved.block(dim)
        if block is None:
            continue
        at = block * data.draw(st.integers(0, length // block))
        pieces = [storage.narrow(dim, 0, at), storage.narrow(dim, at, length - at)]
        found = set()
        for piece in pieces:
            local = resolved.localise(piece.shape)
            found |= {tuple(m.flatten().tolist()) for m in local.matrices(piece)}
            assert torch.equal(local.restore(local.matrices(piece)), piece)
        assert found == whole


def test_the_default_view_is_the_last_two_dims():
    resolved = MatrixView.default(3).resolve((5, 3, 4))
    assert (resolved.count, resolved.rows, resolved.cols) == (5, 3, 4)
    assert [resolved.block(dim) for dim in range(3)] == [1, None, None]
    storage = torch.randn(5, 3, 4)
    assert resolved.matrices(storage).data_ptr() == storage.data_ptr()


def test_heads_of_a_fused_projection_are_blocks_of_rows():
    resolved = MatrixView("(h d) m -> h d m", h=8).resolve((32, 16))
    assert (resolved.count, resolved.rows, resolved.cols) == (8, 4, 16)
    assert resolved.block(0) == 4
    assert MatrixView("(d h) m -> h d m", h=8).resolve((32, 16)).block(0) is None


@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        ("h d m", {}, "one '->'"),
        ("a b -> a", {}, "same axes"),
        ("a a -> a a", {}, "same axes"),
        ("a b -> (a b)", {}, "rows and cols"),
        ("a ... -> ... a", {}, "cannot read"),
        ("a 1 -> a 1", {}, "cannot read"),
        ("a b -> b a", {"c": 2}, "does not have"),
    ],
)
def test_patterns_that_cannot_be_reversed_are_refused(pattern, sizes, message):
    with pytest.raises(MuonError, match=message):
        MatrixView(pattern, **sizes)


@pytest.mark.parametrize(
    ("sizes", "shape", "message"),
    [
        ({"h": 3}, (8, 2), r"qkv: view .*dim 0: length 8"),
        ({}, (8, 2), "all but one"),
        ({"h": 2, "d": 3}, (8, 2), "length 8"),
        ({"h": 2}, (8, 2, 2), "2 dims"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(sizes, shape, message):
    with pytest.raises(MuonError, match=message):
        MatrixView("(h d) m -> h d m", **sizes).resolve(shape, "qkv")
