"""The README's example runs and prints what it says."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_it_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(example, {})
    output = printed.getvalue()
    assert "all-gather on tp: (S(1)) -> (R), 6 elements" in output
    assert "reduce-scatter on tp" in output
    for said in re.findall(r"# ([(\[].*[)\]])$", example, re.MULTILINE):
        assert said in output
