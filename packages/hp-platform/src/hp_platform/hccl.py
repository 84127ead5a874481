"""What HCCL, the NPUs' communication library, wants to be told: data, and one function.

Nothing here has run on an NPU. Alignment is `buffers.ALIGNMENT`, which is HCCL's 512 bytes;
the operations it lacks or does differently are its row in `capabilities`.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from hp_platform.errors import HPError

DEFAULT_BUFFER_MEGABYTES = 200
"""HCCL's own default for `HCCL_BUFFSIZE`."""


@dataclass(frozen=True)
class HcclGroupOptions:
    """Options of one communicator.

    Attributes:
        name: the communicator's name in the library's logs; "" for none.
        buffer_megabytes: size of each of its two buffers; None for `HCCL_BUFFSIZE`. Every
            communicator takes twice this of device memory, so small groups want small ones.
    """

    name: str = ""
    buffer_megabytes: int | None = None

    def __post_init__(self) -> None:
        if self.buffer_megabytes is not None and self.buffer_megabytes < 1:
            raise HPError(f"an HCCL buffer needs at least 1 MB, got {self.buffer_megabytes}")

    @property
    def memory_bytes(self) -> int:
        """Device memory that the communicator takes."""
        configured = int(os.environ.get("HCCL_BUFFSIZE", str(DEFAULT_BUFFER_MEGABYTES)))
        return 2 * (self.buffer_megabytes or configured) * 2**20

    def as_config(self) -> dict[str, int | str]:
        """The entries of the backend's `hccl_config`."""
        config: dict[str, int | str] = {}
        if self.buffer_megabytes is not None:
            config["hccl_buffer_size"] = self.buffer_megabytes
        if self.name:
            config["group_name"] = self.name
        return config


def process_group_options(options: HcclGroupOptions) -> Any:
    """The object to pass as `pg_options` when a group on NPUs is made.

    Raises:
        HPError: torch_npu is not loaded; ask `devices.device("npu")` first.
    """
    if "torch_npu" not in sys.modules:
        raise HPError(
            "HCCL options need torch_npu, which is not loaded; call "
            'hp_platform.devices.device("npu") first'
        )
    backend = importlib.import_module("torch_npu._C._distributed_c10d")
    result = backend.ProcessGroupHCCL.Options()
    result.hccl_config = options.as_config()
    return result
