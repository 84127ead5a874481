"""Everything a run needs from outside, read and checked before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen
from torch import nn

import hp_planner
from hp_dtensor.plan import ShardingPlan
from hp_integration.checkpoint import Progress, latest_checkpoint, read_progress
from hp_integration.data import Corpus, load_corpus
from hp_integration.errors import InputError
from hp_integration.models import abstract_model, build_model, decoder_layers, model_config
from hp_integration.options import Options, read_command_line, refuse


@frozen(eq=False)
class Inputs:
    """What the options stand for.

    Attributes:
        plan: None for a run in one process.
        resume: the checkpoint to continue from and where it stopped, or None.
    """

    options: Options
    corpus: Corpus
    config: Any
    plan: ShardingPlan | None
    identity: dict[str, Any] = field(init=False)
    resume: tuple[Path, Progress] | None = None

    @identity.default
    def _identity(self) -> dict[str, Any]:
        return run_identity(self.options, self.corpus, self.config)

    @property
    def model_name(self) -> str:
        """The configuration's class without its suffix, such as `Qwen3Moe`."""
        return type(self.config).__name__.removesuffix("Config")

    def make_model(self) -> nn.Module:
        """The unsharded model with its first weights; equal whenever it is called."""
        return build_model(self.config, seed=self.options.seed)


def read_options(argv: Sequence[str] | None, world_size: int) -> Options:
    """The command line, checked for everything that needs no model; files for being there.

    Raises:
        InputError: about all mistakes that were found, a line each.
    """
    options, mistakes = read_command_line(argv, world_size)
    refuse([*mistakes, *_missing_files(options)])
    return options


def _missing_files(options: Options) -> Iterator[str]:
    if options.data is not None and not options.data.is_dir():
        yield f"--data {options.data}: no such folder"
    for name in ("config", "tokenizer", "overrides"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.is_file():
            yield f"--{name} {path}: no such file"


def read_inputs(options: Options) -> Inputs:
    """Reads text, model and plan, and finds the checkpoint to resume from.

    Raises:
        InputError: one line about the first mistake.
    """
    corpus = load_corpus(options.data, options.tokenizer)
    corpus.require(options.seq_len)
    config = model_config(options.model, vocabulary=corpus.vocabulary, config_file=options.config)
    plan = None if options.single else derive_plan(config, options)
    inputs = Inputs(options, corpus, config, plan)
    if not options.resume:
        return inputs
    checkpoint = latest_checkpoint(options.out)
    done = read_progress(checkpoint)
    require_same_run(done.identity, inputs.identity, checkpoint)
    if done.step > options.steps:
        raise InputError(
            f"--resume: {checkpoint} is at step {done.step}, beyond --steps {options.steps}"
        )
    return attrs.evolve(inputs, resume=(checkpoint, done))


def derive_plan(config: Any, options: Options) -> ShardingPlan:
    """The planner's plan for the model on the mesh's axis names and sizes.

    Raises:
        InputError: the model has no place to shard, or planner or overrides refuse it.
    """
    model = abstract_model(config)
    decoder_layers(model)
    try:
        return hp_planner.plan(
            model,
            options.mesh,
            overrides=options.overrides,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
        )
    except (hp_planner.PlanError, OSError) as error:
        raise InputError(f"plan for --model {options.model}: {_one_line(error)}") from None


def run_identity(options: Options, corpus: Corpus, config: Any) -> dict[str, Any]:
    """What two runs must share for one to continue the other."""
    return {
        "--data": corpus.digest,
        "--model": type(config).__name__,
        "--config": _sizes(config),
        "--seed": options.seed,
        "--batch-size": options.batch_size,
        "--seq-len": options.seq_len,
        "--lr": options.lr,
        "--adamw-lr": options.adamw_lr,
        "--weight-decay": options.weight_decay,
        "--warmup": options.warmup,
    }


def require_same_run(saved: Mapping[str, Any], wanted: Mapping[str, Any], checkpoint: Path) -> None:
    """Checks that the checkpoint belongs to a run with these inputs; the mesh may differ.

    Raises:
        InputError: naming the first option that differs.
    """
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise InputError(
                f"--resume: {checkpoint} was made with {name} {saved.get(name)}, "
                f"this run has {value}"
            )


def _sizes(config: Any) -> dict[str, Any]:
    """The configuration's plain values, as JSON would give them back."""
    ignored = {"transformers_version", "dtype", "architectures"}
    values: Callable[[], dict[str, Any]] = config.to_dict
    return {
        name: value
        for name, value in sorted(values().items())
        if name not in ignored and isinstance(value, str | int | float | bool)
    }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
