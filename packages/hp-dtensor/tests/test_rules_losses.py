"""Cross-entropy and its kin over a cut vocabulary: every variant, without gathering logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.lockstep import LockstepMesh, run_lockstep
from hp_dtensor.testing.simulated_check import check_simulated, compare_simulated
from hp_platform import ledger

TARGETS = torch.tensor([2, 5, 0])
WEIGHT = torch.arange(1.0, 9.0, dtype=torch.float64)


def logits(classes: int = 8) -> Tensor:
    return torch.arange(24, dtype=torch.float64).view(3, 8)[:, :classes] / 10


def on(mesh: LockstepMesh, value: Tensor, placement: Placement) -> DTensor:
    layout = Layout(mesh, [placement], value.shape)
    own = value.reshape(-1)[layout.owned_indices()].reshape(layout.local_shape())
    return DTensor.of_layout(own.clone(), layout)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {8: 2.222217, 7: 2.032494}),
        ({"label_smoothing": 0.1}, {8: 2.210551, 7: 2.025827}),
        ({"ignore_index": 5}, {8: 2.355551}),
        ({"weight": WEIGHT}, {8: 2.095551}),
        ({"weight": WEIGHT, "label_smoothing": 0.1, "ignore_index": 5}, {}),
        ({"reduction": "sum", "label_smoothing": 0.2}, {}),
        ({"reduction": "none"}, {}),
    ],
)
def test_every_variant_gives_the_dense_loss_and_gradients(
    options: dict[str, Any], expected: dict[int, float]
) -> None:
    """Case 12, on two and three ranks (8 and 7 classes over them: even and uneven), and with whole
    logits on every rank."""
    weight = options.get("weight")
    rest = {name: value for name, value in options.items() if name != "weight"}

    def loss(x: Tensor, t: Tensor, *w: Tensor) -> Tensor:
        return F.cross_entropy(x, t, *(each.detach() for each in w), **rest)

    for ranks in (2, 3):
        for classes in (8, 7):
            values = [logits(classes), TARGETS]
            values += [] if weight is None else [weight[:classes]]
            call = DenseCall.of(loss, values)
            if classes in expected:
                assert call.outputs[0].item() == pytest.approx(expected[classes], abs=2e-6)
            mesh, whole = {"tp": ranks}, Replicate()
            tried = [
                [
                    Layout(mesh, [placement], value.shape)
                    for placement, value in zip(placements, values)
                ]
                for placements in ((Shard(1), whole, Shard(0)), (whole, whole, whole))
            ]
            assert compare_simulated(call, mesh, tried) == [None, None]


def test_a_loss_of_ignored_targets_only_is_nan_or_zero() -> None:
    def body(mesh: LockstepMesh) -> tuple[float, float]:
        x, t = on(mesh, logits(), Shard(1)), on(mesh, torch.full((3,), -100), Replicate())
        return F.cross_entropy(x, t).item(), F.cross_entropy(x, t, reduction="sum").item()

    for mean, total in run_lockstep(body, {"tp": 2}):
        assert mean != mean
        assert total == 0


def test_logits_are_not_gathered() -> None:
    """What is sent has the size of the rows, however many classes there are."""

    def body(mesh: LockstepMesh) -> list[int]:
        x = on(mesh, torch.randn(4, 4096, dtype=torch.float64), Shard(1)).requires_grad_()
        t = on(mesh, torch.tensor([7, 4000, 2048, 0]), Replicate())
        with ledger() as log:
            F.cross_entropy(x, t, label_smoothing=0.1).backward()
        return [record.bytes for record in log.records]

    torch.manual_seed(0)
    sent = run_lockstep(body, {"tp": 2})[0]
    assert sent
    assert max(sent) <= 2 * 4 * 8  # two ranks' values of four rows


def test_rows_and_classes_cut_on_different_axes() -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=1)

    mesh = {"dp": 2, "tp": 2}
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    call = DenseCall.of(loss, [x, torch.tensor([1, 0, 6, 3, 3])])
    layouts = [
        Layout(mesh, [Shard(0), Shard(1)], (5, 7)),
        Layout(mesh, [Shard(0), Replicate()], (5,)),
    ]
    assert compare_simulated(call, mesh, [layouts]) == [None]


def test_class_probabilities_and_longer_inputs() -> None:
    x = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    soft = x.flip(1).softmax(1)
    hard = torch.tensor([[0, 5, 2], [4, 4, 1]])
    for target in (soft, hard):
        accepted, _ = check_simulated(F.cross_entropy, (x, target), mesh={"tp": 2}, draws=40)
        assert accepted >= 6


def test_log_softmax_differentiates_twice() -> None:
    def twice(x: Any) -> Any:
        (first,) = torch.autograd.grad((torch.log_softmax(x, 1) ** 2).sum(), [x], create_graph=True)
        return (first * first).sum()

    def body(mesh: LockstepMesh) -> Tensor:
        x = on(mesh, logits(), Shard(1)).requires_grad_()
        twice(x).backward()
        return x.grad.full_tensor()

    dense = logits().requires_grad_()
    twice(dense).backward()
    for found in run_lockstep(body, {"tp": 2}):
        torch.testing.assert_close(found, dense.grad)


def test_a_target_outside_the_vocabulary_is_an_error_on_every_rank() -> None:
    def body(mesh: LockstepMesh) -> str:
        x, t = on(mesh, logits(), Shard(1)), on(mesh, torch.tensor([2, 8, 0]), Replicate())
        with pytest.raises(IndexError) as error:
            F.cross_entropy(x, t)
        return str(error.value)

    assert all("out of range" in text for text in run_lockstep(body, {"tp": 2}))


def test_partial_logits_are_reduced_first() -> None:
    call = DenseCall.of(F.cross_entropy, [logits(), TARGETS])
    mesh = {"tp": 2}
    layouts = [Layout(mesh, [Partial()], (3, 8)), Layout(mesh, [Replicate()], (3,))]
    assert compare_simulated(call, mesh, [layouts]) == [None]
