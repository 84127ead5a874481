"""Every rule against the dense operator, over all layouts of its operands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dtensor_checks import (
    agrees,
    axis_choices,
    integers,
    layout_choices,
    leaf,
    mesh_of,
    spread,
)

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules.engine import OperatorError
from hp_platform.testing import run_ranks

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]

ids = torch.tensor([[0, 3, 1], [4, 2, 3]])

# Operator and global shapes of its operands. Uneven sizes (5 over 2 or 4 ranks) on purpose.
CASES: dict[str, Case] = {
    "add": (lambda a, b: a + b, ((4, 5), (4, 5))),
    "add broadcasting": (lambda a, b: a + b, ((4, 6), (6,))),
    "add with alpha": (lambda a, b: torch.add(a, b, alpha=3), ((4, 5), (5,))),
    "add a number": (lambda a: a + 10, ((4, 5),)),
    "subtract from a number": (lambda a: 10 - a, ((4, 5),)),
    "subtract": (lambda a, b: a - b, ((4, 5), (1, 5))),
    "multiply": (lambda a, b: a * b, ((4, 5), (4, 1))),
    "multiply by a number": (lambda a: 2 * a, ((5,),)),
    "multiply by a plain scalar": (lambda a: a * torch.tensor(3.0), ((5,),)),
    "add a plain scalar": (lambda a: a + torch.tensor(3.0, dtype=torch.float64), ((5,),)),
    "divide": (lambda a, b: a / (b * b + 1), ((4, 5), (5,))),
    "divide by a number": (lambda a: a / 2, ((4, 5),)),
    "divide a number": (lambda a: 2 / (a * a + 1), ((4, 5),)),
    "negate": (lambda a: -a, ((4, 5),)),
    "square": (lambda a: a**2, ((4, 5),)),
    "rsqrt": (lambda a: torch.rsqrt(a * a + 1), ((4, 5),)),
    "silu": (F.silu, ((4, 5),)),
    "gelu": (lambda a: F.gelu(a, approximate="tanh"), ((4, 5),)),
    "sigmoid": (torch.sigmoid, ((4, 5),)),
    "exp": (torch.exp, ((4, 5),)),
    "cos": (torch.cos, ((4, 5),)),
    "relu": (torch.relu, ((4, 5),)),
    "clamp": (lambda a: a.clamp(min=-1, max=2), ((4, 5),)),
    "where": (lambda a, b: torch.where(a > 0, a, b), ((4, 5), (4, 5))),
    "masked_fill": (lambda a, b: a.masked_fill(b > 0, 3.0), ((4, 5), (5,))),
    "float": (lambda a: a.float().double(), ((4, 5),)),
    "to an integer": (lambda a: a.to(torch.int64), ((4, 5),)),
    "compare": (lambda a, b: a >= b, ((4, 5), (4, 5))),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=2), ((4, 5), (4, 5), (5,))),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.5), ((4, 5), (4, 5))),
    "clone": (torch.clone, ((4, 5),)),
    "zeros_like": (torch.zeros_like, ((4, 5),)),
    "ones_like": (torch.ones_like, ((4, 5),)),
    "linear": (F.linear, ((3, 4, 6), (5, 6))),
    "linear with bias": (F.linear, ((3, 4), (5, 4), (5,))),
    "matmul": (torch.matmul, ((4, 6), (6, 5))),
    "matmul in batches": (torch.matmul, ((2, 3, 4, 6), (3, 6, 5))),
    "matmul with a vector": (torch.matmul, ((4, 6), (6,))),
    "operator @": (lambda a, b: a @ b, ((6,), (6,))),
    "bmm": (torch.bmm, ((3, 4, 5), (3, 5, 2))),
    "mm": (torch.mm, ((4, 6), (6, 5))),
    "addmm": (torch.addmm, ((5,), (4, 6), (6, 5))),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), ((4, 6), (5, 6))),
    "einsum of three": (
        lambda a, b, c: torch.einsum("bi,bj,b->ij", a, b, c),
        ((4, 3), (4, 2), (4,)),
    ),
    "outer": (torch.outer, ((4,), (5,))),
    "sum": (torch.sum, ((4, 5),)),
    "sum of a dim": (lambda a: a.sum(1), ((4, 5),)),
    "sum keeping dims": (lambda a: a.sum((0, -1), keepdim=True), ((4, 5, 2),)),
    "mean": (torch.mean, ((4, 5),)),
    "mean of a dim": (lambda a: a.mean(-1, keepdim=True), ((4, 5),)),
    "var": (lambda a: a.var(-1, unbiased=False), ((4, 5),)),
    "max of a dim": (lambda a: a.max(1), ((4, 5),)),
    "amax": (lambda a: a.amax(-1), ((4, 5),)),
    "argmax": (lambda a: (a * 7 + torch.tensor(0.5)).argmax(-1), ((4, 5),)),
    "maximum": (torch.maximum, ((4, 5), (4, 5))),
    "logsumexp": (lambda a: torch.logsumexp(a, -1), ((4, 5),)),
    "cumsum": (lambda a: a.cumsum(1), ((4, 5),)),
    "softmax": (lambda a: F.softmax(a, dim=-1), ((3, 4, 5),)),
    "softmax in float": (lambda a: a.float().softmax(-1, dtype=torch.float64), ((4, 5),)),
    "log_softmax": (lambda a: F.log_softmax(a, dim=1), ((4, 5),)),
    "vector_norm": (torch.linalg.vector_norm, ((4, 5),)),
    "vector_norm inf": (lambda a: torch.linalg.vector_norm(a.detach(), float("inf")), ((4, 5),)),
    "norm of order 1": (lambda a: a.norm(1), ((4, 5),)),
    "view splitting a dim": (lambda a: a.view(2, 3, 4, 2), ((2, 3, 8),)),
    "view with -1": (lambda a: a.view(2, -1), ((2, 4, 6),)),
    "reshape merging dims": (lambda a: a.reshape(8, 6), ((2, 4, 6),)),
    "reshape across dims": (lambda a: a.reshape(6, 4), ((4, 6),)),
    "heads and back": (
        lambda a: a.view(2, 3, -1, 2).transpose(1, 2).transpose(1, 2).reshape(2, 3, -1),
        ((2, 3, 8),),
    ),
    "flatten": (lambda a: a.flatten(), ((6, 4),)),
    "flatten and view back": (lambda a: a.flatten(0, 1).view(2, 8, 4), ((2, 8, 4),)),
    "unflatten": (lambda a: a.unflatten(1, (-1, 2)), ((3, 8),)),
    "transpose": (lambda a: a.transpose(0, -1), ((2, 3, 4),)),
    "permute": (lambda a: a.permute(2, 0, 1), ((2, 3, 4),)),
    "T": (lambda a: a.T, ((4, 5),)),
    "mT": (lambda a: a.mT, ((4, 5),)),
    "unsqueeze": (lambda a: a.unsqueeze(-1), ((4, 5),)),
    "squeeze": (lambda a: a.squeeze(1), ((4, 1, 5),)),
    "expand": (lambda a: a.expand(3, 4, -1), ((4, 1),)),
    "contiguous": (lambda a: a.transpose(0, 1).contiguous(), ((4, 5),)),
    "repeat_kv": (
        lambda a: a[:, :, None].expand(2, 4, 3, 5, 2).reshape(2, 12, 5, 2),
        ((2, 4, 5, 2),),
    ),
    "chunk": (lambda a: a.chunk(2, dim=-1), ((4, 6),)),
    "split": (lambda a: a.split([1, 4], 1), ((4, 5),)),
    "cat": (lambda a, b: torch.cat((a, b), dim=-1), ((4, 5), (4, 2))),
    "cat of nothing": (lambda a, b: torch.cat((a.new_zeros(0), a, b), dim=-1), ((4, 5), (4, 2))),
    "stack": (lambda a, b: torch.stack((a, b), dim=1), ((4, 5), (4, 5))),
    "index with a slice": (lambda a: a[..., : a.shape[-1] // 2], ((4, 6),)),
    "index with None": (lambda a: a[:, None, 1], ((4, 6),)),
    "unbind": (lambda a: a.unbind(1), ((4, 3),)),
    "narrow": (lambda a: a.narrow(1, 3, 2), ((4, 6),)),
    "roll": (lambda a: a.roll(1, 0), ((4, 6),)),
    "flip": (lambda a: a.flip(1), ((4, 6),)),
    "pad": (lambda a: F.pad(a, (1, 1)), ((4, 6),)),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 1), ((4, 6),)),
    "repeat": (lambda a: a.repeat(2, 1, 3), ((4, 5),)),
    "tril": (torch.tril, ((4, 5),)),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (5,), w, b), ((3, 4, 5), (5,), (5,))),
    "rms_norm": (lambda a, w: F.rms_norm(a, (5,), w), ((3, 4, 5), (5,))),
    "rms norm by hand": (
        lambda a, w: w * (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6)),
        ((3, 4, 5), (5,)),
    ),
    "rotate half": (
        lambda a, c: a * c + torch.cat((-a[..., 3:], a[..., :3]), dim=-1) * c,
        ((2, 4, 3, 6), (2, 1, 3, 6)),
    ),
    "attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * k, is_causal=True),
        ((2, 4, 3, 2), (2, 4, 3, 2)),
    ),
    "attention with few key heads": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * k, enable_gqa=True),
        ((2, 4, 3, 2), (2, 2, 3, 2)),
    ),
    "attention with a mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        ((2, 4, 3, 2), (2, 1, 3, 3)),
    ),
    "topk": (lambda a: (a * 10).topk(2, dim=-1)[0], ((4, 5),)),
    "dropout in evaluation": (lambda a: F.dropout(a, 0.5, training=False), ((4, 5),)),
    "mse_loss": (F.mse_loss, ((4, 5), (4, 5))),
    "glu": (lambda a: F.glu(a), ((4, 6),)),
}

# Operators for which these placements on one axis must work; the exhaustive test may refuse.
MUST = {
    "linear with bias": [
        (Shard(0), Replicate(), Replicate()),
        (Replicate(), Shard(0), Shard(0)),
        (Shard(1), Shard(1), Replicate()),
    ],
    "linear": [(Shard(1), Replicate()), (Shard(2), Shard(1))],
    "attention with few key heads": [(Shard(1),) * 2, (Shard(0),) * 2],
    "attention": [(Shard(1),) * 2],
    "attention with a mask": [(Shard(1), Replicate()), (Shard(0), Shard(0))],
    "heads and back": [(Shard(2),), (Shard(0),), (Shard(1),)],
    "flatten and view back": [(Shard(1),), (Shard(0),)],
    "repeat_kv": [(Shard(1),)],
    "rotate half": [(Shard(1), Replicate()), (Shard(2), Shard(2))],
    "rms norm by hand": [(Shard(1), Replicate())],
    "add a number": [(Partial(),)],
    "square": [(Partial(),)],
    "mean": [(Shard(0),), (Shard(1),), (Partial(),)],
    "mean of a dim": [(Shard(1),)],
    "vector_norm": [(Shard(0),), (Shard(1),), (Partial(),)],
    "einsum": [(Shard(1), Shard(1))],
    "einsum of three": [(Shard(0),) * 3, (Shard(1), Replicate(), Replicate())],
    "cat": [(Shard(0), Shard(0)), (Partial(), Partial())],
}


def run_case(name: str, layouts: Sequence[Layout]) -> bool:
    """Whether the operator accepts these layouts; if it does, it agrees with the dense one."""
    function, shapes = CASES[name]
    dense = [integers(shape, i) for i, shape in enumerate(shapes)]
    try:
        agrees(function, dense, [leaf(value, layout) for value, layout in zip(dense, layouts)])
    except OperatorError:
        return False
    except Exception as error:
        error.add_note(f"{name} with {layouts}")
        raise
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("most", [14, pytest.param(400, marks=pytest.mark.slow)])
def test_every_rule_agrees_with_the_dense_operator_for_all_layouts_on_one_axis(most: int) -> None:
    """For `most` combinations of its operands' layouts, where there are more."""

    def body() -> dict[str, int]:
        mesh = mesh_of(2)
        accepted: dict[str, int] = {}
        for name, (_, shapes) in CASES.items():
            choices = list(itertools.product(*(layout_choices(shape, mesh) for shape in shapes)))
            if len(choices) > most:
                choices = random.Random(name).sample(choices, most)
            accepted[name] = sum(run_case(name, each) for each in choices)
        return accepted

    first, second = run_ranks(body, 2, timeout=max(250, 10 * most))
    assert first == second
    assert {name for name, count in first.items() if count < 3} == set()


