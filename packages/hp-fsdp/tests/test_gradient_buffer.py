import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp.gradient_buffer import GradientSlots
from hp_fsdp.gradient_places import GradientPlaces, before_accumulation


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


def test_gradients_lie_in_their_places_and_everything_else_is_zero():
    buffer = torch.full((20,), float("nan"))
    # In any order, with a gap in the middle and one at the end.
    places = GradientPlaces.of(buffer, [buffer[8:14].view(2, 3), buffer[:5], buffer[14:17]])
    gradient, elsewhere = torch.ones(2, 3), torch.full((5,), 2.0)
    with torch.no_grad():
        kept = places.land(0, gradient)
        assert kept.data_ptr() == buffer[8:].data_ptr()
        places.complete([(0, kept), (1, elsewhere)], clear=True)
        expected = torch.tensor([2.0] * 5 + [0.0] * 3 + [1.0] * 6 + [0.0] * 6)
        assert torch.equal(buffer, expected)
        # What earlier backwards have left stays where this one has nothing.
        places.complete([(0, gradient + 4)], clear=False)
        expected[8:14] = 5.0
        assert torch.equal(buffer, expected)
        assert places.land(0, gradient.to_sparse()) is None
    assert places.land(0, gradient) is None


def test_only_what_autograd_accumulates_is_replaced_and_nothing_once_the_owner_is_gone():
    class Owner:
        pass

    leaf, owner = torch.ones(2, requires_grad=True), Owner()
    node = before_accumulation(leaf, owner, lambda _, gradient: gradient * 2)
    (found,) = torch.autograd.grad((leaf * 3).sum(), leaf)
    assert found.tolist() == [3.0, 3.0]
    (leaf * 3).sum().backward()
    assert leaf.grad.tolist() == [6.0, 6.0]
    del owner
    (leaf * 3).sum().backward()
    assert leaf.grad.tolist() == [9.0, 9.0]
    assert node is not None
