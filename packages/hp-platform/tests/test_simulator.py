"""The simulator on meshes of several axes; its laws on one axis are in test_conformance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_platform import CollectiveError
from hp_platform.testing import Simulator
from hp_platform.testing.strategies import mesh_shapes, uneven_shares


def test_ranks_are_numbered_row_major():
    simulator = Simulator((2, 3))
    assert simulator.world_size == 6
    assert [simulator.coordinates(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert simulator.peers(4, 0) == (1, 4)
    assert simulator.peers(4, 1) == (3, 4, 5)
    assert simulator.peers(4, -1) == (3, 4, 5)


@given(st.data(), mesh_shapes())
def test_a_reduce_scatter_then_an_all_gather_is_an_all_reduce(data, shape):
    simulator = Simulator(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    shares = data.draw(uneven_shares(shape[axis]))
    rows = sum(shares)
    tensors = [
        torch.arange(rows * 2).view(rows, 2) * (rank + 1) for rank in range(simulator.world_size)
    ]
    scattered = simulator.reduce_scatter(tensors, axis, shares)
    gathered = simulator.all_gather(scattered, axis, shares)
    for found, expected in zip(gathered, simulator.all_reduce(tensors, axis)):
        assert torch.equal(found, expected)


@given(st.data(), mesh_shapes())
def test_an_all_to_all_is_undone_by_its_transpose(data, shape):
    simulator = Simulator(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    sent = [data.draw(uneven_shares(shape[axis])) for _ in range(simulator.world_size)]
    received = [
        [sent[peer][simulator.coordinates(rank)[axis]] for peer in simulator.peers(rank, axis)]
        for rank in range(simulator.world_size)
    ]
    tensors = [torch.arange(sum(rows)) + 100 * rank for rank, rows in enumerate(sent)]
    there = simulator.all_to_all(tensors, axis, sent, received)
    back = simulator.all_to_all(there, axis, received, sent)
    for found, expected in zip(back, tensors):
        assert torch.equal(found, expected)


def test_groups_of_one_axis_may_have_different_sizes():
    simulator = Simulator((2, 2))
    tensors = [torch.arange(3)] * 2 + [torch.arange(5)] * 2
    sizes = [[1, 2], [1, 2], [5, 0], [5, 0]]
    scattered = simulator.reduce_scatter(tensors, 1, sizes)
    assert [t.tolist() for t in scattered] == [[0], [2, 4], [0, 2, 4, 6, 8], []]


def test_arguments_are_left_alone_and_results_share_no_memory():
    simulator = Simulator((2,))
    tensors = [torch.zeros(2, 2), torch.ones(2, 2)]
    results = [
        *simulator.all_reduce(tensors, 0),
        *simulator.all_gather(tensors, 0),
        *simulator.reduce_scatter(tensors, 0),
        *simulator.broadcast(tensors, 0, 1),
        *simulator.reduce(tensors, 0, 1),
        *simulator.all_to_all(tensors, 0),
        *Simulator((1, 2)).all_reduce(tensors, 0),
    ]
    for result in results:
        result.fill_(9)
    assert torch.equal(tensors[0], torch.zeros(2, 2))
    assert torch.equal(tensors[1], torch.ones(2, 2))
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


def test_gradients_flow_through():
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    total = Simulator((2,)).all_reduce(tensors, 0)
    (total[0].sum() + 2 * total[1].sum()).backward()
    assert [t.grad.tolist() for t in tensors] == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, t: s.all_reduce(t[:1], 0), "got 1 tensors"),
        (lambda s, t: s.all_reduce(t, 1), "no axis 1"),
        (lambda s, t: s.all_reduce(t, 0, op="mean"), "op 'mean' is unknown"),
        (lambda s, t: s.all_reduce([x.int() for x in t], 0, op="avg"), "average of torch.int32"),
        (lambda s, t: s.all_reduce([t[0], t[1][:1]], 0), "differ"),
        (lambda s, t: s.reduce_scatter(t, 0), "3 rows do not divide by 2"),
        (lambda s, t: s.reduce_scatter(t, 0, op="max"), "op 'max' is unknown"),
        (lambda s, t: s.reduce_scatter(t, 0, [1, 1]), "add up to 2"),
        (lambda s, t: s.reduce_scatter(t, 0, [[1, 2], [2, 1]]), "disagree about sizes"),
        (lambda s, t: s.all_gather(t, 0, [3, 2]), "hold .3, 3. rows"),
        (lambda s, t: s.all_gather([t[0], t[1][:1]], 0), "hold .3, 1. rows"),
        (lambda s, t: s.all_gather(t, 0, [3]), "must be 2 non-negative"),
        (lambda s, t: s.broadcast(t, 0, 2), "2 is not a coordinate"),
        (lambda s, t: s.all_to_all(t, 0, [1, 2], [3, 3]), "output_sizes says"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(CollectiveError, match=message):
        call(Simulator((2,)), [torch.ones(3, 2), torch.ones(3, 2)])


def test_a_mesh_without_ranks_is_refused():
    with pytest.raises(CollectiveError, match="positive axis sizes"):
        Simulator((2, 0))