@pytest.mark.ranks
def test_layouts_that_transformers_need_are_accepted() -> None:
    def body() -> list[tuple[str, Any]]:
        mesh = mesh_of(2)
        return [
            (name, placements)
            for name, each in MUST.items()
            for placements in each
            if not run_case(
                name, [Layout(mesh, [p], s) for p, s in zip(placements, CASES[name][1])]
            )
        ]

    assert run_ranks(body, 2) == [[], []]


@pytest.mark.ranks
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_rules_agree_with_the_dense_operator_on_two_axes(rounds: int) -> None:
    """Each axis by itself from those that fit on one axis, so that most are accepted."""

    def body() -> int:
        mesh, draw = mesh_of(2, 2), random.Random(0)
        accepted = 0
        for name in sorted(CASES) * rounds:
            shapes = CASES[name][1]
            must = [tuple((p, p) for p in each) for each in MUST.get(name, [])]
            axes = [
                draw.choice(must)
                if must and draw.random() < 0.5
                else tuple(draw.choice(axis_choices(shape)) for shape in shapes)
                for _ in range(2)
            ]
            layouts = [
                Layout(mesh, [axis[i][0] for axis in axes], shape) for i, shape in enumerate(shapes)
            ]
            accepted += run_case(name, layouts)
        return accepted

    counts = run_ranks(body, 4, timeout=125 * rounds)
    assert len(set(counts)) == 1
    assert counts[0] > len(CASES) * rounds // 4


