import re
from pathlib import Path

import pytest

from hp_platform.testing import run_ranks

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.ranks
def test_the_example_in_the_readme_runs():
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"__name__": "readme"}
    exec(compile(source, str(README), "exec"), names)
    summary = run_ranks(names["train"], 4)[0]
    for operation, count in (("all_gather", 10), ("reduce_scatter", 4), ("all_reduce", 2)):
        found = re.findall(rf"{operation} +(\d+) ", summary)
        assert sum(map(int, found)) == count, summary
