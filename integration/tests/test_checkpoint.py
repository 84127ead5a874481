"""A checkpoint is there whole or not at all, and `latest` names a finished one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hp_integration import checkpoint as module
from hp_integration.checkpoint import (
    Progress,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from hp_integration.errors import InputError
from hp_integration.world import World, process_group


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group() as world:
        yield world


def progress(step: int) -> Progress:
    return Progress(step, [1.5] * step, {"--seed": 3})


def test_what_was_saved_is_loaded_in_place(tmp_path: Path, world: World) -> None:
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "schedule": {"last_epoch": 4}}
    path = save_checkpoint(tmp_path, progress(4), state, world)
    loaded = {"model": {"w": torch.zeros(2, 3)}, "schedule": {"last_epoch": 0}}
    load_checkpoint(path, loaded)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    assert loaded["schedule"] == {"last_epoch": 4}
    assert read_progress(path) == progress(4)


def test_latest_names_the_last_one_saved(tmp_path: Path, world: World) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, progress(step), {"w": torch.ones(1)}, world)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000002"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000002"]


def test_saving_a_step_again_replaces_it(tmp_path: Path, world: World) -> None:
    for value in (1.0, 2.0):
        path = save_checkpoint(tmp_path, progress(1), {"w": torch.full((1,), value)}, world)
    state = {"w": torch.zeros(1)}
    load_checkpoint(path, state)
    assert state["w"].item() == 2.0


def test_a_run_that_dies_while_saving_leaves_the_last_checkpoint(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save_checkpoint(tmp_path, progress(1), {"w": torch.ones(1)}, world)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("disk is gone")

    monkeypatch.setattr(module, "save", die)
    with pytest.raises(RuntimeError, match="disk is gone"):
        save_checkpoint(tmp_path, progress(2), {"w": torch.ones(1)}, world)
    assert latest_checkpoint(tmp_path) == good
    assert not (tmp_path / "step-000002").exists()


def test_leftovers_of_a_dead_save_do_not_get_into_the_next_one(
    tmp_path: Path, world: World
) -> None:
    (tmp_path / "step-000001.partial").mkdir()
    (tmp_path / "step-000001.partial" / "old.distcp").write_text("old")
    path = save_checkpoint(tmp_path, progress(1), {"w": torch.ones(1)}, world)
    assert not (path / "old.distcp").exists()


def test_a_folder_without_a_finished_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no checkpoint"):
        latest_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step-000009\n")
    with pytest.raises(InputError, match="'step-000009', which is no checkpoint"):
        latest_checkpoint(tmp_path)


def test_a_damaged_progress_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(InputError, match="cannot read"):
        read_progress(tmp_path)
