"""Devices, and the care taken around an absent or broken torch_npu."""

import os
import sys

import pytest
import torch

from hp_platform import HPError
from hp_platform.devices import AcceleratorDevice, CpuDevice, Device, device, has_torch_npu

METHODS = """
count current current_stream event get_rng_state is_available manual_seed max_memory_allocated
memory_allocated memory_reserved reset_peak_memory_stats set set_rng_state stream synchronize
use_stream
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
    assert cpu.memory_allocated() == cpu.max_memory_allocated() == cpu.memory_reserved() == 0
    cpu.reset_peak_memory_stats()
    assert all(callable(getattr(cpu, name)) for name in METHODS.split())


def test_the_cpus_random_numbers_are_pytorchs():
    cpu = device("cpu")
    before = torch.get_rng_state()
    try:
        cpu.manual_seed(5)
        state, first = cpu.get_rng_state(), torch.rand(3)
        cpu.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), first)
    finally:
        torch.set_rng_state(before)


def test_every_device_answers_all_of_the_protocol():
    asked = {name for name in vars(Device) if not name.startswith("_")}
    for kind in (CpuDevice, AcceleratorDevice):
        offered = {name for name in dir(kind) if not name.startswith("_")}
        assert asked <= offered | set(kind.__annotations__)
    assert set(METHODS.split()) | {"type", "backend"} == asked


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


def broken_torch_npu(folder, last_line):
    """A package that changes what a real one changes while it loads, and then fails."""
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n"
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "os.environ['KEPT_VARIABLE'] = 'changed'\n"
        "os.environ.pop('REMOVED_VARIABLE')\n"
        "os.getenv = os.environ.get = lambda *rest: None\n"
        "import torch_npu.part\n"
        f"{last_line}\n"
    )
    (package / "part.py").write_text("")


@pytest.mark.parametrize(
    "last_line",
    [
        "raise ImportError('libhccl.so: cannot open shared object file')",
        "raise OSError('libhccl.so: undefined symbol')",
        "import torch_npu.absent",
        "torch_npu.part.absent",
        "raise RuntimeError('two accelerators')",
    ],
)
def test_a_torch_npu_that_cannot_be_loaded_leaves_nothing_behind(
    tmp_path, monkeypatch, caplog, last_line
):
    broken_torch_npu(tmp_path, last_line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("KEPT_VARIABLE", "as it was")
    monkeypatch.setenv("REMOVED_VARIABLE", "there")
    assert has_torch_npu()
    modules, environment, getenv = dict(sys.modules), dict(os.environ), os.getenv
    with pytest.raises(HPError, match="torch_npu is installed but cannot be loaded"):
        device("npu")
    assert device().type in ("cpu", "cuda")
    assert "no NPU is used: torch_npu is installed but cannot be loaded" in caplog.text
    assert dict(os.environ) == environment
    assert os.getenv is getenv
    assert os.environ.get("KEPT_VARIABLE") == os.getenv("KEPT_VARIABLE") == "as it was"
    assert dict(sys.modules) == modules


def test_a_torch_npu_for_another_torch_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was loaded')\n")
    metadata = tmp_path / "torch_npu-1.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.11.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    minor = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(HPError, match=rf"made for torch 1\.11, .* install torch_npu {minor}"):
        device("npu")


def test_a_folder_or_module_of_that_name_is_not_taken_for_torch_npu(tmp_path, monkeypatch):
    (tmp_path / "torch_npu").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_torch_npu()
    assert device().type in ("cpu", "cuda")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert not has_torch_npu()
