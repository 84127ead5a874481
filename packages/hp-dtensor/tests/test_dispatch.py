"""Dispatch: what is refused, what the cache tells apart, what is returned."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensor_checks import integers, leaf, mesh_of, spread
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

import hp_dtensor.implicit
import hp_dtensor.operator_plan
from hp_dtensor.dtensor import DTensor
from hp_dtensor.implicit import implicit
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules.engine import OperatorError
from hp_platform import ledger
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


def rows(mesh: Any, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    return spread(integers(shape), Layout(mesh, [Shard(0)], shape))


def whole(mesh: Any, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    return spread(integers(shape), Layout(mesh, [Replicate()], shape))


def test_an_operator_without_a_rule_runs_on_replicas_and_is_refused_on_shards() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        square = torch.diag(torch.arange(1.0, 5.0))
        inverse = torch.linalg.pinv(spread(square, Layout(mesh, [Replicate()], (4, 4))))
        assert inverse.placements == (Replicate(),)
        torch.testing.assert_close(inverse.to_local(), torch.linalg.pinv(square))
        for layout in (
            Layout(mesh, [Shard(0)], (4, 4)),
            Layout(mesh, [Replicate()], (4, 4), [Partial()]),
        ):
            with pytest.raises(OperatorError, match=r"linalg_pinv: no rule.*Operands.*Remedy"):
                torch.linalg.pinv(spread(square, layout))

    run_ranks(body, 2)


def test_a_plain_tensor_beside_a_dtensor_is_refused_unless_it_is_a_scalar() -> None:
    def body() -> None:
        placed = rows(mesh_of(2))
        for mixed in (
            lambda: placed + torch.ones(4, 6),
            lambda: torch.ones(4, 6) * placed,
            lambda: F.linear(placed, torch.ones(3, 6)),
            lambda: torch.ones(4, 6).copy_(placed),
            lambda: placed[torch.tensor([0, 1])],
        ):
            with pytest.raises(OperatorError, match=r"plain tensor of shape.*Remedy"):
                mixed()
        with pytest.raises(OperatorError, match=r"take full_tensor\(\) of it first, on all ranks"):
            torch.ones(4, 6).copy_(placed)
        assert torch.equal((placed * torch.tensor(2)).full_tensor(), integers((4, 6)) * 2)
        with pytest.raises(OperatorError, match="requires a gradient"):
            placed * torch.tensor(2.0, requires_grad=True)
        with pytest.raises(OperatorError, match="cannot be written from DTensors"):
            torch.tensor(2.0).add_(placed.sum())

    run_ranks(body, 2)


def test_a_dtensor_of_pytorch_is_named_as_such() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        theirs = TorchDTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)])
        with pytest.raises((OperatorError, RuntimeError, TypeError)):
            rows(mesh) + theirs

    run_ranks(body, 2)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, *_: Any) -> Any:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2, None


class Alias(torch.autograd.Function):
    """A view, which torch lets require a gradient even where none is recorded."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


class Penalty(torch.autograd.Function):
    """The sum of this rank's squares, a plain tensor; `giving` makes of the gradient what it
    returns."""

    @staticmethod
    def forward(ctx: Any, value: Any, giving: Any) -> Any:
        ctx.giving = giving
        ctx.save_for_backward(value)
        return value.to_local().square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (value,) = ctx.saved_tensors
        return ctx.giving(value.detach() * (2 * gradient.item())), None


def test_an_autograd_function_applied_to_a_dtensor_is_found_by_the_next_operator() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (4, 6))
        for apply in (Double.apply, Alias.apply):
            for use in (lambda made: made + 1, DTensor.to_local, DTensor.full_tensor, torch.sum):
                value = leaf(integers((4, 6)), layout)
                for given in (value, value * 1):
                    made = use(apply(given))
                    made.backward(torch.ones_like(made))
                assert bool((value.grad.full_tensor() == 4).all())
        made = Double.apply(leaf(integers((4, 6)), layout), torch.ones((), requires_grad=True))
        for use in (lambda made: made + 1, DTensor.to_local, DTensor.full_tensor, torch.sum):
            with pytest.raises(OperatorError, match=r"autograd\.Function"):
                use(made)
        with torch.no_grad():
            fine = Double.apply(leaf(integers((4, 6)), layout))
        assert torch.equal(fine.full_tensor(), integers((4, 6)) * 2)

    run_ranks(body, 2)


