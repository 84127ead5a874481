"""The table of backends."""

import pytest

from hp_platform.capabilities import GLOO, HCCL, NCCL, TABLE, Uneven, capabilities_of


@pytest.mark.parametrize(
    ("backend", "device_type", "row"),
    [
        ("gloo", "cpu", GLOO),
        ("hccl", "npu", HCCL),
        ("cpu:gloo,cuda:nccl", "cpu", GLOO),
        ("cpu:gloo,cuda:nccl", "cuda", NCCL),
        ("cpu:gloo,cuda:nccl", "npu", None),
        ("mpi", "cpu", None),
    ],
)
def test_a_row_is_found_by_backend_and_device(backend, device_type, row):
    assert capabilities_of(backend, device_type) is row


def test_hccl_is_never_asked_for_uneven_lists():
    assert HCCL.uneven_all_gather is not Uneven.LIST
    assert HCCL.uneven_reduce_scatter is not Uneven.LIST
    assert set(TABLE) == {"gloo", "nccl", "hccl", "fake", "threaded"}
