"""Devices, and the care taken around an absent or broken torch_npu."""

import os
import sys

import pytest
import torch

from hp_platform import HPError
from hp_platform.devices import device, has_torch_npu

METHODS = """
count current current_stream event is_available memory_allocated set stream synchronize use_stream
"""


def test_the_cpu_answers_everything_without_waiting():
    cpu = device("cpu")
    assert (cpu.type, cpu.backend, cpu.count()) == ("cpu", "gloo", 1)
    assert cpu.current() == cpu.set(0) == torch.device("cpu")
    event, stream = cpu.event(), cpu.stream()
    with cpu.use_stream(stream):
        event.record(stream)
        event.wait(cpu.current_stream())
    stream.wait_event(event)
    stream.wait_stream(cpu.current_stream())
    stream.synchronize()
    cpu.synchronize()
    event.synchronize()
    assert event.query()
    assert cpu.memory_allocated() == 0
    assert all(callable(getattr(cpu, name)) for name in METHODS.split())


def test_an_unknown_or_absent_device_is_refused():
    with pytest.raises(HPError, match="'tpu' is unknown; use one of cpu, cuda, npu"):
        device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(HPError, match="no usable cuda device"):
            device("cuda")
        assert device().type == "cpu"


@pytest.mark.skipif(has_torch_npu(), reason="torch_npu is installed")
def test_without_torch_npu_the_message_names_the_extra():
    with pytest.raises(HPError, match=r"install hp-platform\[npu\]"):
        device("npu")


def test_a_torch_npu_that_cannot_be_loaded_leaves_nothing_behind(tmp_path, monkeypatch):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n"
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import torch_npu.part\n"
        "raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    assert has_torch_npu()
    assert not any(name.startswith("torch_npu") for name in sys.modules)
    with pytest.raises(HPError, match=r"cannot be loaded \(libhccl.so"):
        device("npu")
    assert device().type in ("cpu", "cuda")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
    assert not any(name.startswith("torch_npu") for name in sys.modules)