def test_the_gradient_of_a_plain_result_of_an_autograd_function_reaches_the_leaf() -> None:
    def body() -> None:
        mesh, values = mesh_of(2), integers((4, 6))
        cut = Layout(mesh, [Shard(0)], (4, 6))
        summand = Layout(mesh, [Replicate()], (4, 6), [Partial()])
        for layout in (cut, Layout(mesh, [Replicate()], (4, 6)), summand):
            value, seen = leaf(values, layout), []
            value.register_hook(lambda gradient, seen=seen: seen.append(gradient))
            for _ in range(2):
                (
                    Penalty.apply(value, lambda gradient: gradient) + value.to_local().sum()
                ).backward()
            whole = value.grad.full_tensor()
            ranks = 2 if layout is summand else 1  # that computed the sum
            assert torch.equal(whole, 2 * (2 * values + ranks)), layout
            assert len(seen) == 4
        value = leaf(values, layout=cut)
        for giving, given, match in (
            (DTensor.full_tensor, value, "returned a plain tensor of shape .4, 6."),
            (lambda g: g.redistribute(placements=[Replicate()]), value, "a gradient placed"),
            (lambda g: g, value * 1, "other operators have computed"),
        ):
            with pytest.raises(OperatorError, match=match):
                Penalty.apply(given, giving).backward()
            assert value.grad is None

    run_ranks(body, 2)


def test_autograd_grad_finds_the_gradient_of_a_plain_result_of_an_autograd_function() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (4, 6))
        values = integers((4, 6))
        value, other = leaf(values, layout), leaf(values, layout)
        by_function = Penalty.apply(value, lambda gradient: gradient)
        for loss, expected in (
            (by_function, 2 * values),
            (by_function + value.to_local().sum(), 2 * values + 1),
        ):
            for allow_unused in (True, None):
                (found,) = torch.autograd.grad(
                    loss, value, retain_graph=True, allow_unused=allow_unused
                )
                assert found.layout == layout
                assert torch.equal(found.full_tensor(), expected)
            twice = torch.autograd.grad(loss, [value, value], retain_graph=True)
            assert all(torch.equal(each.full_tensor(), expected) for each in twice)
            with pytest.raises(RuntimeError, match="from the outputs to input 1, counted from 0"):
                torch.autograd.grad(loss, [value, other], retain_graph=True)
            options = {"retain_graph": True, "allow_unused": True}
            assert torch.autograd.grad(loss, [value, other], **options)[1] is None
            zeros = torch.autograd.grad(
                loss, [value, other], retain_graph=True, materialize_grads=True
            )[1]
            assert torch.equal(zeros.full_tensor(), torch.zeros(4, 6))
        # Nothing was accumulated, and backward goes on to do so.
        assert value.grad is None
        by_function.backward()
        assert torch.equal(value.grad.full_tensor(), 2 * values)
        with pytest.raises(OperatorError, match="returned a plain tensor"):
            torch.autograd.grad(Penalty.apply(value, DTensor.full_tensor), value)

    run_ranks(body, 2)


def test_a_dtensor_that_reaches_a_kernel_is_an_error() -> None:
    def body() -> None:
        placed = rows(mesh_of(2))
        raises = pytest.raises(OperatorError, match="reached a kernel")
        with torch._C.DisableTorchFunctionSubclass(), raises:
            torch.add(placed, 1)

    run_ranks(body, 2)


def test_operators_in_place_return_the_object_and_keep_its_layout() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        placed = rows(mesh)
        assert placed.add_(1) is placed
        assert torch.relu_(placed) is placed
        assert F.silu(placed, inplace=True) is placed
        before = placed
        before *= 2
        assert before is placed
        out = torch.empty_like(placed)
        assert torch.add(placed, placed, out=out) is out
        assert torch.add(placed, placed, out=None) is not out
        with pytest.raises(OperatorError, match="out= has no rule"):
            torch.sum(placed, 0, out=out)
        torch.testing.assert_close(out.full_tensor(), placed.full_tensor() * 2)
        target = whole(mesh)
        assert target.mul_(rows(mesh, (4, 1))) is target  # what is beside the target follows it
        assert target.placements == (Replicate(),)
        for write in (
            lambda: spread(integers((3,)), Layout(mesh, [Partial()], (3,))).exp_(),
            lambda: spread(integers((3,)), Layout(mesh, [Partial()], (3,))).fill_(1),
            lambda: rows(mesh, (1, 6)).add_(rows(mesh)),
        ):
            with pytest.raises(OperatorError):
                write()

    run_ranks(body, 2)


