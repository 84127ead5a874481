"""The README's examples run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

from hp_integration.options import parse_options

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={**outside, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "readme" / "latest").exists()
    assert "nats a token" in done.stdout


def test_the_command_lines_are_read_by_hp_train() -> None:
    joined = README.replace("\\\n", " ")
    commands = re.findall(r"-m hp_integration\.train ([^\n\"`]*)", joined)
    assert len(commands) == 3
    assert [parse_options(command.split()).world_size for command in commands] == [4, 8, 8]
