"""Tensors that a backend would misread, corrupt or crash on are refused before the call."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # imported here, not in every rank

from hp_platform import (
    CollectiveError,
    MeshAxis,
    Receive,
    Send,
    Tier,
    all_gather,
    all_reduce,
    all_reduce_fused,
    all_to_all,
    broadcast,
    exchange,
    reduce_scatter,
)

# Nothing may reach the group, for it is none.
AXIS = MeshAxis(
    "dp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"), process_group=object(), backend="gloo"
)


class Named(torch.Tensor):
    """A subclass that leaves its operations to PyTorch."""


def freed():
    """A tensor as sharded data parallelism leaves it between its uses."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(4)


def in_inference_mode():
    with torch.inference_mode():
        return torch.ones(4)


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized():
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


CALLS = [
    lambda tensor: all_reduce(tensor, AXIS),
    lambda tensor: all_gather(tensor, AXIS),
    lambda tensor: broadcast(tensor, AXIS, source=0),
    lambda tensor: reduce_scatter(tensor, AXIS),
    lambda tensor: all_to_all(tensor, AXIS),
    lambda tensor: all_reduce_fused([torch.ones(4), tensor], AXIS),
    lambda tensor: exchange([Send(tensor, 1), Receive(torch.ones(4), 1)], AXIS),
    lambda tensor: exchange([Send(torch.ones(4), 1), Receive(tensor, 1)], AXIS),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (freed, "the tensor has no memory: its storage was freed"),
        (fake, "a FakeTensor handles operations itself and may have no memory"),
        (nested, "a nested tensor cannot be sent"),
        (quantized, "a quantized tensor cannot be sent"),
    ],
)
def test_tensors_without_plain_memory_are_refused_by_every_collective(make, expected):
    for call in CALLS:
        with pytest.raises(CollectiveError) as caught:
            call(make())
        assert expected in str(caught.value)


def test_tensors_inside_a_transform_of_torch_func_are_refused():
    def gathered(tensor):
        return all_gather(tensor, AXIS).wait().sum()

    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(CollectiveError, match=r"a transform of torch\.func wraps it"):
            transform(gathered)(torch.ones(2, 2))


def test_tensors_of_inference_mode_are_overwritten_only_there():
    for call in (
        lambda: all_reduce(in_inference_mode(), AXIS),
        lambda: all_gather(torch.ones(2), AXIS, output=in_inference_mode()),
    ):
        with pytest.raises(CollectiveError, match=r"call under torch\.inference_mode\(\)"):
            call()


@pytest.mark.parametrize(
    ("output", "expected"),
    [(freed, "output has no memory"), (fake, "output is a FakeTensor")],
)
def test_an_output_without_memory_is_refused(output, expected):
    with pytest.raises(CollectiveError, match=expected):
        all_gather(torch.ones(2), AXIS, output=output())


def test_scratch_memory_must_be_of_its_own():
    tensor, output = torch.ones(4), torch.ones(8)
    with pytest.raises(CollectiveError, match="scratch shares memory"):
        reduce_scatter(tensor, AXIS, scratch=tensor[2:])
    with pytest.raises(CollectiveError, match="scratch shares memory"):
        reduce_scatter(tensor, AXIS, output=output[:2], scratch=output[1:3])


@pytest.mark.parametrize("sizes", [[2.0, 2.0], "22", [None, 2], [], 5, [2, -1]])
def test_sizes_that_are_no_rows_are_refused(sizes):
    with pytest.raises(CollectiveError, match="must be 2 non-negative numbers of rows"):
        all_gather(torch.ones(2), AXIS, sizes=sizes)


@pytest.mark.parametrize("source", [0.5, "0", None, 2, -1])
def test_a_source_that_is_no_coordinate_is_refused(source):
    with pytest.raises(CollectiveError, match="is not a coordinate of the axis; use 0 to 1"):
        broadcast(torch.ones(2), AXIS, source=source)


def test_subclasses_that_leave_operations_to_pytorch_are_taken():
    """Guards the attribute by which the others are told apart."""
    for tensor in (
        torch.ones(4),
        torch.nn.Parameter(torch.ones(4)),
        torch.ones(4).as_subclass(Named),
    ):
        alone = MeshAxis("dp", 1, 0, (0,), Tier.LOCAL, torch.device("cpu"))
        assert torch.equal(all_gather(tensor.detach(), alone).wait(), torch.ones(4))
