"""A run small enough to repeat on many meshes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_integration.models import abstract_model, model_config
from hp_integration.plot import save_picture
from hp_integration.train import Result, run
from hp_integration.world import World
from hp_platform.testing import run_ranks

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
Train = Callable[..., Result]


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Loads what a run imports late, once here instead of once in every forked rank."""
    for name in ("moe", "dense", "llama"):
        abstract_model(model_config(name, vocabulary=256))
    save_picture(
        tmp_path_factory.mktemp("picture") / "run.png",
        losses=[(1, 1.0)],
        evaluation=None,
        frequency_loss=1.0,
        records=[],
        title="",
    )


@pytest.fixture(scope="session")
def small_run(imported: None, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small run in fp32 throughout, over text in a folder."""
    folder = tmp_path_factory.mktemp("inputs")
    config, text = folder / "config.json", folder / "text"
    config.write_text(json.dumps(TINY))
    text.mkdir()
    source = Path(json.__file__).with_name("decoder.py").read_text()
    (text / "source.txt").write_text(source)
    return [
        *("--config", str(config), "--data", str(text), "--batch-size", "8", "--seq-len", "32"),
        *("--warmup", "4", "--eval-batches", "2", "--ns-dtype", "fp32"),
    ]


@pytest.fixture(scope="session")
def train(small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs `hp-train` on forked ranks, in a new folder where none is given."""

    def start(*options: str, ranks: int = 1, out: Path | None = None) -> Result:
        folder = out or tmp_path_factory.mktemp("run")
        arguments = [*small_run, "--out", str(folder), *options]
        results = run_ranks(lambda: run(arguments, World.current()), ranks, timeout=200)
        assert all(result == results[0] for result in results)
        return results[0]

    return start
