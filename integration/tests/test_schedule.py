"""The learning rate rises linearly, then falls along a cosine to a tenth."""

import pytest
import torch

from hp_integration.schedule import learning_rate_schedule, rate_factor


def test_it_warms_up_to_the_peak_and_ends_near_a_tenth() -> None:
    factors = [rate_factor(step, warmup=4, steps=100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)


def test_it_stays_at_a_tenth_after_the_last_step() -> None:
    assert rate_factor(500, warmup=4, steps=100) == pytest.approx(0.1)
    assert rate_factor(3, warmup=10, steps=2) == pytest.approx(4 / 11)


def test_every_group_follows_from_its_own_rate() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.1}])
    learning_rate_schedule(optimizer, warmup=1, steps=10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
