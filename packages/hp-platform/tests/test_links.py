"""Links: the model, and that all ranks measure the same."""

import pytest
import torch

from hp_platform import HPError, MeshAxis, Tier
from hp_platform.links import Link, measure_link
from hp_platform.testing import run_ranks


def test_a_message_costs_latency_and_its_size():
    assert Link(0.5, 100.0).seconds(200) == 2.5
    with pytest.raises(HPError, match="bandwidth > 0"):
        Link(0.0, 0.0)


def test_an_axis_of_one_rank_costs_nothing():
    alone = MeshAxis("dp", 1, 0, (0,), Tier.LOCAL, torch.device("cpu"))
    assert measure_link(alone).seconds(1 << 30) == 0.0


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 3}, {"repeats": 0}])
def test_measurements_of_nothing_are_refused(arguments):
    alone = MeshAxis("dp", 1, 0, (0,), Tier.LOCAL, torch.device("cpu"))
    with pytest.raises(HPError, match="needs at least 4 bytes and 1 repeat"):
        measure_link(alone, **arguments)


@pytest.mark.ranks
def test_every_rank_gets_the_same_link():
    first, second = run_ranks(lambda: measure_link(MeshAxis.of_group(), size=1 << 16), 2)
    assert first == second
    assert first.latency > 0
