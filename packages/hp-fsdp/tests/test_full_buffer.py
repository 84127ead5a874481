import pytest
import torch

from hp_fsdp.full_buffer import FullBuffer


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_views_stay_valid_over_release_and_the_address_never_changes():
    buffer = FullBuffer(1000, torch.float32, torch.device("cpu"))
    view = buffer.data.data[:600].view(20, 30)
    address = buffer.data.data_ptr()
    assert address % 512 == 0
    for value in (1.0, 2.0):
        buffer.hold().fill_(value)
        assert torch.equal(view, torch.full((20, 30), value))
        buffer.release()
        assert not buffer.is_held
    assert buffer.data.data_ptr() == address
    assert view._version == 0


def test_release_gives_the_memory_back_to_the_system():
    buffer = FullBuffer(16 << 20, torch.float32, torch.device("cpu"))
    before = resident()
    buffer.hold().fill_(1.0)
    assert resident() - before > 60e6
    buffer.release()
    assert resident() - before < 8e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_type_and_no_elements_at_all(dtype):
    assert FullBuffer(3, dtype, torch.device("cpu")).hold().dtype == dtype
    empty = FullBuffer(0, dtype, torch.device("cpu"))
    assert empty.hold().numel() == 0
    empty.release()
