import resource

import pytest
import torch

from hp_fsdp import pages
from hp_fsdp.full_buffer import Arena, FullBuffer
from hp_fsdp.pages import PagePool, Region

CPU = torch.device("cpu")
PAGE = 4096


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def test_a_buffer_takes_the_pages_that_others_left():
    pool, numel = PagePool(), 4 << 20
    first, second = (FullBuffer(numel, torch.float32, CPU) for _ in range(2))
    first.hold(pool).fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for released, held in 3 * ((first, second), (second, first)):
        released.release(pool)
        held.hold(pool).fill_(2.0)
        assert held.data[::1000].eq(2.0).all()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 500  # of 6 * 4096 pages
    assert pool.nbytes == 0


@pytest.mark.parametrize("sizes", [(1, 5, 3, 9), (9, 1, 1, 4), (2, 2, 2, 12)])
def test_pages_of_buffers_of_any_size_are_put_together(sizes):
    pool = PagePool()
    buffers = [FullBuffer(size * 1024, torch.float32, CPU) for size in sizes]
    for value, buffer in enumerate(buffers[:-1]):
        buffer.hold(pool).fill_(value)
    for buffer in buffers[:-1]:
        buffer.release(pool)
    left = pool.nbytes
    buffers[-1].hold(pool).fill_(7.0)
    assert (buffers[-1].data == 7.0).all()
    assert pool.nbytes == max(left - sizes[-1] * PAGE, 0)
    for buffer in buffers[:-1]:
        assert (buffer.hold(pool).fill_(3.0) == 3.0).all()
    assert pool.nbytes == 0
    assert (buffers[-1].data == 7.0).all()


def test_without_a_way_to_move_pages_they_go_back_to_the_system(monkeypatch):
    monkeypatch.setattr(pages, "_mover", lambda: None)
    pool, region = PagePool(), Region(16 << 20)
    before = resident()
    torch.frombuffer(region.memory, dtype=torch.uint8).fill_(1)
    assert resident() - before > 12e6
    pool.leave(region)
    assert pool.nbytes == 0
    assert resident() - before < 4e6


def test_clearing_a_pool_gives_its_pages_back():
    pool, buffer = PagePool(), FullBuffer(4 << 20, torch.float32, CPU)
    before = resident()
    buffer.hold(pool).fill_(1.0)
    buffer.release(pool)
    assert pool.nbytes == 16 << 20
    pool.clear()
    assert resident() - before < 4e6


def test_an_arena_is_there_while_any_part_is_held():
    arena, pool = Arena(CPU), PagePool()
    parts = [arena.reserve(100, torch.float32), arena.reserve(33, torch.bfloat16)]
    for part in parts:
        assert part.hold(pool).data_ptr() % 512 == 0
        part.data.fill_(2)
    parts[0].release(pool)
    parts[0].release(pool)
    assert pool.nbytes == 0
    assert (parts[1].data == 2).all()
    parts[1].release(pool)
    assert pool.nbytes == PAGE
    with pytest.raises(RuntimeError):
        arena.reserve(1, torch.float32)
