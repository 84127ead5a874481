"""Aligned buffers and their layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_platform import ALIGNMENT, BufferLayout, HPError, aligned_empty, pad_to_alignment

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])


@given(st.integers(0, 5000), DTYPES)
def test_a_buffer_starts_on_a_boundary_and_has_the_size_asked_for(numel, dtype):
    tensor = aligned_empty(numel, dtype, "cpu")
    assert tensor.data_ptr() % ALIGNMENT == 0
    assert tensor.shape == (numel,)
    assert tensor.is_contiguous()


@given(st.integers(0, 5000), DTYPES)
def test_padding_is_the_least_that_fills_whole_units(numel, dtype):
    padded = pad_to_alignment(numel, dtype)
    assert padded * dtype.itemsize % ALIGNMENT == 0
    assert 0 <= (padded - numel) * dtype.itemsize < ALIGNMENT


@given(st.lists(st.integers(0, 300), max_size=6), DTYPES)
def test_parts_are_aligned_disjoint_and_padded_with_zeros(numels, dtype):
    layout = BufferLayout.of(numels, dtype)
    buffer = layout.allocate("cpu")
    views = layout.views(buffer, [(numel,) for numel in numels])
    assert layout.total * dtype.itemsize % ALIGNMENT == 0
    for view in views:
        assert view.data_ptr() % ALIGNMENT == 0 or view.numel() == 0
        view.fill_(1)
    assert int(buffer.long().sum()) == sum(numels)


def test_views_share_memory_with_the_buffer():
    layout = BufferLayout.of([6, 4], torch.float32)
    buffer = layout.allocate("cpu")
    first, second = layout.views(buffer, [(2, 3), (4,)])
    first.fill_(1)
    second.fill_(2)
    assert buffer[:6].tolist() == [1.0] * 6
    assert buffer[128:132].tolist() == [2.0] * 4


def test_a_buffer_or_shapes_of_another_layout_are_refused():
    layout = BufferLayout.of([6], torch.float32)
    with pytest.raises(HPError, match="128 elements"):
        layout.views(torch.zeros(6), [(6,)])
    with pytest.raises(HPError, match="do not fit"):
        layout.views(layout.allocate("cpu"), [(5,)])
    with pytest.raises(HPError, match="-1 elements"):
        aligned_empty(-1, torch.float32, "cpu")


def test_buffers_can_be_planned_on_the_meta_device():
    assert aligned_empty(10, torch.float32, "meta").shape == (10,)
