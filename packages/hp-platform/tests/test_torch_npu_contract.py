"""Every name, argument and method that hp-platform asks of torch_npu exists in the real wheels.

The everyday tests compare with what `torch_npu_wheel.py` has written down of the wheels; the
slow ones download the wheels and read them again. No wheel is installed, and none is run but
to see it fail.
"""

import inspect
import os
import re
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.distributed as dist
from torch_npu_uses import ROOT, UnseenUseError, uses
from torch_npu_wheel import Wheel, download, recorded

import hp_platform

VERSIONS = ("2.13.0", "2.14.0")

# PyTorch's names of group methods that differ from those of the backend's class.
BACKEND_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "recv_anysource": "recvAnysource",
    "reduce_scatter_single": "_reduce_scatter_base",
}


def accepts(parameters, positional, keywords):
    """Whether a call fits the parameters written down of a function."""
    places = [name for name, kind, _ in parameters if kind == "positional"]
    takes_any = {kind for _, kind, _ in parameters}
    if positional > len(places) and "star" not in takes_any:
        return False
    known = {name for name, kind, _ in parameters if kind in ("positional", "keyword")}
    if not set(keywords) <= known and "double star" not in takes_any:
        return False
    given = set(places[:positional]) | set(keywords)
    required = {n for n, kind, default in parameters if not default and kind != "star"}
    return required <= given


def group_methods(function):
    """The methods of a process group that a function of torch.distributed calls."""
    source = inspect.getsource(inspect.unwrap(getattr(dist, function)))
    return set(re.findall(r"= group\.(\w+)\(|return group\.(\w+)\(", source))


def unmet(asked, wheel):
    """What is asked for and not there, one line each."""
    found = []
    for name, positional, keywords in sorted(asked.calls, key=str):
        parameters = wheel["functions"].get(name)
        if parameters is None and name in wheel["classes"]:
            parameters = wheel["classes"][name].get("__new__", [])
        if parameters is None:
            found.append(f"torch_npu.npu.{name} does not exist")
        elif not accepts(parameters, positional, keywords):
            found.append(f"torch_npu.npu.{name} does not take {positional}, {set(keywords)}")
    for kind, method, names in sorted(asked.methods):
        parameters = wheel["classes"].get(kind, {}).get(method)
        if parameters is None:
            found.append(f"torch_npu.npu.{kind}.{method} does not exist")
        elif [name for name, _, _ in parameters][: len(names)] != list(names):
            found.append(f"torch_npu.npu.{kind}.{method} does not take {names}")
    for chain, positional, keywords in sorted(asked.compiled):
        if chain not in wheel["options class"] or positional or keywords:
            found.append(f"{chain} with {positional} arguments is not known")
    found += [f"options have no {f}" for f in asked.fields - set(wheel["options fields"])]
    found += [f"no configuration {key}" for key in asked.keys - set(wheel["configuration keys"])]
    for function in asked.collectives & set(wheel["replaced"]):
        if not accepts(wheel["replaced"][function], 1, ()):
            found.append(f"torch_npu's own {function} takes other arguments")
    for function in sorted(asked.collectives):
        for method in {"".join(pair) for pair in group_methods(function)}:
            if BACKEND_METHODS.get(method, method) not in wheel["group methods"]:
                found.append(f"ProcessGroupHCCL has no {method}, for {function}")
    registrations = " ".join(wheel["backend registrations"] + wheel["group registrations"])
    for text in (
        "torch._register_device_module('npu', torch_npu.npu)",
        "torch.utils.rename_privateuse1_backend('npu')",
        "register_backend('hccl'",
        "devices=['npu']",
    ):
        if text not in registrations:
            found.append(f"no {text}")
    minor = ".".join(wheel["version"].split(".")[:2])
    if not any(f"torch=={minor}." in line for line in wheel["requires"]):
        found.append(f"it requires {wheel['requires']}, not torch {minor}")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_is_asked_for_was_in_the_wheel_when_it_was_read(version):
    assert unmet(uses(), recorded(version)) == []


