"""Cross-entropy of logits sharded over the vocabulary, against the whole logits."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import hp_planner
from hp_dtensor.mesh import mesh_axis
from hp_dtensor.parallelize import parallelize
from hp_integration.loss import vocabulary_cross_entropy
from hp_integration.models import build_model, model_config
from hp_platform import MeshAxis, RankFailure, ledger
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks

CASES = {
    "plain": ([2, 5, 0, 7], -100),
    "some do not count": ([2, -100, 0, -100], -100),
    "another mark": ([5, 5, 0, 7], 5),
    "none counts": ([-100] * 4, -100),
}
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0, 1.5, 0.25, 1.0], dtype=torch.float64)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "label_smoothing": 0.3},
)


def test_loss_and_gradient_are_those_of_the_whole_logits() -> None:
    logits = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[1] += 1000  # exponentials of these overflow unless the maximum is taken off first

    def body(rank: int) -> None:
        axis = MeshAxis.of_group()
        for (targets, mark), options in itertools.product(CASES.values(), OPTIONS):
            whole = logits.clone().requires_grad_()
            given = {"ignore_index": mark, **options}
            wanted = functional.cross_entropy(whole, torch.tensor(targets), **given)
            mine = logits.chunk(2, dim=1)[rank].clone().requires_grad_()
            found = vocabulary_cross_entropy(mine, torch.tensor(targets), axis, **given)
            torch.testing.assert_close(found, wanted, equal_nan=True)
            if not wanted.isnan():
                (3 * wanted).backward()
                (3 * found).backward()
                torch.testing.assert_close(mine.grad, whole.grad.chunk(2, dim=1)[rank])

    run_ranks(body, 2)


def test_three_numbers_a_position_are_exchanged() -> None:
    def body(rank: int) -> list[tuple[str, int]]:
        mine = torch.randn(4, 8, requires_grad=True)
        with ledger() as log:
            vocabulary_cross_entropy(
                mine, torch.tensor([1, 2, 3, 4]), MeshAxis.of_group()
            ).backward()
        return [(record.operation, record.bytes) for record in log.records]

    assert run_ranks(body, 2)[0] == [("all_reduce", 4 * 4), ("all_reduce", 2 * 4 * 4)]


def test_targets_outside_the_vocabulary_and_shapes_that_do_not_fit_are_refused() -> None:
    def outside(rank: int) -> None:
        vocabulary_cross_entropy(torch.zeros(1, 8), torch.tensor([16]), MeshAxis.of_group())

    def shapes(rank: int) -> None:
        vocabulary_cross_entropy(torch.zeros(1, 2, 8), torch.zeros(2), MeshAxis.of_group())

    def weights(rank: int) -> None:
        scores, targets = torch.zeros(1, 8), torch.tensor([1])
        vocabulary_cross_entropy(scores, targets, MeshAxis.of_group(), weight=torch.ones(8))

    for body, text in (
        (outside, "target 16 is no id of a vocabulary of 16"),
        (shapes, "found"),
        (weights, r"expected \[16\], one for every id"),
    ):
        with pytest.raises(RankFailure, match=text):
            run_ranks(body, 2)


def test_a_model_planned_for_it_has_the_gradients_of_one_process() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config = model_config("llama", vocabulary=64)
    for name, value in sizes.items():
        setattr(config, name, value)
    made = build_model(config, seed=0)
    found = hp_planner.plan(made, {"tp": 2}, loss_parallel=True)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    dense = copy.deepcopy(made)
    wanted = functional.cross_entropy(dense(input_ids=ids).logits.flatten(0, 1), ids.flatten())
    wanted.backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = parallelize(copy.deepcopy(made), found, mesh)
        logits = mine(input_ids=ids).logits
        assert logits.shape == (2, 8, 32)
        loss = vocabulary_cross_entropy(logits.flatten(0, 1), ids.flatten(), mesh_axis(mesh, 0))
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        expected = dict(dense.named_parameters())
        torch.testing.assert_close(
            mine.lm_head.weight.grad, expected["lm_head.weight"].grad.chunk(2)[rank]
        )
        torch.testing.assert_close(
            mine.model.layers[0].input_layernorm.weight.grad,
            expected["model.layers.0.input_layernorm.weight"].grad,
        )

    run_ranks(body, 2)
