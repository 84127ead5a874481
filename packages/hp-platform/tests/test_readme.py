"""The README's example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.ranks
def test_the_example_prints_what_the_readme_shows(tmp_path):
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", README.read_text(), re.S)[:2]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == shown
