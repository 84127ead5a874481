"""What a forward may do with a summand: one class for each answer."""

import pytest
from torch import nn
from torch.nn import functional as F

import hp_planner
from hp_planner.summand_code import summand_code


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.act = nn.GELU()
        self.dropout = nn.Dropout(0.0)
        self.scale = 2.0


class Plain(Mlp):
    def forward(self, x):
        return self.down_proj(self.act(self.up_proj(x)))


class Linear(Mlp):
    def forward(self, x):
        h = self.up_proj(x) + x.mean()
        h = self.dropout(self.down_proj(h))
        h = F.dropout(h, p=0.0).view(h.shape) * self.scale / 3
        if self.training:
            return [h] + [x + 1]  # noqa: RUF005  as models have it
        return (h + h.to(x.dtype)).contiguous()


class Residual(Mlp):
    def forward(self, x):
        return self.down_proj(self.act(self.up_proj(x))) + x


class ResidualInPlace(Mlp):
    def forward(self, x):
        h = self.down_proj(self.up_proj(x))
        h += x
        return h


class ResidualByCall(Mlp):
    def forward(self, x):
        h = self.down_proj(self.up_proj(x))
        return h.add(x)


class Activated(Mlp):
    def forward(self, x):
        return self.act(self.down_proj(self.up_proj(x)))


class Squared(Mlp):
    def forward(self, x):
        h = self.down_proj(self.up_proj(x))
        return h * h


class OnOneBranch(Mlp):
    def forward(self, x):
        h = x
        if self.training:
            h = self.down_proj(self.up_proj(x))
        return h - x


class InALoop(Mlp):
    def forward(self, x):
        h = x
        for _ in range(2):
            y = h + 1
            h = self.down_proj(self.up_proj(x))
        return y


@pytest.mark.parametrize("cls", [Plain, Linear])
def test_linear_code_may_go_on_with_a_summand(cls):
    assert summand_code(cls).problem == ""


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Residual, "+ x"),
        (ResidualInPlace, "h + x"),
        (ResidualByCall, "h.add(x)"),
        (Squared, "h * h"),
        (OnOneBranch, "h - x"),
        (InALoop, "h + 1"),
    ],
)
def test_what_is_not_linear_is_named(cls, text):
    assert text in summand_code(cls).problem


def test_parts_that_a_summand_is_handed_to_are_named():
    assert summand_code(Linear).parts == ("dropout",)
    assert summand_code(Activated).parts == ("act",)


def test_an_mlp_that_does_more_with_its_sum_is_sharded_by_linear_layer():
    modules = {}
    for cls in (Plain, Linear, Residual, Activated):
        plan = hp_planner.plan(nn.ModuleDict({"mlp": cls()}), {"tp": 2})
        modules[cls] = [spec.module for spec in plan.boundaries if spec.module]
    assert modules[Plain] == ["mlp"]
    assert modules[Residual] == modules[Activated] == ["mlp.up_proj", "mlp.down_proj"]
