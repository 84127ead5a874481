"""The README's example runs, and its override file is one."""

import re
import subprocess
import sys
from pathlib import Path

from hp_planner.override_file import read_overrides

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_prints_what_the_readme_shows(tmp_path):
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", README, re.S)[:2]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == shown


def test_the_override_file_is_read(tmp_path):
    path = tmp_path / "overrides.yaml"
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    path.write_text(text)
    assert [override.key for override in read_overrides(path)] == [
        "lm_head",
        "*.mlp",
        "model.layers.0.extra_scale",
        "*.attn",
    ]
