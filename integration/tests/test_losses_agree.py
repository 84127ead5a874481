"""Sharding changes no loss: the first twenty, against the same run in one process, in fp32."""

from collections.abc import Callable

import pytest
import torch

from hp_integration.data import load_corpus
from hp_integration.data_parallel import DataParallel
from hp_integration.models import build_model, model_config
from hp_integration.options import Options, parse_options
from hp_integration.schedule import rate_factor
from hp_integration.train import Result
from hp_integration.trainer import next_token_loss, training_batch
from hp_muon.reference import DenseMuon

MESHES = {
    "dense": ("dp_shard=4", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2", "dp_shard=2,cp=2"),
    "moe": ("dp_shard=4", "dp_shard=2,tp=2", "dp_shard=2,ep=2", "ep=2,cp=2"),
}
# A tie in routing may flip an expert, and with it a loss, in the MoE model.
TOLERANCE = {"dense": 1e-4, "moe": 1e-3}
Train = Callable[..., Result]


@pytest.fixture(scope="module", params=list(TOLERANCE))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def one(model: str, train: Train) -> Result:
    """The run in one process."""
    return train("--model", model, "--steps", "20", "--single")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "mesh"),
    [(model, mesh) for model, meshes in MESHES.items() for mesh in meshes],
    indirect=["model"],
)
def test_four_ranks_have_the_losses_of_one_process(
    model: str, mesh: str, one: Result, train: Train
) -> None:
    four = train("--model", model, "--steps", "20", "--mesh", mesh, "--no-checks", ranks=4)
    assert len(four.losses) == 20
    assert four.losses == pytest.approx(one.losses, rel=TOLERANCE[model], abs=0)
    assert four.evaluation_loss == pytest.approx(one.evaluation_loss, rel=TOLERANCE[model], abs=0)
    assert one.losses[-1] < one.losses[0] - 0.5


@pytest.mark.ranks
def test_a_loss_on_sharded_logits_is_the_same_loss(model: str, one: Result, train: Train) -> None:
    options = ("--model", model, "--steps", "20", "--mesh", "tp=2", "--loss-parallel")
    two = train(*options, ranks=2)
    assert two.losses == pytest.approx(one.losses, rel=TOLERANCE[model], abs=0)


def test_one_process_has_the_losses_of_the_plain_reference(
    model: str, one: Result, small_run: list[str]
) -> None:
    """The oracle of the test above against a loop that shares model and data with it only."""
    options = parse_options([*small_run, "--model", model, "--steps", "20"])
    assert one.losses == pytest.approx(reference_losses(options), rel=1e-5, abs=0)


def reference_losses(options: Options) -> list[float]:
    assert options.config is not None
    corpus = load_corpus(options.data)
    config = model_config(options.model, vocabulary=256, config_file=options.config)
    model = build_model(config, seed=options.seed)
    named = dict(model.named_parameters())
    matrices = [
        name
        for name, p in named.items()
        if p.ndim >= 2 and "embed" not in name and "lm_head" not in name
    ]
    optimizer = DenseMuon(
        [named[name] for name in matrices],
        [p for name, p in named.items() if name not in matrices],
        weight_decay=options.weight_decay,
        ns_dtype=torch.float32,
    )
    losses = []
    for step in range(options.steps):
        factor = rate_factor(step, warmup=options.warmup, steps=options.steps)
        optimizer.lr = options.lr * factor
        for group in optimizer.adamw.param_groups:
            group["lr"] = options.adamw_lr * factor
        model.zero_grad()
        loss = next_token_loss(model, training_batch(corpus, options, DataParallel(), step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
