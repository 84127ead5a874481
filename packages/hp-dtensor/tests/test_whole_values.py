"""Plain tensors in validate mode: which are known to be the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from dtensor_block import (
    BATCH,
    HEADS,
    HIDDEN,
    SEQUENCE,
    Attention,
    Tiny,
    batch,
    loss_of,
    tiny_plan,
)
from torch import Tensor, nn

from hp_dtensor.dtensor import DTensor
from hp_dtensor.equivalence import check_gradients
from hp_dtensor.layout import Layout
from hp_dtensor.meta import validate_on_meta
from hp_dtensor.parallelize import parallelize
from hp_dtensor.placements import Replicate, Shard
from hp_dtensor.plan import ParameterSpec
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.lockstep import run_lockstep
from hp_dtensor.whole_values import WholeValues, following, unfollowed
from hp_platform.errors import AgreementError

MADE: list[Callable[[], Tensor]] = [
    lambda: torch.arange(4),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: ~torch.eye(3, dtype=torch.bool),
    lambda: -(torch.linspace(0, 1, 4)[None].expand(2, 4) ** 2),
    lambda: torch.cat([torch.zeros(2), torch.ones(2)]).to(torch.float64),
    lambda: torch.einsum("i,j->ij", torch.arange(3.0), torch.arange(2.0)).softmax(-1),
    lambda: torch.arange(6).unflatten(0, (2, 3)).unbind()[1],
]
UNKNOWN: list[Callable[[], Tensor]] = [
    lambda: torch.rand(4),
    lambda: torch.empty(4).uniform_(),
    lambda: torch.ones(4).bernoulli(),
    lambda: torch.nn.functional.dropout(torch.ones(4)),
    lambda: torch._standard_gamma(torch.ones(4)),
    lambda: torch.ones(4) + torch.rand(4),
    lambda: torch.ones(4).add_(torch.rand(4)),
    lambda: torch.as_tensor(torch.ones(4).numpy()),
]


@pytest.mark.parametrize("make", MADE)
def test_what_is_made_of_numbers_is_known(make: Callable[[], Tensor]) -> None:
    values = WholeValues()
    with following(values):
        assert values.holds(make())


@pytest.mark.parametrize("make", UNKNOWN)
def test_what_is_drawn_or_came_from_elsewhere_is_unknown(make: Callable[[], Tensor]) -> None:
    values = WholeValues()
    with following(values):
        assert not values.holds(make())


def test_a_write_of_something_unknown_makes_a_tensor_unknown() -> None:
    values = WholeValues()
    with following(values):
        made = torch.zeros(4)
        made[1:] = torch.arange(3)
        assert values.holds(made)
        row = made.view(2, 2)[0]
        row[0] = row[1] + 1
        assert values.holds(made)
        row[0] = torch.rand(1)[0]
        assert not values.holds(made)
        other = torch.zeros(4)
        other[1:].copy_(torch.rand(3))
        assert not values.holds(other)
        with unfollowed():
            assert not values.holds(torch.ones(2))


def test_a_part_of_a_dtensor_is_unknown() -> None:
    def body(mesh: Any) -> None:
        values = WholeValues()
        with following(values):
            made = DTensor.of_layout(torch.ones(4), Layout(mesh, [Replicate()], (4,)))
            assert not values.holds(made.to_local())
            part = made.redistribute(placements=[Shard(0)])
            assert not values.holds(part.to_local())
            assert not values.holds(part.full_tensor())

    run_lockstep(body, {"tp": 2})


class Fills(Attention):
    """Makes tensors of ones and zeros in the size of its heads, and writes them."""

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        split = (x.shape[0], x.shape[1], self.heads, HIDDEN // HEADS)
        q, k, v = (layer(x).view(split) for layer in (self.q, self.k, self.v))
        mixed = torch.zeros(q.shape)
        mixed[:] = self.q_norm(q) * torch.ones(q.shape[2], 1) + torch.full(k.shape[2:], 2) * k
        return self.o((mixed + v).flatten(2)), None


class Makes(Tiny):
    """Makes tensors of its own in every way that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(SEQUENCE, HIDDEN)
        nn.init.normal_(self.places.weight, generator=torch.Generator().manual_seed(2))
        self.register_buffer("scale", torch.linspace(0.5, 1, HIDDEN))
        self.shift = torch.linspace(-1, 1, HIDDEN)
        self.layers[0].attention.__class__ = Fills

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, offset: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1])[None])
        x = x * self.scale + self.shift
        state = torch.zeros(BATCH, HIDDEN)
        steps = []
        for index in range(x.shape[1]):
            state = 0.5 * state + x[:, index]
            steps.append(state)
        x = torch.stack(steps, dim=1)
        kept = torch.empty(x.shape)
        kept[:, :, : HIDDEN // 2] = x[:, :, : HIDDEN // 2]
        kept[:, :, HIDDEN // 2 :] = x[:, :, HIDDEN // 2 :]
        if offset is not None:
            kept = kept + offset
        angle = torch.arange(SEQUENCE, dtype=torch.float32).view(1, 1, -1, 1) / 10
        for layer in self.layers:
            kept = layer(kept, (angle.cos(), angle.sin()))
        logits = self.head(self.norm(kept))
        assert labels is not None
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def plan_of(mesh: Any) -> Any:
    good = tiny_plan(mesh)
    places = ParameterSpec("places.weight", "embedding", (SEQUENCE, HIDDEN), _WHOLE, "")
    return evolve(good, parameters=[*good.parameters, places])


_WHOLE = tiny_plan({"tp": 2}).parameters[-2].contract.__class__()


def test_a_model_that_makes_its_own_tensors_agrees_in_all_modes() -> None:
    data = {**batch(), "offset": torch.linspace(0, 1, HIDDEN)}
    for report in run_lockstep(
        lambda mesh: check_gradients(Makes, plan_of({"tp": 2}), mesh, data, loss_of), {"tp": 2}
    ):
        report.raise_if_failed()


def test_what_a_model_writes_into_its_own_tensors_is_followed_without_values() -> None:
    data = {**batch(), "offset": torch.linspace(0, 1, HIDDEN)}
    assert validate_on_meta(Makes(), plan_of({"tp": 2}), data).unreached == ()


def test_an_argument_that_differs_between_ranks_is_named() -> None:
    def body(mesh: Any) -> None:
        model = parallelize(Makes(), plan_of({"tp": 2}), mesh, mode="validate")
        offset = torch.full((HIDDEN,), float(mesh.get_coordinate()[0]))
        with pytest.raises(AgreementError, match=r"arguments without a contract\['offset'\]"):
            model(**batch(), offset=offset)

    run_lockstep(body, {"tp": 2})


def test_outside_the_model_nothing_is_taken_for_whole() -> None:
    def body(mesh: Any) -> None:
        model = parallelize(Makes(), plan_of({"tp": 2}), mesh, mode="validate")
        logits = model(**batch())["logits"]
        with pytest.raises(OperatorError, match="plain tensor"):
            logits + torch.ones(HIDDEN + 4)

    run_lockstep(body, {"tp": 2})


class Drawn(Makes):
    """A buffer that a forward leaves with something drawn in it."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        output = super().forward(*args, **kwargs)
        self.scale.uniform_()
        return output


def test_a_buffer_that_a_forward_left_unknown_stays_so_until_it_is_loaded() -> None:
    def body(mesh: Any) -> None:
        model = parallelize(Drawn(), plan_of({"tp": 2}), mesh, mode="validate")
        model(**batch())
        with pytest.raises(OperatorError, match="mul: a plain tensor"):
            model(**batch())
        model.scale.copy_(torch.ones(HIDDEN))
        model(**batch())

    run_lockstep(body, {"tp": 2})
