"""What `hp-train` can be told, parsed and checked into one frozen value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from attrs import field, frozen

from hp_integration.data_parallel import BATCH_AXES
from hp_integration.errors import InputError
from hp_planner import model_source

# Slowest varying first: replicas on different hosts, tensor parallelism inside one.
MESH_AXES = ("dp_replicate", "dp_shard", "ep", "cp", "tp")
_SEE_HELP = " (hp-train --help lists the options)"
NS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _mesh(value: Mapping[str, int]) -> dict[str, int]:
    """The axes in mesh order; `dp_shard` and `tp` are always there, of size 1 at least."""
    sizes = {"dp_shard": 1, "tp": 1, **value}
    return {axis: sizes[axis] for axis in MESH_AXES if axis in sizes}


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


@frozen
class Options:
    """Every choice of a run. Sizes are global: `batch_size` counts sequences over all ranks.

    Attributes:
        mesh_text: the mesh as the user wrote it, for messages; empty where none was written.
    """

    mesh: dict[str, int] = field(factory=dict, converter=_mesh)
    single: bool = False
    model: str = "moe"
    config: Path | None = field(default=None, converter=_path)
    data: Path | None = field(default=None, converter=_path)
    tokenizer: Path | None = field(default=None, converter=_path)
    steps: int = 60
    batch_size: int = 16
    seq_len: int = 128
    lr: float = 0.02
    adamw_lr: float = 0.005
    weight_decay: float = 0.1
    warmup: int = 10
    ns_dtype: str = "bf16"
    seed: int = 0
    eval_batches: int = 8
    sequence_parallel: bool = True
    loss_parallel: bool = False
    overrides: Path | None = field(default=None, converter=_path)
    checks: bool = True
    out: Path = field(default=Path("runs/train"), converter=Path)
    resume: bool = False
    save_every: int = 0
    log_every: int = 10
    devices_per_host: int | None = None
    mesh_text: str = field(default="", eq=False, repr=False)

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different rows of a batch."""
        return math.prod(self.mesh.get(axis, 1) for axis in BATCH_AXES)

    @property
    def sequence_parts(self) -> int:
        """Into how many parts a layer's hidden states are cut along the sequence."""
        tensor = self.mesh["tp"] if self.sequence_parallel else 1
        return tensor * self.mesh.get("cp", 1)

    def check(self, world_size: int) -> None:
        """Checks everything that needs neither files nor the model.

        Raises:
            InputError: for each mistake a line that names the option, what was found and what is
                needed.
        """
        refuse(self.mistakes(world_size))

    def mistakes(self, world_size: int) -> list[str]:
        """What `check` would refuse, a line each."""
        of_mesh = list(self._of_mesh(world_size))
        # What a mesh must divide is not judged by a wrong one.
        found = [*(of_mesh or self._of_divisions()), *self._of_numbers()]
        if self.ns_dtype not in NS_DTYPES:
            found.append(f"--ns-dtype {self.ns_dtype}: expected one of {', '.join(NS_DTYPES)}")
        return found

    def _of_divisions(self) -> Iterator[str]:
        if self.batch_size > 0 and self.batch_size % self.data_ranks:
            yield (
                f"--batch-size {self.batch_size} sequences cannot be divided evenly over "
                f"{self.data_ranks} data-parallel ranks"
            )
        if self.seq_len > 0 and self.seq_len % self.sequence_parts:
            axes = ", ".join(f"{n}={self.mesh[n]}" for n in ("cp", "tp") if n in self.mesh)
            yield (
                f"--seq-len {self.seq_len} cannot be divided evenly over {axes}; change it or give "
                "--no-sequence-parallel, which leaves it to cp alone"
            )

    def _of_mesh(self, world_size: int) -> Iterator[str]:
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        given = f"--mesh {self.mesh_text or axes}"
        if self.single and self.world_size != 1:
            yield f"--single runs without a mesh, found {given}"
        elif self.world_size != world_size:
            asked = given if self.mesh_text or self.world_size > 1 else "a run without --mesh"
            yield (
                f"{asked} needs {counted(self.world_size, 'rank')}, this run has {world_size}; "
                "start it with torchrun --nproc-per-node or change the mesh"
            )
        if self.devices_per_host is not None and (
            self.devices_per_host < 1 or world_size % self.devices_per_host
        ):
            yield (
                f"--devices-per-host {self.devices_per_host} does not divide "
                f"{counted(world_size, 'rank')}"
            )

    def _of_numbers(self) -> Iterator[str]:
        at_least_one = ("steps", "batch_size", "seq_len", "eval_batches", "log_every")
        for name in at_least_one:
            if getattr(self, name) < 1:
                yield f"{_flag(name)} must be at least 1, found {getattr(self, name)}"
        for name in ("warmup", "save_every", "seed"):
            if getattr(self, name) < 0:
                yield f"{_flag(name)} must not be negative, found {getattr(self, name)}"
        for name in ("lr", "adamw_lr"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"{_flag(name)} must be positive, found {getattr(self, name)}"
        if not 0 <= self.weight_decay < math.inf:
            yield f"--weight-decay must not be negative, found {self.weight_decay}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def refuse(mistakes: Sequence[str]) -> None:
    """Reports all of `mistakes` at once, and returns where there are none.

    Raises:
        InputError: one line for one mistake; else their number, and a line for each.
    """
    if len(mistakes) == 1:
        raise InputError(mistakes[0])
    if mistakes:
        raise InputError("\n  ".join([f"{len(mistakes)} mistakes:", *mistakes]))


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The command line as `Options`, not yet checked against the number of ranks.

    Raises:
        InputError: an option is unknown or has a value of the wrong kind.
    """
    options, mistakes = read_command_line(argv)
    refuse(mistakes)
    return options


def read_command_line(
    argv: Sequence[str] | None, world_size: int | None = None
) -> tuple[Options, list[str]]:
    """The command line as `Options`, and what is wrong with it, a line each.

    Args:
        world_size: also checks the values for that many ranks, all but a mesh that is not readable.

    Raises:
        InputError: a value is of the wrong kind, so that the rest cannot be judged.
    """
    found, unknown = _parser().parse_known_args(argv)
    values, mistakes = vars(found), []
    if unknown:
        mistakes.append(f"unrecognized arguments: {' '.join(unknown)}{_SEE_HELP}")
    text = values.pop("mesh", None)
    try:
        mesh = {} if text is None else parse_mesh(text)
    except InputError as error:
        mistakes.append(str(error))
        # Hosts cannot be judged without the mesh; nothing is run with these options.
        options = Options(**{**values, "devices_per_host": None})
        if world_size is not None:
            mistakes += options.mistakes(options.world_size)
        return options, mistakes
    options = Options(mesh=mesh, mesh_text=text or "", **values)
    if world_size is not None:
        mistakes += options.mistakes(world_size)
    return options, mistakes


def parse_mesh(text: str) -> dict[str, int]:
    """`dp_shard=2,tp=2` as axis sizes.

    Raises:
        InputError: an axis is unknown or repeated, or a size is not a positive whole number.
    """
    try:
        return model_source.parse_mesh(text, MESH_AXES)
    except model_source.UsageError as error:
        raise InputError(str(error)) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as an exception, so that one rank can print it for all."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message + _SEE_HELP)


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = _Parser(
        prog="hp-train",
        description="Train a causal language model over a mesh of ranks: plan, validate, train.",
        epilog="Start it on several ranks with torchrun: "
        "torchrun --standalone --nproc-per-node=4 -m hp_integration.train --mesh dp_shard=2,tp=2",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_layout(parser.add_argument_group("layout"))
    _add_model_and_data(parser.add_argument_group("model and data"), default)
    _add_training(parser.add_argument_group("training"), default)
    _add_output(parser.add_argument_group("output"), default)
    return parser


def _add_layout(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mesh",
        default=argparse.SUPPRESS,
        metavar="AXIS=N,...",
        help=f"axes {', '.join(MESH_AXES)}; their product is the number of ranks",
    )
    group.add_argument(
        "--single",
        action="store_true",
        help="one process without plan or sharding: the run that the others are compared with",
    )
    group.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        default=argparse.SUPPRESS,  # help would call the negated flag's default "True"
        help="exchange whole sequences between layers instead of sequence shards",
    )
    group.add_argument(
        "--loss-parallel",
        action="store_true",
        help="leave logits sharded over the vocabulary and compute the loss on the shards",
    )
    group.add_argument(
        "--overrides", type=Path, metavar="FILE", help="YAML that changes the derived plan"
    )
    group.add_argument(
        "--devices-per-host",
        type=int,
        metavar="N",
        help="declare hosts of N consecutive ranks instead of discovering them",
    )
    group.add_argument(
        "--no-checks",
        dest="checks",
        action="store_false",
        default=argparse.SUPPRESS,  # help would call the negated flag's default "True"
        help="skip the validate-mode step and the gradient check",
    )


def _add_model_and_data(group: argparse._ArgumentGroup, default: Options) -> None:
    group.add_argument(
        "--model",
        default=default.model,
        metavar="NAME",
        help="moe, dense, llama, or any causal LM of transformers by model type or class",
    )
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="JSON values of the model's configuration"
    )
    group.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder of text; without it, the Python standard library's sources",
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizers JSON file; without it, bytes"
    )


def _add_training(group: argparse._ArgumentGroup, default: Options) -> None:
    group.add_argument("--steps", type=int, default=default.steps, help="optimizer steps")
    group.add_argument(
        "--batch-size", type=int, default=default.batch_size, help="sequences a step, all ranks"
    )
    group.add_argument("--seq-len", type=int, default=default.seq_len, help="tokens a sequence")
    group.add_argument("--lr", type=float, default=default.lr, help="Muon's learning rate")
    group.add_argument(
        "--adamw-lr", type=float, default=default.adamw_lr, help="AdamW's learning rate"
    )
    group.add_argument(
        "--weight-decay", type=float, default=default.weight_decay, help="decoupled weight decay"
    )
    group.add_argument(
        "--warmup", type=int, default=default.warmup, help="steps of linear warm-up before cosine"
    )
    group.add_argument(
        "--ns-dtype",
        default=default.ns_dtype,
        metavar="DTYPE",
        help=f"Newton-Schulz runs in: {', '.join(NS_DTYPES)}",
    )
    group.add_argument("--seed", type=int, default=default.seed, help="weights and batches")
    group.add_argument(
        "--eval-batches", type=int, default=default.eval_batches, help="held-out batches"
    )


def _add_output(group: argparse._ArgumentGroup, default: Options) -> None:
    group.add_argument(
        "--out", type=Path, default=default.out, metavar="FOLDER", help="shared by all hosts"
    )
    group.add_argument(
        "--resume", action="store_true", help="continue from the folder's latest checkpoint"
    )
    group.add_argument(
        "--save-every",
        type=int,
        default=default.save_every,
        metavar="N",
        help="also save every N steps (0: only at the end)",
    )
    group.add_argument(
        "--log-every", type=int, default=default.log_every, metavar="N", help="steps between lines"
    )
