"""HCCL options as data, and the backend's class driven through a stand-in."""

import sys
import types

import pytest

from hp_platform import HPError
from hp_platform.hccl import HcclGroupOptions, process_group_options


def test_a_communicator_costs_two_buffers(monkeypatch):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert HcclGroupOptions().memory_bytes == 2 * 200 * 2**20
    assert HcclGroupOptions(buffer_megabytes=16).memory_bytes == 2 * 16 * 2**20
    monkeypatch.setenv("HCCL_BUFFSIZE", "50")
    assert HcclGroupOptions().memory_bytes == 2 * 50 * 2**20
    with pytest.raises(HPError, match="at least 1 MB, got 0"):
        HcclGroupOptions(buffer_megabytes=0)


def test_only_options_that_were_given_are_passed_on():
    assert HcclGroupOptions().as_config() == {}
    options = HcclGroupOptions("dp_shard", 64)
    assert options.as_config() == {"hccl_buffer_size": 64, "group_name": "dp_shard"}


def test_the_backends_options_object_gets_the_configuration(monkeypatch):
    with pytest.raises(HPError, match=r"device\(\"npu\"\)"):
        process_group_options(HcclGroupOptions())

    class ProcessGroupHCCL:
        class Options:
            hccl_config: dict

    for name in ("torch_npu", "torch_npu._C", "torch_npu._C._distributed_c10d"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torch_npu._C._distributed_c10d"].ProcessGroupHCCL = ProcessGroupHCCL
    options = process_group_options(HcclGroupOptions("tp", 32))
    assert options.hccl_config == {"hccl_buffer_size": 32, "group_name": "tp"}
