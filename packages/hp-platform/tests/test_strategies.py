"""Strategies keep their promises, and the laws that they are for."""

import math

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from hp_platform import Tier, TopologyError
from hp_platform.testing import strategies

# A crowded machine must not look like a slow law.
LAW = settings(deadline=None, max_examples=50)


@LAW
@given(strategies.mesh_shapes(max_world_size=6, max_axes=3))
def test_meshes_have_the_ranks_and_axes_asked_for(shape):
    assert 1 <= len(shape) <= 3
    assert min(shape) >= 1
    assert math.prod(shape) <= 6


@pytest.mark.parametrize("wanted", [(1,), (6,), (2, 3), (3, 2), (1, 6), (2, 1, 3)])
def test_every_mesh_can_be_found(wanted):
    found = find(
        strategies.mesh_shapes(max_world_size=6),
        lambda shape: shape == wanted,
        settings=settings(max_examples=3_000, database=None),
    )
    assert found == wanted


@LAW
@given(st.data())
def test_shares_are_as_many_as_coordinates_and_add_up(data):
    size, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 9))
    shares = data.draw(strategies.shares_of(rows, size))
    assert (len(shares), sum(shares)) == (size, rows)
    assert min(shares) >= 0
    assert len(data.draw(strategies.uneven_shares(size))) == size


@LAW
@given(strategies.shapes(empty=False), strategies.shapes(min_dims=0, max_dims=1))
def test_shapes_are_empty_only_where_asked(full, short):
    assert 0 not in full
    assert len(short) <= 1


@LAW
@given(st.data())
def test_gathering_and_scattering_are_inverse_on_the_simulator(data):
    """Whatever the mesh, axis and shares: every rank has its share again, times the axis size."""
    simulator = data.draw(strategies.simulators())
    axis = data.draw(st.integers(0, len(simulator.mesh_shape) - 1))
    size = simulator.mesh_shape[axis]
    parts = data.draw(strategies.distributed(size))
    locals_ = [
        parts[simulator.coordinates(rank)[axis]].clone() for rank in range(simulator.world_size)
    ]
    rows = [len(part) for part in parts]
    whole = simulator.all_gather(locals_, axis, rows)
    assert all(torch.equal(found, torch.cat(parts)) for found in whole)
    summed = simulator.reduce_scatter(whole, axis, rows)
    averaged = simulator.reduce_scatter(whole, axis, rows, "avg")
    for before, total, average in zip(locals_, summed, averaged, strict=True):
        assert torch.equal(total, before * size)
        torch.testing.assert_close(average, before)


@LAW
@given(strategies.topologies(), st.data())
def test_subgroups_are_equal_stay_inside_a_domain_and_cover_all_ranks(topology, data):
    """Or are refused, where hosts are unequal or interleaved."""
    ranks = data.draw(st.sets(st.integers(0, topology.world_size - 1), min_size=1))
    limit = data.draw(st.none() | st.integers(1, 4))
    per_domain = {}
    for rank in sorted(ranks):
        per_domain.setdefault(topology.domain_of(rank), []).append(rank)
    equal = len({len(found) for found in per_domain.values()}) == 1
    in_blocks = [rank for found in per_domain.values() for rank in found] == sorted(ranks)
    try:
        groups = topology.subgroups(ranks, limit)
    except TopologyError:
        assert not (equal and in_blocks)
        return
    assert equal
    assert in_blocks
    assert [rank for group in groups for rank in group] == sorted(ranks)
    assert len({len(group) for group in groups}) == 1
    assert all(topology.tier(group) is not Tier.SLOW for group in groups)
    assert limit is None or len(groups[0]) <= limit
