"""The script in the root README runs as it is printed there."""

import re
from pathlib import Path

import pytest
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once here, not in every rank)

from hp_platform.testing import run_ranks

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.ranks
def test_the_script_in_the_readme_lowers_the_loss_on_every_rank() -> None:
    [script] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

    def body() -> list[float]:
        names: dict[str, object] = {}
        exec(compile(script, "README.md", "exec"), names)
        return names["losses"]  # type: ignore[return-value]

    for losses in run_ranks(body, 4, timeout=240):
        assert losses[-1] < losses[0] - 0.2, losses