def test_writing_in_place_makes_a_tensor_part_of_the_graph() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (4, 6))
        weight, total = leaf(integers((4, 6)), layout), spread(integers((4, 6)), layout)
        total.add_(weight)
        assert total.requires_grad
        (total * 3).sum().backward()
        assert weight.grad is not None
        assert weight.grad.full_tensor().unique().tolist() == [3]

    run_ranks(body, 2)


def test_a_function_that_returns_its_argument_returns_the_same_object() -> None:
    def body() -> None:
        placed = rows(mesh_of(2))
        assert placed.contiguous() is placed
        assert placed.to(torch.float64) is placed
        assert F.dropout(placed, 0.5, training=False) is placed

    run_ranks(body, 2)


def test_named_results_keep_their_names() -> None:
    def body() -> None:
        result = rows(mesh_of(2)).max(dim=1)
        assert type(result).__name__ == "max"
        assert torch.equal(result.values.full_tensor(), integers((4, 6)).max(1).values)
        assert result.indices.dtype == torch.int64

    run_ranks(body, 2)


def test_the_cache_tells_apart_everything_that_changes_the_answer() -> None:
    """Each pair differs in one argument; a key without it would give the second the first's."""

    def body() -> None:
        mesh = mesh_of(2)
        a, b = rows(mesh), whole(mesh)
        pairs = [
            (lambda: a.sum(0), lambda: a.sum(1)),
            (lambda: a.sum(1), lambda: a.sum(1, keepdim=True)),
            (lambda: a.sum(dim=1), lambda: a.sum(dim=1, dtype=torch.float32)),
            (lambda: a * 1, lambda: a * True),
            (lambda: a.amax(1), lambda: a.amax(1, True)),
            (lambda: a[:, 1:3], lambda: a[:, 1:4]),
            (lambda: a[:, 1], lambda: a[:, 1:2]),
            (lambda: a[None], lambda: a[:, None]),
            (lambda: a.clamp(min=0), lambda: a.clamp(max=0)),
            (lambda: a.clamp(0, None), lambda: a.clamp(None, 0)),
            (lambda: a.view(2, 2, 6), lambda: a.view(4, 6, 1)),
            (lambda: a.chunk(2, 1)[1], lambda: a.split(2, 1)[1]),
            (lambda: a / 2, lambda: torch.div(a, 2, rounding_mode="floor")),
            (lambda: a.to(torch.float32), lambda: a.to(torch.int32)),
            (lambda: b + 1, lambda: a + 1),
            (lambda: b.sum(), lambda: a.sum()),
            (lambda: whole(mesh, (4,)) + 0, lambda: whole(mesh, (6,)) + 0),
        ]
        for first, second in pairs:
            hp_dtensor.operator_plan.plans_of([a]).plans.clear()
            expected = second()
            hp_dtensor.operator_plan.plans_of([a]).plans.clear()
            first()
            found = second()
            assert (found.layout, found.dtype) == (expected.layout, expected.dtype)
            assert torch.equal(found.full_tensor(), expected.full_tensor())

    run_ranks(body, 2)


def test_the_cache_forgets_instead_of_growing() -> None:
    def body() -> None:
        cache = hp_dtensor.operator_plan.PlanCache(limit=3)
        for key in range(10):
            cache.put(key, None)  # type: ignore[arg-type]
        assert len(cache.plans) <= 3

    run_ranks(body, 1)


