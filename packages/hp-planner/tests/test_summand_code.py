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


class ByHelpers(Mlp):
    def forward(self, x):
        return self._last(self._inner(x), scale=2)

    def _inner(self, x):
        return self.act(self.up_proj(x))

    def _last(self, h, scale):
        total, extra = self.down_proj(h), h.sum()
        return total * scale + self._zero(total) * extra

    def _zero(self, h):
        return h - h


class ByItsBase(Plain):
    def forward(self, x):
        return super().forward(x).mul(2.0)


class ResidualByHelper(ByHelpers):
    def forward(self, x):
        return self._last(self._inner(x), scale=2) + x


class ResidualInAHelper(ByHelpers):
    def _zero(self, h):
        return h + self.scale


class ResidualOfItsBase(Plain):
    def forward(self, x):
        return x + super().forward(x)


class IntoAnElement(Mlp):
    def forward(self, x):
        out = x.clone()
        out[:, 0] = self.down_proj(self.up_proj(x))[:, 0]
        return out


class AfterATry(Mlp):
    def forward(self, x):
        try:
            h = self.down_proj(self.up_proj(x))
        except RuntimeError:
            h = x
        return h + x


class InAFunctionWithin(Mlp):
    def forward(self, x):
        def last(h):
            return self.down_proj(h) + x

        return last(self.up_proj(x))


class InAList(Mlp):
    def forward(self, x):
        for h in [self.down_proj(self.up_proj(x))]:
            x = x + h
        return x


class ByAnotherName(Mlp):
    def forward(self, x):
        return getattr(self, "down_proj")(self.up_proj(x)) + x  # noqa: B009


@pytest.mark.parametrize("cls", [Plain, Linear, ByHelpers, ByItsBase])
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
        (ResidualByHelper, "+ x"),
        (ResidualInAHelper, "h + self.scale"),
        (ResidualOfItsBase, "x + super().forward(x)"),
        (IntoAnElement, "into out[:, 0]"),
        (AfterATry, "h + x"),
        (InAFunctionWithin, "in a function within it"),
        (InAList, "x + h"),
        (ByAnotherName, "not seen to call its output layer"),
    ],
)
def test_what_is_not_linear_is_named(cls, text):
    assert text in summand_code(cls).problem


def test_code_that_cannot_be_read_may_do_anything():
    made = {}
    exec("def forward(self, x): return self.down_proj(self.up_proj(x))", made)
    unread = type("Unread", (Mlp,), {"forward": made["forward"]})
    assert "cannot be read" in summand_code(unread).problem


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
