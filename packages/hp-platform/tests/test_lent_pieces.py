"""A reduce-scatter of pieces that peers read where they lie, against the flat tensor's."""

import platform
import sys

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from hp_platform import CollectiveError, HPError, MeshAxis, Origin, ledger
from hp_platform.lent_pieces import PieceLayout, piecewise_reduce_scatter
from hp_platform.meeting import share_memory
from hp_platform.testing import run_ranks

ORIGIN = Origin("test", "pieces")


@st.composite
def layouts(draw, world):
    """Pieces in any order, some empty, with gaps between and behind them."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=6))
    places, at = [], 0
    for numel, gap in sizes:
        at += gap
        places.append((at, numel))
        at += numel
    total = -(-max(at, 1) // world) * world + draw(st.integers(0, 2)) * world
    offsets, numels = zip(*draw(st.permutations(places)))
    return PieceLayout(offsets, numels, total)


@settings(max_examples=100, deadline=None)
@given(layouts(3))
def test_shares_and_gaps_are_a_partition_of_the_flat_tensor(layout):
    found = torch.full((layout.total,), -1)
    part = layout.total // 3
    for rank in range(3):
        share = found[rank * part : (rank + 1) * part]
        for each in layout.within(rank * part, (rank + 1) * part):
            places = share[each.place : each.place + each.numel]
            assert (places == -1).all()
            places.copy_(torch.arange(each.start, each.start + each.numel) + 100 * each.piece)
        for first, last in layout.gaps(rank * part, (rank + 1) * part):
            assert (share[first:last] == -1).all()
            share[first:last] = -2
    assert not (found == -1).any()
    for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels)):
        piece = found[offset : offset + numel]
        assert piece.tolist() == list(range(100 * index, 100 * index + numel))


@pytest.mark.parametrize(
    "places", [((0, 3), (4, 4), 8), ((0, 4), (4, 5), 8), ((2, 0), (3, 3), 8), ((0,), (-1,), 8)]
)
def test_pieces_that_overlap_or_do_not_fit_are_refused(places):
    with pytest.raises(HPError, match="overlap, or do not fit into 8 elements"):
        PieceLayout(*places)


@pytest.mark.ranks
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="ranks read one another's memory on Linux on x86-64 only",
)
@pytest.mark.parametrize("world", [2, 3])
def test_pieces_give_what_the_flat_tensor_does(world):
    def body(rank):
        axis = MeshAxis.of_group()
        assert piecewise_reduce_scatter(PieceLayout((0,), (6,), 6), torch.float32, axis) is None
        if not share_memory(axis):
            return False

        @seed(0)
        @settings(max_examples=40, deadline=None, database=None)
        @given(layouts(world), st.sampled_from([1, 4, 1000]), st.sampled_from([1, 2, 3]), st.data())
        def agree(layout, scratch, divisor, data):
            # All ranks draw the same, and look at what each of them has.
            has = [[data.draw(st.booleans()) for _ in layout.numels] for _ in range(world)]
            values = torch.arange(world * layout.total, dtype=torch.float32)
            expected = torch.zeros(layout.total)
            for other, owned in enumerate(has):
                for present, offset, numel in zip(owned, layout.offsets, layout.numels):
                    place = slice(offset, offset + numel)
                    expected[place] += present * values[other * layout.total :][place]
            own = values[rank * layout.total :]
            pieces = [
                own[offset : offset + numel].clone() if present else None
                for present, offset, numel in zip(has[rank], layout.offsets, layout.numels)
            ]
            call = piecewise_reduce_scatter(layout, torch.float32, axis)
            part = layout.total // world
            for _ in range(2):
                output = torch.full((part,), float("nan"))
                handle = call(pieces, output, torch.empty(scratch), divisor, ORIGIN)
                handle.wait()
                handle.wait_for_readers()
                share = expected[rank * part : (rank + 1) * part]
                assert torch.equal(output, share / divisor)

        agree()
        # Longer than a block; the ledger enters the flat tensor, and lent pieces need no alignment.
        numel = 300_032 * world
        layout = PieceLayout((0,), (numel,), numel)
        call = piecewise_reduce_scatter(layout, torch.float32, axis)
        piece = torch.ones(numel + 1)[1:]
        output = torch.empty(numel // world + 128)
        output = output[-output.data_ptr() % 512 // 4 :][: numel // world]
        with ledger() as log:
            handle = call([piece], output, torch.empty(1 << 16), 1, ORIGIN)
            handle.wait()
            handle.wait_for_readers()
        assert (output == world).all()
        assert [(r.operation, r.bytes) for r in log.records] == [("reduce_scatter", 4 * numel)]
        assert not log.unaligned()
        with pytest.raises(CollectiveError, match="expected pieces of"):
            call([piece[1:]], output, torch.empty(1), 1, ORIGIN)
        with pytest.raises(CollectiveError, match="expected an output of"):
            call([piece], output[1:], torch.empty(1), 1, ORIGIN)
        for wrong in (piece.double(), torch.ones(2 * numel)[::2]):
            with pytest.raises(CollectiveError, match="expected contiguous tensors of"):
                call([wrong], output, torch.empty(1), 1, ORIGIN)
        with pytest.raises(CollectiveError, match="and scratch memory"):
            call([piece], output, torch.empty(0), 1, ORIGIN)
        return True

    if not all(run_ranks(body, world)):
        pytest.skip("this system lets no process read another's memory")