def test_the_list_of_what_is_asked_for_is_not_empty_anywhere():
    asked = uses()
    names = {name for name, _, _ in asked.calls}
    assert names == {
        "Event", "Stream", "current_device", "current_stream", "device_count", "get_rng_state",
        "is_available", "is_initialized", "manual_seed", "max_memory_allocated",
        "memory_allocated", "memory_reserved", "reset_peak_memory_stats", "set_device",
        "set_rng_state", "stream", "synchronize",
    }  # fmt: skip
    assert {kind for kind, _, _ in asked.methods} == {"Stream", "Event"}
    assert asked.modules == {"torch_npu", "torch_npu._C._distributed_c10d"}
    assert asked.compiled == {("torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options", 0, 0)}
    assert asked.fields == {"hccl_config"}
    assert asked.keys == {"hccl_buffer_size", "group_name"}
    assert {"all_reduce", "broadcast", "reduce", "all_to_all_single", "batch_isend_irecv"} <= (
        asked.collectives
    )
    assert {"all_gather", "reduce_scatter", "isend", "irecv"} <= asked.collectives
    methods = {"".join(pair) for name in asked.collectives for pair in group_methods(name)}
    backend = {BACKEND_METHODS.get(method, method) for method in methods}
    assert {"allreduce", "broadcast", "reduce", "send", "recv", "alltoall_base"} <= backend
    assert {"_allgather_base", "_reduce_scatter_base", "allgather", "reduce_scatter"} <= backend


@pytest.mark.parametrize(
    ("file", "before", "after", "complaint"),
    [
        ("devices.py", "_module.synchronize()", "_module.sync_all()", "npu.sync_all does not"),
        ("devices.py", "_module.set_device(index)", "_module.set_device()", "does not take 0"),
        ("devices.py", "def wait_event(self, event: Any)", "def wait_event(self, e: Any)", "take"),
        ("devices.py", "def query(self) -> bool: ...", "def ready(self) -> bool: ...", "ready"),
        ("hccl.py", "ProcessGroupHCCL.Options()", "ProcessGroupHCCL.Settings()", "not known"),
        ("hccl.py", "result.hccl_config =", "result.config =", "options have no config"),
        ("hccl.py", '"hccl_buffer_size"', '"hccl_buffsize"', "no configuration hccl_buffsize"),
    ],
)
def test_a_use_of_what_is_not_in_the_wheel_is_noticed(tmp_path, file, before, after, complaint):
    for path in ROOT.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    changed = (tmp_path / file).read_text()
    assert before in changed
    (tmp_path / file).write_text(changed.replace(before, after, 1))
    assert any(complaint in line for line in unmet(uses(tmp_path), recorded("2.13.0")))


@pytest.mark.parametrize(
    "line",
    [
        "        module = self._module\n        return module.anything_at_all",
        "        return getattr(self._module, 'anything')()",
        "        import torch_npu",
        "        return torch.npu.anything()",
        "        backend = importlib.import_module('torch_npu.npu')\n        return backend",
    ],
)
def test_a_use_that_the_contract_cannot_see_is_refused(tmp_path, line):
    source = (ROOT / "devices.py").read_text()
    planted = f"    def planted(self):\n{line}\n\n    def synchronize(self)"
    head, found, tail = source.rpartition("    def synchronize(self)")
    assert found
    (tmp_path / "devices.py").write_text(head + planted + tail)
    with pytest.raises(UnseenUseError, match=r"devices\.py"):
        uses(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_real_wheel_is_as_it_was_written_down(version):
    extract = wheel_of(version).extract()
    assert unmet(uses(), extract) == []
    assert extract == recorded(version)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_real_package_without_its_runtime_is_refused_and_leaves_nothing(version, tmp_path):
    """The wheel's files on the path, in a process of their own, where CANN is not installed."""
    wheel_of(version)
    with zipfile.ZipFile(download(version)) as archive:
        archive.extractall(tmp_path)
    code = """
import os, sys, torch
from hp_platform.devices import device, has_torch_npu
from hp_platform.errors import HPError
modules, environment, getenv = set(sys.modules), dict(os.environ), os.getenv
sys.path.insert(0, sys.argv[1])
assert has_torch_npu()
try:
    device("npu")
except HPError as error:
    print(error)
new = {name for name in set(sys.modules) - modules if "npu" in name}
assert not new and dict(os.environ) == environment and os.getenv is getenv, new
assert device().type in ("cpu", "cuda")
"""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    same = torch.__version__.startswith(version.rpartition(".")[0])
    assert ("cannot be loaded (libhccl.so" if same else "is made for torch 2.14") in done.stdout


def wheel_of(version):
    try:
        return Wheel(download(version))
    except (ConnectionError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the package index does not give torch_npu {version}: {error}")


def test_the_extra_admits_the_torch_npu_of_every_torch_we_admit():
    text = (ROOT.parents[1] / "pyproject.toml").read_text()
    torch_range = re.search(r'"torch(>=[^"]+)"', text).group(1)
    npu_range = re.search(r'npu = \["torch_npu(>=[^"]+)"\]', text).group(1)
    assert torch_range == npu_range
    assert hp_platform.__name__ == "hp_platform"
