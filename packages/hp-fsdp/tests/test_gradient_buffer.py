import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp.gradient_buffer import GradientSlots


@settings(deadline=None)
@given(
    numels=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_views_are_aligned_apart_and_everything_else_is_zero(numels, dtype):
    slots = GradientSlots.of(numels, dtype)
    buffer = slots.allocate(torch.device("cpu"))
    assert buffer.data.data_ptr() % 512 == 0
    assert buffer.data.nbytes % 512 == 0
    assert [view.numel() for view in buffer.views] == numels
    for index, view in enumerate(buffer.views):
        assert view.numel() == 0 or view.data_ptr() % 512 == 0
        view.fill_(index + 1)
    for index, view in enumerate(buffer.views):
        assert (view == index + 1).all()
    assert buffer.data.float().sum() == sum(n * (i + 1) for i, n in enumerate(numels))