def test_a_mesh_made_again_computes_on_its_own_groups_and_frees_the_one_before(
    tmp_path: Path,
) -> None:
    def body(rank: int) -> tuple[bool, bool]:
        def meshes_of_results() -> tuple[Any, set[int]]:
            mesh = mesh_of(2)
            placed = leaf(integers((4, 6)), Layout(mesh, [Shard(0)], (4, 6)))
            result = placed.sum().square()
            result.full_tensor().backward()
            assert placed.grad is not None
            return mesh, {id(result.device_mesh), id(placed.grad.device_mesh)}  # type: ignore[attr-defined]

        first, _ = meshes_of_results()
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        second, found = meshes_of_results()
        assert first == second
        dead = weakref.ref(first)
        del first
        gc.collect()
        return found == {id(second)}, dead() is None

    assert run_ranks(body, 2) == [(True, True)] * 2


def test_the_wrapper_s_own_flag_is_read_past_its_property() -> None:
    """What `any_requires_grad`, a private function of PyTorch, is relied upon for."""

    class Liar(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError("must not be asked")

    plain = torch.ones(2)
    for required in (False, True):
        made = Tensor._make_subclass(Liar, plain, required)
        assert hp_dtensor.implicit.any_requires_grad(made) is required


def test_implicit_communication_can_be_refused() -> None:
    def body() -> None:
        mesh = mesh_of(2)
        pending = spread(integers((4,)), Layout(mesh, [Partial()], (4,)))
        x = leaf(integers((4, 6)), Layout(mesh, [Replicate()], (4, 6)))
        declared = leaf(integers((4, 6)), Layout(mesh, [Replicate()], (4, 6), [Partial()]))
        weight = spread(integers((8, 6)), Layout(mesh, [Shard(0)], (8, 6)))
        with ledger() as log, implicit(reductions=False, adjoints=False):
            with pytest.raises(OperatorError, match="reduced or redistributed"):
                pending.exp()
            with pytest.raises(OperatorError, match="not declared Partial"):
                F.linear(x, weight)
            (pending * 2).sum()
            F.linear(declared, weight)
            F.linear(x.detach(), weight)
        assert not log.records
        with implicit(reductions=True, adjoints=True):
            pending.exp()
            F.linear(x, weight)

    run_ranks(body, 2)


def test_operators_communicate_only_what_their_layouts_ask_for() -> None:
    """A row of a transformer in tensor parallelism: nothing forward, one adjoint backward."""

    def body() -> list[str]:
        mesh = mesh_of(2)
        x = leaf(integers((4, 6)), Layout(mesh, [Replicate()], (4, 6)))
        up = leaf(integers((8, 6)), Layout(mesh, [Shard(0)], (8, 6)))
        down = leaf(integers((6, 8)), Layout(mesh, [Shard(1)], (6, 8)))

        def step() -> None:
            made = F.linear(F.silu(F.linear(x, up)), down)
            assert made.placements == (Partial(),)
            made.sum().backward()

        step()
        with ledger() as log:
            step()
        return [f"{record.operation} {record.origin.phase}" for record in log.records]

    assert run_ranks(body, 2) == [["all_reduce backward"]] * 2


def test_operands_on_different_meshes_are_refused() -> None:
    def body() -> None:
        with pytest.raises(OperatorError, match="different meshes"):
            rows(mesh_of(4)) + spread(
                integers((4, 6)), Layout(mesh_of(2, 2), [Shard(0), Replicate()], (4, 6))
            )

    run_ranks(body, 4)


def test_meta_tensors_on_an_abstract_mesh_show_what_a_large_run_would_do() -> None:
    mesh = AbstractMesh(("dp", "tp"), (64, 8))

    def meta(placements: list[Any], shape: tuple[int, ...]) -> DTensor:
        layout = Layout(mesh, placements, shape)
        local = torch.empty(layout.local_shape((0, 0)), device="meta")
        return DTensor.of_layout(local, layout)

    hidden = meta([Shard(0), Replicate()], (128, 4096, 1024))
    up = meta([Replicate(), Shard(0)], (4096, 1024))
    down = meta([Replicate(), Shard(1)], (1024, 4096))
    made = F.linear(F.silu(F.linear(hidden, up)), down)
    assert made.placements == (Shard(0), Partial())
    assert made.redistribute(placements=[Shard(0), Shard(1)]).to_local().shape == (2, 512, 1024)
    with pytest.raises(OperatorError, match="'tp'"):
        F.linear(F.linear(hidden, up), meta([Replicate(), Shard(0)], (1024, 4096)))