@pytest.mark.ranks
def test_a_vocabulary_sharded_table_looks_up_what_it_holds() -> None:
    def body(rank: int) -> None:
        for mesh, layouts in (
            (mesh_of(4), [(Shard(0),), (Shard(1),), (Replicate(),)]),
            (mesh_of(2, 2), [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(1), Shard(0))]),
        ):
            for placements, padding in itertools.product(layouts, (None, 3)):
                dense = [integers((5, 2))]
                table = leaf(dense[0], Layout(mesh, placements, (5, 2)))
                everywhere = Layout(mesh, [Replicate()] * mesh.ndim, ids.shape)
                lookup = spread(ids, everywhere)
                agrees(
                    lambda i, w, padding=padding: F.embedding(i, w, padding),
                    [ids, dense[0]],
                    [lookup, table],
                )

    run_ranks(body, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_averages_over_the_rows_of_all_ranks(reduction: str) -> None:
    targets = torch.tensor([2, 0, -100, 1, 2])

    def body() -> None:
        mesh = mesh_of(2)
        for placement in (Shard(0), Replicate()):
            dense = [integers((5, 3))]
            logits = leaf(dense[0], Layout(mesh, [placement], (5, 3)))
            labels = spread(targets, Layout(mesh, [placement], (5,)))
            agrees(
                lambda a, t: F.cross_entropy(a, t, reduction=reduction, label_smoothing=0.1),
                [dense[0], targets],
                [logits, labels],
            )

    run_ranks(body, 2)


@pytest.mark.ranks
def test_writing_into_a_slice_lands_or_is_refused() -> None:
    """Case 5: a write lands in the tensor, whichever rank holds the part; else it is refused."""

    def body() -> None:
        mesh = mesh_of(2)

        def rows() -> Any:
            return spread(torch.ones(4, 4), Layout(mesh, [Shard(0)], (4, 4)))

        writes: list[tuple[Callable[[Any], Any], float]] = [
            (lambda d: d[:2].zero_(), 8),
            (lambda d: torch.nn.init.zeros_(d[:2]), 8),
            (lambda d: d.narrow(0, 1, 2).zero_(), 8),
            (lambda d: d.chunk(2)[1].mul_(3), 32),
            (lambda d: d[1:, :2].fill_(0.0), 10),
            (lambda d: d[:2].view(-1).zero_(), 8),
            (lambda d: d.__setitem__(slice(0, 2), 0), 8),
            (lambda d: d.__setitem__(0, 0), 12),
            (lambda d: d.__setitem__((slice(1, 4, 2), 3), 5.0), 24),
            (lambda d: d.__setitem__((slice(None), slice(0, 2)), 0), 8),
        ]
        for write, total in writes:
            tensor = rows()
            write(tensor)
            assert tensor.full_tensor().sum() == total
        for lost in (lambda d: d[0].zero_(), lambda d: d.unbind()[3].view(2, 2).zero_()):
            tensor = rows()
            with pytest.raises(OperatorError, match=r"write would be lost.*x\[index\] = value"):
                lost(tensor)
            assert tensor.full_tensor().sum() == 16
        pending = spread(torch.ones(4, 4), Layout(mesh, [Partial()], (4, 4)))
        with pytest.raises(OperatorError, match="written in place"):
            pending[:2] = 5  # each rank would have to write its summand
        pending[:2] = 0
        assert pending.full_tensor().sum() == 8
        tensor = rows()
        tensor[:, 1] = spread(torch.full((4,), 2.0), Layout(mesh, [Shard(0)], (4,)))
        assert tensor.full_tensor().sum() == 20
        tensor[1:3, 1] = spread(torch.tensor([7.0, 9.0]), Layout(mesh, [Replicate()], (2,)))
        assert tensor.full_tensor()[:, 1].tolist() == [2, 7, 9, 2]

    run_ranks(body, 2)


@pytest.mark.ranks
def test_indexing_a_sharded_dim_is_dense_or_an_error_that_names_operator_and_dim() -> None:
    """Case 6, on every form of it; where the result is dense, its gradient is, too."""
    dense = torch.arange(32.0, dtype=torch.float64).view(4, 8)
    kept: list[Callable[[Any], Any]] = [
        lambda t: t[..., :4],
        lambda t: t[:, 1:4],
        lambda t: t[:, ::3],
        lambda t: t[:, -3:],
        lambda t: t[1],
        lambda t: t[:, 5],
        lambda t: t.split(3, 1)[2],
        lambda t: t.chunk(3, 1)[1],
        lambda t: torch.cat([t, t], 1),
        lambda t: torch.stack([t, t], 1),
        lambda t: t.narrow(1, 3, 4),
        lambda t: F.pad(t, (1, 1)),
        lambda t: torch.einsum("ij,kj->ik", t, t),
        lambda t: t.repeat_interleave(2, 1),
        lambda t: t.repeat(2, 3),
        lambda t: t.cumsum(1),
        lambda t: t.unbind(1)[6],
        lambda t: t.roll(1, 1),
        lambda t: t.flip(1),
        lambda t: t[:, [5, 0]],
        lambda t: t[t > 11.5],
    ]
    refused: list[Callable[[Any], Any]] = [
        lambda t: t.corrcoef(),
        lambda t: (t > 3).renorm(2, 0, 1),
    ]

    def body() -> list[str]:
        mesh = mesh_of(2)
        errors = []
        for form in kept:
            agrees(form, [dense], [leaf(dense, Layout(mesh, [Shard(1)], (4, 8)))])
        for form in refused:
            with pytest.raises(OperatorError) as error:
                form(spread(dense, Layout(mesh, [Shard(1)], (4, 8))))
            errors.append(str(error.value))
        return errors

    for name, text in zip(("corrcoef", "renorm"), run_ranks(body, 2)[0]):
        assert text.startswith(name)
        assert "tp=S(1)" in text
