"""DTensor as a tensor and as a parameter: making, gradients, values, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from dtensor_checks import integers, leaf, mesh_of, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_dtensor.dtensor import DTensor, distribute_tensor
from hp_dtensor.layout import Layout, layout_of
from hp_dtensor.placements import (
    Partial,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
)
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.torch_kind import as_torch_dtensor, is_torch_dtensor
from hp_dtensor.whole_values import WholeValues, following
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


def parameter(value: Tensor, layout: Layout) -> Any:
    return nn.Parameter(spread(value, layout))


# -- making and unmaking -------------------------------------------------------------------------


def test_a_dtensor_has_the_global_shape_and_is_not_made_directly() -> None:
    def body() -> None:
        placed = spread(integers((5, 4)), Layout(mesh_of(2), [Shard(0)], (5, 4)))
        assert placed.shape == torch.Size([5, 4])
        assert (placed.ndim, placed.dim(), placed.numel(), len(placed)) == (2, 2, 20, 5)
        assert (placed.size(0), placed.stride(), placed.T.stride()) == (5, (4, 1), (1, 4))
        assert placed.dtype == torch.float64
        assert placed.is_floating_point()
        with pytest.raises(TypeError, match="from_local"):
            DTensor(torch.ones(2))

    run_ranks(body, 2)


def test_from_local_without_a_shape_finds_the_global_one() -> None:
    """Case 7: locals of 3 and 2 make up a tensor of 5."""

    def body(rank: int) -> None:
        mesh = mesh_of(2)
        local = torch.tensor([0, 1, 2]) if rank == 0 else torch.tensor([3, 4])
        placed = DTensor.from_local(local, mesh, [Shard(0)])
        assert placed.shape == (5,)
        assert placed.full_tensor().tolist() == [0, 1, 2, 3, 4]

    run_ranks(body, 2)


def test_from_local_refuses_parts_that_do_not_fit_on_every_rank() -> None:
    """Case 7: parts of 1 and 4 are not chunks of 5, with and without a shape."""

    def body(rank: int) -> None:
        mesh = mesh_of(2)
        local = torch.arange(4 if rank else 1)
        with pytest.raises(ValueError, match="chunk"):
            DTensor.from_local(local, mesh, [Shard(0)], shape=(5,))
        with pytest.raises(ValueError, match=r"\(\(0,\), \(1,\)\), \(\(1,\), \(4,\)\)"):
            DTensor.from_local(local, mesh, [Shard(0)])
        ragged = DTensor.from_local(local + rank, mesh, [RaggedShard((0,), (1, 4))], shape=(5,))
        assert ragged.full_tensor().tolist() == [0, 1, 2, 3, 4]

    run_ranks(body, 2)


def test_fsdp_over_tensor_parallelism_on_one_dim_keeps_the_order() -> None:
    """Case 4: dp over tp on dim 0, even and uneven; PyTorch has the even one."""

    def body(rank: int) -> list[list[int]]:
        mesh = mesh_of(2, 2)
        found = []
        for size in (8, 5):
            placed = distribute_tensor(torch.arange(size), mesh, [StridedShard(0, 2), Shard(0)])
            assert placed.full_tensor().tolist() == list(range(size))
            assert isinstance(placed, TorchDTensor) == (size == 8)
            found.append(placed.to_local().tolist())
        return found

    even, uneven = zip(*run_ranks(body, 4))
    assert even == ([0, 1], [4, 5], [2, 3], [6, 7])
    assert uneven == ([0, 1], [3], [2], [4])


def test_distribute_tensor_makes_a_leaf_of_its_own() -> None:
    def body() -> None:
        whole = integers((4, 2)).requires_grad_()
        for placement in (Shard(0), Replicate(), Partial()):
            placed = distribute_tensor(whole, mesh_of(2), [placement])
            assert placed.is_leaf
            assert placed.requires_grad
            with torch.no_grad():
                placed.zero_()
            assert torch.equal(whole, integers((4, 2)))

    run_ranks(body, 2)


def test_redistribution_refuses_another_mesh() -> None:
    def body() -> None:
        placed = spread(integers((4,)), Layout(mesh_of(2), [Shard(0)], (4,)))
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match="change the mesh"):
            placed.redistribute(other, [Replicate()])

    run_ranks(body, 2)


# -- autograd ----------------------------------------------------------------------------------


def test_to_local_can_declare_that_its_gradient_is_a_summand() -> None:
    def body(rank: int) -> None:
        layout = Layout(mesh_of(2), [Replicate()], (3,))
        for declared, expected in ((None, rank + 1.0), ([Partial()], 3.0)):
            placed = leaf(torch.ones(3), layout)
            local = placed.to_local(grad_placements=declared)
            (local * (rank + 1)).sum().backward()
            assert placed.grad is not None
            assert placed.grad.to_local().tolist() == [expected] * 3

    run_ranks(body, 2)


def test_a_replicated_weight_used_inside_sharded_heads_gets_the_whole_gradient() -> None:
    """Case 9: the value is [8, 16] on both ranks, where local mixing gives [3, 6] and [5, 10]."""

    def body() -> None:
        mesh = mesh_of(2)
        x = spread(torch.tensor([[1.0, 2.0]]), Layout(mesh, [Replicate()], (1, 2)))
        wq = leaf(
            torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]]), Layout(mesh, [Shard(0)], (4, 2))
        )
        for grad in (Replicate(), Partial()):
            wk = leaf(torch.ones(1, 2), Layout(mesh, [Replicate()], (1, 2), [grad]))
            ((x @ wq.T) * (x @ wk.T)).sum().backward()
            assert wk.grad is not None
            assert wk.grad.placements == (grad,)
            assert wk.grad.full_tensor().tolist() == [[8, 16]]

    run_ranks(body, 2)


def test_arithmetic_of_a_pending_sum_with_numbers() -> None:
    """Case 1."""

    def body() -> None:
        column = spread(torch.arange(10.0).view(10, 1), Layout(mesh_of(2), [Shard(0)], (10, 1)))
        total = column.sum()
        assert total.placements == (Partial(),)
        found = [
            total + 10,
            total + torch.tensor(10.0),
            total - 10,
            10 - total,
            total * 2,
            total**2,
            (total - 100).relu(),
            total * total,
        ]
        assert [each.item() for each in found] == [55, 55, 35, -35, 90, 2025, 0, 2025]

    run_ranks(body, 2)


def test_grad_mode_is_the_ambient_one() -> None:
    def body() -> None:
        weight = leaf(integers((4,)), Layout(mesh_of(2), [Shard(0)], (4,)))
        with torch.no_grad():
            assert not (weight * 2).requires_grad
            with torch.enable_grad():
                assert (weight * 2).requires_grad

    run_ranks(body, 2)


def test_hooks_see_and_return_dtensor_gradients() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (5,))
        weight, seen = leaf(integers((5,)), layout), []
        weight.register_hook(lambda gradient: gradient * 3)
        weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.full_tensor()))
        middle = weight * 2
        middle.retain_grad()
        middle.sum().backward()
        assert seen[0].tolist() == [6.0] * 5
        assert middle.grad is not None
        assert middle.grad.layout == layout

    run_ranks(body, 2)


def test_a_tensor_whose_hook_holds_it_is_freed() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (4,))
        weight, seen = leaf(integers((4,)), layout), []
        local = weakref.ref(weight.to_local())
        weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.layout))
        loss = (weight * 2).to_local().sum()
        gone = weakref.ref(weight)
        del weight
        gc.collect()
        assert gone() is None
        # The graph keeps the local tensor, and the hook is still told of it.
        loss.backward()
        assert seen == [layout]
        del loss
        gc.collect()
        assert local() is None

    run_ranks(body, 2)


def test_autograd_grad_returns_dtensors() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (5,))
        weight = leaf(integers((5,)), layout)
        (first,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), [weight])
        torch.testing.assert_close(second.full_tensor(), 6 * integers((5,)))

    run_ranks(body, 2)


def test_backward_of_a_replica_with_a_summed_gradient_seeds_the_whole_once() -> None:
    def body() -> None:
        weight = leaf(torch.ones(3), Layout(mesh_of(2), [Replicate()], (3,), [Partial()]))
        loss = (weight * 2).sum()
        assert loss.layout.grad_placements == (Partial(),)
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.full_tensor().tolist() == [2.0] * 3

    run_ranks(body, 2)


# -- parameters --------------------------------------------------------------------------------


def test_a_parameter_keeps_its_gradient_on_its_local_leaf() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Replicate()], (3,), [Partial()])
        weight = parameter(torch.ones(3), layout)
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, DTensor)
        assert weight.is_leaf
        assert weight.layout == layout
        (weight * 2).sum().backward()
        assert weight.grad.placements == (Partial(),)
        assert weight.grad.to_local() is weight.to_local().grad
        summed = weight.grad.redistribute(placements=[Replicate()])
        weight.grad = summed
        assert weight.grad.placements == (Replicate(),)
        weight.grad = None
        assert weight.to_local().grad is None
        with pytest.raises(ValueError, match="the gradient of"):
            weight.grad = spread(torch.ones(3), Layout(layout.mesh, [Shard(0)], (3,)))
        with pytest.raises(TypeError, match="from_local"):
            weight.grad = torch.ones(3)

    run_ranks(body, 2)


# -- values --------------------------------------------------------------------------------------


def test_scalars_are_the_global_value() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        total = spread(torch.arange(4.0), Layout(mesh, [Shard(0)], (4,))).sum()
        assert (total.item(), float(total), int(total), bool(total > 5)) == (6, 6, 6, True)
        assert f"{total:.2f}" == "6.00"
        with pytest.raises(RuntimeError, match="4 elements"):
            float(spread(torch.arange(4.0), Layout(mesh, [Shard(0)], (4,))))

    run_ranks(body, 2)


def test_printing_shows_values_only_where_every_rank_holds_them() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        whole = spread(torch.arange(4.0), Layout(mesh, [Replicate()], (4,)))
        part = spread(torch.arange(4.0), Layout(mesh, [Shard(0)], (4,)))
        assert "tensor([0., 1., 2., 3.])" in repr(whole)
        assert repr(part) == "DTensor(Layout([4] (S(0)) on tp=2), dtype=torch.float32)"
        assert whole.tolist() == [0, 1, 2, 3]
        for read in (part.tolist, part.numpy):
            with pytest.raises(OperatorError, match="full_tensor"):
                read()

    run_ranks(body, 2)


# -- copies --------------------------------------------------------------------------------------


def test_copies_of_parameters_are_parameters_with_their_own_memory_and_gradient() -> None:
    def body() -> None:
        weight = parameter(integers((5, 2)), Layout(mesh_of(2), [Shard(0)], (5, 2)))
        weight.grad = spread(integers((5, 2), 1), weight.layout)
        module = nn.Module()
        module.weight, module.same = weight, weight
        twin = copy.deepcopy(module)
        assert isinstance(twin.weight, nn.Parameter)
        assert twin.weight is twin.same
        assert twin.weight.layout == weight.layout
        with torch.no_grad():
            twin.weight.zero_()
            twin.weight.grad.zero_()
        assert torch.equal(weight.detach().full_tensor(), integers((5, 2)))
        assert torch.equal(weight.grad.full_tensor(), integers((5, 2), 1))

    run_ranks(body, 2)


def test_a_dtensor_says_that_it_is_pytorchs_where_pytorch_has_its_layout() -> None:
    """Code for FSDP2 asks `isinstance` before it gathers, and takes for whole what says no."""

    def body() -> None:
        mesh, whole = mesh_of(2), integers((5, 2))
        said = {}
        for placement in (
            Shard(0), Shard(1), Replicate(), Partial(), RaggedShard((0,), (1, 4)),
            SectionedShard(0, (3, 2)), StridedShard(0, 2),
        ):  # fmt: skip
            tensor = distribute_tensor(whole, mesh, [placement])
            said[type(placement).__name__] = isinstance(tensor, TorchDTensor)
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), whole)
            theirs = as_torch_dtensor(tensor)
            assert said[type(placement).__name__] == (theirs is not None)
            if theirs is not None:
                assert torch.equal(theirs.full_tensor(), whole)
                assert tensor.placements == theirs.placements
        assert [kind for kind, yes in said.items() if not yes] == [
            "RaggedShard", "SectionedShard", "StridedShard",
        ]  # fmt: skip
        # What its gradient is, and that it is not PyTorch's, is still known.
        weight = parameter(whole, Layout(mesh, [Replicate()], (5, 2), [Partial()]))
        assert isinstance(weight, TorchDTensor)
        assert isinstance(weight, nn.Parameter)
        assert layout_of(weight) is weight.layout
        assert not is_torch_dtensor(weight)
        with following(WholeValues()):  # in validate mode it stands for a plain tensor
            assert not isinstance(weight, TorchDTensor)
        # With `torch.__future__.set_swap_module_params_on_conversion`, modules exchange tensors.
        other = parameter(integers((3, 2)), Layout(mesh, [Shard(0)], (3, 2)))
        torch.utils.swap_tensors(weight, other)
        assert torch.equal(other.detach().full_tensor(), whole)
        assert weight.layout.shape == (3, 2)
        assert weight.placements == (Shard(0),)

    run_ranks(body, 2)


def test_a_dtensor_is_pickled_with_its_layout() -> None:
    def body() -> None:
        weight = parameter(integers((5, 2)), Layout(mesh_of(2), [Shard(0)], (5, 2)))
        buffer = io.BytesIO()
        torch.save(weight, buffer)
        buffer.seek(0)
        again = torch.load(buffer)
        assert isinstance(again, nn.Parameter)
        assert again.placements == weight.placements
        assert torch.equal(again.to_local(), weight.to_local())

    run_ranks(body, 2)


def test_a_module_is_cast_to_another_dtype() -> None:
    def body() -> None:
        module = nn.Module()
        module.weight = parameter(integers((5, 2)), Layout(mesh_of(2), [Shard(0)], (5, 2)))
        module.to(torch.bfloat16)
        assert module.weight.dtype == module.weight.to_local().dtype == torch.bfloat16
        assert isinstance(module.weight, nn.Parameter)
        module.float()
        assert module.weight.dtype == torch.float32

    run_ranks(body, 2)


def test_a_state_dict_is_loaded_and_a_copy_follows_the_target_s_layout() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        module, other = nn.Module(), nn.Module()
        module.weight = parameter(integers((5, 2)), Layout(mesh, [Shard(0)], (5, 2)))
        other.weight = parameter(integers((5, 2), 1), Layout(mesh, [Shard(1)], (5, 2)))
        module.load_state_dict(other.state_dict())
        assert module.weight.placements == (Shard(0),)
        assert torch.equal(module.weight.detach().full_tensor(), integers((5, 2), 1))

    run_ranks(body, 2)


def test_from_local_names_what_is_wrong_with_dtypes_dims_and_placements_on_every_rank() -> None:
    def body(rank: int) -> None:
        mesh = mesh_of(2)
        dtype = (torch.float32, torch.int64)[rank]
        with pytest.raises(ValueError, match=r"dtypes \[torch.float32, torch.int64\]"):
            DTensor.from_local(torch.ones(2).to(dtype), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"\[\(3,\), \(3, 3\)\]"):
            DTensor.from_local(torch.ones(((3,), (3, 3))[rank]), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="names dim 0, but the local tensor has 0 dims"):
            DTensor.from_local(torch.tensor(1.0), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="one placement is needed per mesh axis"):
            DTensor.from_local(torch.ones(2), mesh, [])

    run_ranks(body, 2)


def test_distribute_tensor_refuses_what_would_lose_its_gradient_or_is_no_tensor() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        with pytest.raises(ValueError, match="makes a leaf"):
            distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [Shard(0)])
        with pytest.raises(TypeError, match="found list"):
            distribute_tensor([1.0], mesh, [Shard(0)])  # type: ignore[arg-type]

    run_ranks(body, 2)


def test_backward_of_one_sharded_element_runs_on_ranks_that_hold_none() -> None:
    def body() -> None:
        value = leaf(integers((1,)) + 5, Layout(mesh_of(2), [Shard(0)], (1,)))
        (value * value).backward()
        assert value.grad is not None
        assert torch.equal(value.grad.full_tensor(), 2 * value.detach().full_tensor())

    run_ranks(body, 2)


def test_data_is_set_only_from_the_same_shape_and_layout() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        weight = parameter(integers((4, 4)), Layout(mesh, [Shard(0)], (4, 4)))
        with pytest.raises(ValueError, match="was set to"):
            weight.data = spread(integers((6, 4)), Layout(mesh, [Shard(0)], (6, 4)))
        weight.data = spread(integers((4, 4), 1), Layout(mesh, [Shard(0)], (4, 4)))
        assert torch.equal(weight.detach().full_tensor(), integers((4, 4), 1))

    run_ranks(body, 2)


def test_a_dtensor_is_pickled_after_its_mesh_has_communicated() -> None:
    def body() -> None:
        placed = spread(integers((5, 2)), Layout(mesh_of(2), [Shard(0)], (5, 2)))
        whole = placed.full_tensor()
        again = pickle.loads(pickle.dumps(placed))
        assert torch.equal(again.full_tensor(), whole)
        assert "layout" in dir(again)

    run_ranks(body, 2)
