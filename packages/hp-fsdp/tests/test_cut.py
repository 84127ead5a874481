import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_dtensor import Layout, Partial, Replicate, SectionedShard, Shard, StridedShard
from hp_fsdp.cut import Cut, partial_gradient_layout


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    world=st.integers(1, 6),
    data=st.data(),
)
def test_pieces_are_those_of_torch_chunk_and_join_to_the_whole(shape, world, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = []
    for rank in range(world):
        cut = Cut(shape, dim, world, rank)
        piece = tensor.narrow(dim, cut.start, cut.length(rank))
        assert piece.shape == cut.local_shape
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces, dim), tensor)


@given(rows=st.integers(0, 20), columns=st.integers(0, 4), world=st.integers(1, 6))
def test_padded_leading_pieces_hold_the_whole_in_their_first_elements(rows, columns, world):
    tensor = torch.arange(rows * columns).view(rows, columns)
    flat = []
    for rank in range(world):
        cut = Cut((rows, columns), 0, world, rank)
        piece = tensor.narrow(0, cut.start, cut.length(rank)).reshape(-1)
        flat.append(torch.cat([piece, piece.new_full((cut.padded_numel - piece.numel(),), -1)]))
    gathered = torch.cat(flat)
    assert gathered.numel() == cut.gathered_numel
    assert torch.equal(gathered[: cut.numel].view(rows, columns), tensor)
    assert cut.is_even == (rows % world == 0 or columns == 0)


def test_a_dim_behind_dims_of_size_one_is_leading():
    assert Cut((1, 6, 2), 1, 2, 0).is_leading
    assert not Cut((2, 6, 2), 1, 2, 0).is_leading


def test_partial_gradients_of_the_source_stay_on_model_axes():
    mesh = {"dp_shard": 2, "tp": 2}
    source = Layout(mesh, (Replicate(), Replicate()), (4,), (Replicate(), Partial()))
    layout = source.with_placements((Shard(0), Replicate()))
    partial = partial_gradient_layout(layout, source)
    assert partial is not None
    assert partial.placements == (Shard(0), Replicate())
    assert partial.grad_placements == (Shard(0), Partial())


def test_no_partial_gradient_needs_no_second_layout():
    mesh = {"dp_shard": 2, "tp": 2}
    source = Layout(mesh, (Replicate(), Shard(0)), (4,))
    assert partial_gradient_layout(source, source) is None
    assert partial_gradient_layout(source, None) is None


@pytest.mark.parametrize("under", [Shard(0), SectionedShard(0, (4, 2, 2))])
def test_a_strided_layout_is_the_chunk_of_the_tensor_parallel_part(under):
    mesh = {"dp_shard": 2, "tp": 2}
    before = Layout(mesh, (Replicate(), under), (8,))
    after = before.with_placements((StridedShard(0, 2), under))
    for dp in range(2):
        for tp in range(2):
            whole = before.owned_indices((dp, tp))
            assert torch.equal(after.owned_indices((dp, tp)), whole.chunk(2)[dp])
