"""The README's examples run, and the first prints what it says."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor.rules.engine import OperatorError

README = Path(__file__).parents[1] / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_prints_what_it_says() -> None:
    example, _ = examples()
    printed = StringIO()
    with redirect_stdout(printed):
        exec(example, {})
    output = printed.getvalue()
    assert "all-gather on tp: (S(1)) -> (R), 6 elements" in output
    assert "reduce-scatter on tp" in output
    for said in re.findall(r"# ([(\[].*[)\]])$", example, re.MULTILINE):
        assert said in output


@pytest.mark.ranks
def test_the_ci_file_passes() -> None:
    _, ci_file = examples()
    names: dict[str, Any] = {}
    exec(ci_file, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


@pytest.mark.ranks
def test_the_ci_file_fails_for_a_plan_that_forgets_a_sum() -> None:
    _, ci_file = examples()
    planted = ci_file.replace('("input", whole, summed)', '("input", whole, whole)')
    assert planted != ci_file
    names: dict[str, Any] = {}
    exec(planted, names)
    with pytest.raises(OperatorError, match="linear"):
        names["test_the_plan_trains_as_the_dense_model"]()
