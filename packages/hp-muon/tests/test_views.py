"""Logical matrices: reversible patterns, blocks, and refusals by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_muon import MatrixView, MuonError
from hp_muon.sections import Section


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


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        ["(x d) m -> (x d) m", "m (x d) -> (x d) m", "(g x d) m -> g x d m", "(d x) m -> (d x) m"]
    ),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_kinds_of_a_split_view_together_hold_every_element_once(pattern, pieces, other):
    sizes = {"x": tuple(pieces), "d": 2} | ({"g": other} if "g" in pattern else {})
    rows = sum(pieces) * 2 * (other if "g" in pattern else 1)
    shape = (rows, 3) if not pattern.startswith("m") else (3, rows)
    storage = torch.arange(float(rows * 3)).reshape(shape)
    seen = []
    for kind, size in zip(MatrixView(pattern, **sizes).kinds(shape), pieces):
        selection = kind.section.select(((0, shape[kind.section.dim]),))
        part = selection.of(storage).reshape(kind.shape)
        matrices = kind.matrices(part)
        assert matrices.shape == (kind.count, kind.rows, kind.cols)
        assert kind.sizes["x"] == size
        assert torch.equal(kind.restore(matrices), part)
        seen += part.flatten().tolist()
    assert sorted(seen) == storage.flatten().tolist()


@given(st.data())
def test_a_section_selects_its_elements_of_any_runs(data):
    period = data.draw(st.integers(1, 6))
    start = data.draw(st.integers(0, period - 1))
    section = Section(0, period, start, data.draw(st.integers(1, period - start)))
    edges = sorted(data.draw(st.sets(st.integers(0, 24), min_size=2, max_size=6)))
    runs = tuple(zip(edges[::2], edges[1::2]))
    held = torch.cat([torch.arange(*run) for run in runs])
    expected = [p for p in held.tolist() if start <= p % period < start + section.width]
    assert section.select(runs).of(held).flatten().tolist() == expected
    compact = [p for run in section.compact(runs) for p in range(*run)]
    assert compact == [section.before(p) for p in expected]


def test_only_one_axis_can_be_split_and_its_pieces_must_fill_the_dim():
    with pytest.raises(MuonError, match=r"one axis can be split, found \['x', 'd'\]"):
        MatrixView("(x d) m -> (x d) m", x=(1, 2), d=(3, 4))
    with pytest.raises(MuonError, match="positive integers, or a tuple"):
        MatrixView("(x d) m -> (x d) m", x=(1, 0))
    with pytest.raises(MuonError, match=r"'w': view .* dim 0: length 10 does not fit"):
        MatrixView("(x d) m -> (x d) m", x=(1, 2), d=3).kinds((10, 4), "'w'")


def test_matrices_are_numbered_as_in_the_whole_parameter():
    view = MatrixView("(e h r) c -> h e r c", e=4, h=3, r=2).resolve((24, 5))
    storage = torch.arange(24).repeat_interleave(5).reshape(24, 5)
    whole = view.matrices(storage)
    rows = list(range(6, 18))  # experts 1 and 2
    part = view.localise((12, 5)).matrices(storage[rows])
    numbers = view.matrix_numbers([rows, range(5)])
    assert torch.equal(whole[numbers], part)
