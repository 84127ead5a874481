"""The NPU's device, its group options and its collectives, on fake NPUs.

What is shown is that every line for NPUs runs and calls what the real torch_npu has, with the
arguments it takes; what real hardware does with them is not.
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hp_platform import devices, hccl

HERE = Path(__file__).parent


def lines_of(module, wanted):
    """The lines of the module's functions whose qualified names `wanted` accepts."""
    found = set()
    waiting = [compile(Path(module.__file__).read_text(), module.__file__, "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
        if code.co_flags & inspect.CO_OPTIMIZED and wanted(code.co_qualname):
            numbers = {line for _, _, line in code.co_lines() if line}
            found |= numbers - {code.co_firstlineno}
    return found


@pytest.mark.ranks
def test_every_line_for_npus_runs_on_fake_ones():
    done = subprocess.run(
        [sys.executable, str(HERE / "npu_session.py")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = {name: set(numbers) for name, numbers in json.loads(done.stdout).items()}
    ours = lines_of(hccl, lambda name: True)
    assert len(ours) >= 12
    assert ours - ran["hccl.py"] == set()
    driven = lines_of(devices, lambda name: name.startswith("AcceleratorDevice."))
    assert len(driven) >= 17
    assert driven - ran["devices.py"] == set()
