"""Random numbers that a forward draws by itself: found, and refused where ranks share values."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hp_planner
from hp_planner.dropout_calls import dropout_calls
from hp_planner.errors import LintError
from hp_planner.graph import read_module
from hp_planner.random_draws import random_draws


class Mlp(nn.Module):
    def __init__(self, noise=0.0):
        super().__init__()
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.noise = noise

    def forward(self, x):
        return self.down_proj(F.silu(self.up_proj(self._change(x))))

    def _change(self, x):
        return x


class Direct(Mlp):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


class InAHelper(Mlp):
    def _change(self, x):
        return self._deeper(x)

    def _deeper(self, x):
        return x * torch.empty_like(x).uniform_(0.9, 1.1)


def jitter(x, training):
    if not training:
        return x
    noise = [torch.randn(x.shape) for _ in range(2)]
    return x + noise[0]


class ByAFunction(Mlp):
    def _change(self, x):
        return jitter(x, self.training)


class OnCondition(Mlp):
    def _change(self, x):
        if self.training and self.noise > 0:
            x = x * torch.bernoulli(x)
        return x if not self.noise else x + torch.normal(0.0, self.noise, x.shape)


class LeavesOut(Mlp):
    def _change(self, x):
        chance = torch.rand([])
        if self.training and chance < self.noise:
            return x * 0
        return x * 2 if random.random() < self.noise else x


class OnAValue(Mlp):
    def _change(self, x):
        for _ in range(2):
            switched = x.sum() > 0
            if switched:
                x = x + torch.randint(2, x.shape)
        return x


class Seeds(Mlp):
    def _change(self, x):
        np.random.seed(3)
        return x[:, np.random.permutation(8)]


def codes(module):
    return [draw.code for draw in random_draws(module)]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Mlp, []),
        (Direct, ["torch.rand_like"]),
        (InAHelper, [".uniform_"]),
        (ByAFunction, ["torch.randn"]),
        (OnAValue, ["torch.randint"]),
        (Seeds, []),
    ],
)
def test_draws_are_found_in_what_the_forward_calls(kind, found):
    assert codes(kind()) == found
    assert codes(kind().eval()) == ([] if kind is ByAFunction else found)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (OnCondition, ["torch.bernoulli", "torch.normal"]),
        (LeavesOut, ["torch.rand", "random.random"]),
    ],
)
def test_what_a_setting_switches_off_is_not_drawn(kind, found):
    assert codes(kind(0.0)) == []
    assert codes(kind(0.5)) == found


def plan(kind, *arguments, mesh=None):
    return hp_planner.plan(nn.ModuleDict({"mlp": kind(*arguments)}), mesh or {"tp": 2})


@pytest.mark.parametrize("kind", [Direct, InAHelper, ByAFunction, OnAValue])
def test_a_block_that_draws_is_refused_by_name(kind):
    with pytest.raises(LintError, match=rf"(?s)\[random\] mlp.*{kind.__name__}\.forward draws by"):
        plan(kind)
    for mesh in ({"tp": 1}, {"dp_shard": 2}):
        assert plan(kind, mesh=mesh).parameters


def test_a_setting_that_makes_a_block_draw_is_named():
    model = nn.ModuleDict({"mlp": OnCondition(0.5)})
    model.config = {"router_noise": 0.5}
    with pytest.raises(LintError, match=r"set config.router_noise = 0.0"):
        hp_planner.plan(model, {"tp": 2})
    assert plan(OnCondition, 0.0)


class DropsInAHelper(Mlp):
    def _change(self, x):
        return F.dropout(x, p=0.3, training=self.training)


def test_a_dropout_in_a_helper_is_refused_by_name():
    assert dropout_calls(DropsInAHelper) == (("dropout", 0.3),)
    assert read_module(DropsInAHelper()).module("").rates == (("dropout()", 0.3),)
    with pytest.raises(LintError, match=r"dropout\(\) = 0.3"):
        plan(DropsInAHelper)
