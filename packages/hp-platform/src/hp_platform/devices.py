"""CPU, CUDA and NPU behind one protocol: what the packages need of a device, and no more.

`torch_npu` is looked for with `find_spec`, which runs none of it, and imported only when an
NPU is asked for: where its runtime is missing the import fails, and a failed import leaves
half-loaded modules and a changed environment behind, which are put back as they were.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hp_platform.errors import HPError

_logger = logging.getLogger("hp_platform")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Device(Protocol):
    """What the packages ask of a kind of device."""

    @property
    def type(self) -> str:
        """Device type as in `torch.device`."""

    @property
    def backend(self) -> str:
        """The communication backend's name for `init_process_group`."""

    def is_available(self) -> bool: ...
    def count(self) -> int: ...
    def current(self) -> torch.device: ...
    def set(self, index: int) -> torch.device: ...
    def synchronize(self) -> None: ...
    def stream(self) -> Stream: ...
    def current_stream(self) -> Stream: ...
    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]: ...
    def event(self) -> Event: ...

    def memory_allocated(self) -> int:
        """Bytes in tensors now."""

    def max_memory_allocated(self) -> int:
        """The most bytes in tensors since the start or `reset_peak_memory_stats`."""

    def memory_reserved(self) -> int:
        """Bytes that the allocator holds, free blocks included."""

    def reset_peak_memory_stats(self) -> None: ...

    def get_rng_state(self) -> Tensor:
        """The state of the current device's random numbers, as bytes on the CPU."""

    def set_rng_state(self, state: Tensor) -> None: ...
    def manual_seed(self, seed: int) -> None: ...


class _DoneStream:
    """The CPU's only stream: operations have happened by the time they return."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _DoneEvent:
    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class CpuDevice:
    """The CPU; its streams and events have nothing to wait for."""

    type: str = "cpu"
    backend: str = "gloo"

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def current(self) -> torch.device:
        return torch.device("cpu")

    def set(self, index: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def stream(self) -> Stream:
        return _DoneStream()

    def current_stream(self) -> Stream:
        return _DoneStream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def event(self) -> Event:
        return _DoneEvent()

    # The CPU allocator keeps no counts.
    def memory_allocated(self) -> int:
        return 0

    def max_memory_allocated(self) -> int:
        return 0

    def memory_reserved(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None:
        pass

    def get_rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


@dataclass(frozen=True)
class AcceleratorDevice:
    """CUDA or NPU, through the module PyTorch has registered for the device type."""

    type: str
    backend: str

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def is_available(self) -> bool:
        return bool(self._module.is_available())

    def count(self) -> int:
        return int(self._module.device_count())

    def current(self) -> torch.device:
        return torch.device(self.type, self._module.current_device())

    def set(self, index: int) -> torch.device:
        self._module.set_device(index)
        return self.current()

    def synchronize(self) -> None:
        self._module.synchronize()

    def stream(self) -> Stream:
        return self._module.Stream()

    def current_stream(self) -> Stream:
        return self._module.current_stream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._module.stream(stream)

    def event(self) -> Event:
        return self._module.Event()

    def memory_allocated(self) -> int:
        return int(self._module.memory_allocated())

    def max_memory_allocated(self) -> int:
        return int(self._module.max_memory_allocated())

    def memory_reserved(self) -> int:
        return int(self._module.memory_reserved())

    def reset_peak_memory_stats(self) -> None:
        self._module.reset_peak_memory_stats()

    def get_rng_state(self) -> Tensor:
        return self._module.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)


def device(type: str | None = None) -> Device:
    """The device of that type: "cpu", "cuda" or "npu"; the best one present when omitted.

    Raises:
        HPError: the type is unknown, or not usable on this machine.
    """
    if type is None:
        type = next(kind for kind in ("npu", "cuda", "cpu") if _is_usable(kind))
    if type not in _BACKENDS:
        raise HPError(f"device type {type!r} is unknown; use one of {', '.join(_BACKENDS)}")
    if type == "cpu":
        return CpuDevice()
    if type == "npu":
        _import_torch_npu()
    found = AcceleratorDevice(type, _BACKENDS[type])
    if not found.is_available():
        raise HPError(f"this machine has no usable {type} device; use device('cpu')")
    return found


def has_torch_npu() -> bool:
    """Whether torch_npu is installed; runs none of its code."""
    if "torch_npu" in sys.modules:  # find_spec fails for one that has no spec
        return sys.modules["torch_npu"] is not None
    # A mere folder of that name, which Python would take for a package, has no loader.
    found = importlib.util.find_spec("torch_npu")
    return found is not None and found.origin is not None


def _is_usable(kind: str) -> bool:
    if kind == "npu":
        if not has_torch_npu():
            return False
        try:
            _import_torch_npu()
        except HPError as error:
            _logger.warning("no NPU is used: %s", error)
            return False
        return AcceleratorDevice("npu", "hccl").is_available()
    return kind == "cpu" or torch.cuda.is_available()


def _import_torch_npu() -> None:
    if not has_torch_npu():
        raise HPError("device type 'npu' needs torch_npu: install hp-platform[npu]")
    if "torch_npu" in sys.modules:
        return
    _check_version()
    modules, environment = dict(sys.modules), dict(os.environ)
    getenv = os.getenv
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        for name in set(sys.modules) - set(modules):
            if name.partition(".")[0] in ("torch_npu", "torchnpugen"):
                del sys.modules[name]
        _put_back(environment)
        os.getenv = getenv  # some versions wrap it while they load
        vars(os.environ).pop("get", None)
        importlib.invalidate_caches()
        raise HPError(
            f"torch_npu is installed but cannot be loaded ({error}); install the CANN runtime "
            "that fits it, or use device('cpu')"
        ) from error


def _check_version() -> None:
    """Refuses a torch_npu made for another torch: it would load and fail later."""
    try:
        found = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:  # on the path, but not installed
        return
    ours = torch.__version__
    if _minor(found) != _minor(ours):
        raise HPError(
            f"torch_npu {found} is made for torch {_minor(found)}, this is torch {ours}; install "
            f"torch_npu {_minor(ours)}, or use device('cpu')"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _put_back(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
