"""The README's example runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_learns(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert "Muon step plan" in printed
    assert "1 parameter, local: 1 matrix;" in printed
    assert names["loss"].item() < 3.0
