"""Checkpoints: a folder a step, written whole or not at all, readable on any mesh.

A checkpoint is written to `step-N.partial` by torch.distributed.checkpoint, renamed to `step-N`
when every rank has finished, and only then named by the file `latest`. A run that dies while
saving leaves the previous checkpoint in place.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from attrs import asdict, frozen
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hp_integration.errors import InputError
from hp_integration.world import World

_LATEST = "latest"
_PROGRESS = "progress.json"


@frozen
class Progress:
    """Where a run stands, beside its tensors.

    Attributes:
        step: optimizer steps taken; the data's position too, as batches follow from it.
        losses: of every step so far.
        identity: the inputs that a continuing run must share, by option.
    """

    step: int
    losses: list[float]
    identity: dict[str, Any]


def save_checkpoint(folder: Path, progress: Progress, state: dict[str, Any], world: World) -> Path:
    """Saves `state` and `progress`; every rank calls it together.

    Args:
        folder: the run's folder, shared by all ranks.
        state: tensors by name, nested at will; sharded ones say which part they hold.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"step-{progress.step:06d}"
    partial = final.with_suffix(".partial")
    if world.is_leader:
        shutil.rmtree(partial, ignore_errors=True)
    world.barrier()
    save(state, storage_writer=FileSystemWriter(partial))
    world.barrier()
    if world.is_leader:
        (partial / _PROGRESS).write_text(json.dumps(asdict(progress)))
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        _write_latest(folder, final.name)
    world.barrier()
    return final


def load_checkpoint(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fills the tensors of `state` in place; values that are no tensors are replaced in it."""
    load(state, storage_reader=FileSystemReader(checkpoint))


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint that the file `latest` names.

    Raises:
        InputError: the folder holds no finished checkpoint.
    """
    try:
        name = (folder / _LATEST).read_text().strip()
    except OSError:
        raise InputError(f"--resume: {folder} holds no checkpoint (no file {_LATEST!r})") from None
    checkpoint = folder / name
    if not (checkpoint / _PROGRESS).is_file():
        raise InputError(f"--resume: {folder / _LATEST} names {name!r}, which is no checkpoint")
    return checkpoint


def read_progress(checkpoint: Path) -> Progress:
    """What `save_checkpoint` wrote beside the tensors.

    Raises:
        InputError: the file is damaged.
    """
    path = checkpoint / _PROGRESS
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--resume: cannot read {path}: {error}") from None


def _write_latest(folder: Path, name: str) -> None:
    """Replaces `latest` in one step, so a reader sees the old name or the new one."""
    temporary = folder / f".{_LATEST}.partial"
    temporary.write_text(name + "\n")
    os.replace(temporary, folder / _LATEST)
