"""The picture is a PNG, with or without recorded communication."""

from pathlib import Path

import pytest
import torch

from hp_integration.plot import save_picture
from hp_platform.ledger import Origin, Record
from hp_platform.topology import Tier


def record(index: int, operation: str, tier: Tier) -> Record:
    return Record(
        index,
        operation,
        "tp",
        2,
        tier,
        1024,
        True,
        torch.float32,
        Origin("test"),
        0.1 * index,
        index,
    )


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0, "all_gather", Tier.FAST), record(1, "a_new_operation", Tier.SLOW)],
    ],
)
def test_a_run_becomes_a_png(records: list[Record], tmp_path: Path) -> None:
    path = save_picture(
        tmp_path / "run.png",
        losses=[(1, 5.0), (2, 4.0)],
        evaluation=(2, 4.1),
        frequency_loss=3.3,
        records=records,
        title="test",
    )
    assert path.read_bytes().startswith(b"\x89PNG")
