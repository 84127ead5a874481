"""Random numbers belong to the global tensor: the same for every layout (case 10)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensor_checks import mesh_of, spread
from torch import nn

from hp_dtensor.dtensor import DTensor
from hp_dtensor.initializers import Initializing
from hp_dtensor.layout import Layout, attach_layout
from hp_dtensor.placements import Partial, RaggedShard, Replicate, Shard
from hp_dtensor.random import Dropout, RandomState, dropout, normal_, rand, seed, threefry, uniform_
from hp_dtensor.testing.lockstep import run_lockstep
from hp_platform.testing import run_ranks


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(
    counter: tuple[int, int], key: tuple[int, int], words: tuple[int, int]
) -> None:
    assert threefry(key, *counter) == words
    tensors = threefry(key, torch.tensor([counter[0]]), torch.tensor([counter[1]]))
    assert tuple(int(word) for word in tensors) == words


def _layouts(shape: tuple[int, ...], ranks: int) -> list[Layout]:
    mesh = mesh_of(ranks)
    units = (1, *(0,) * (ranks - 2), shape[0] - 1)
    return [
        Layout(mesh, [placement], shape)
        for placement in (Shard(0), Shard(1), Replicate(), RaggedShard((0,), units))
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_draws_what_one_process_draws_and_so_does_the_next_draw(ranks: int) -> None:
    def body() -> None:
        for shape in ((4, 4), (5, 4)):
            for layout in _layouts(shape, ranks):
                whole, parts = seed(7), seed(7)
                for _ in range(2):
                    one = dropout(torch.ones(shape), 0.5, state=whole)
                    placed = dropout(spread(torch.ones(shape), layout), 0.5, state=parts)
                    assert isinstance(placed, DTensor)
                    assert torch.equal(placed.full_tensor(), one)
                drawn = rand(
                    shape, state=parts, device_mesh=layout.mesh, placements=layout.placements
                )
                assert torch.equal(drawn.full_tensor(), rand(shape, state=whole))
                empty = DTensor.of_layout(torch.empty(layout.local_shape()), layout)
                one = normal_(torch.empty(shape), 1.0, 2.0, state=whole)
                assert torch.equal(normal_(empty, 1.0, 2.0, state=parts).full_tensor(), one)
                local = attach_layout(torch.empty(layout.local_shape()), layout)
                assert torch.equal(
                    uniform_(local, -1, 1, state=parts),
                    spread(uniform_(torch.empty(shape), -1, 1, state=whole), layout).to_local(),
                )

    run_ranks(body, ranks)


def test_values_have_the_distributions_they_are_named_for() -> None:
    state = RandomState(3)
    uniform = rand((100_000,), state=state)
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(uniform.var() - 1 / 12) < 0.002
    assert uniform.min() >= 0
    assert uniform.max() < 1
    normal = normal_(torch.empty(100_000), 2.0, 3.0, state=state)
    assert abs(normal.mean() - 2) < 0.05
    assert abs(normal.std() - 3) < 0.05
    kept = dropout(torch.ones(100_000), 0.3, state=state)
    assert abs((kept != 0).float().mean() - 0.7) < 0.01
    assert torch.allclose(kept[kept != 0], torch.tensor(1 / 0.7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_values_stay_below_the_upper_bound_in_every_dtype(dtype: torch.dtype) -> None:
    assert rand((20_000,), state=seed(1), dtype=dtype).max() < 1


def test_draws_and_seeds_differ() -> None:
    state = seed(5)
    first, second = rand((64,), state=state), rand((64,), state=state)
    other = rand((64,), state=seed(6))
    wide = rand((64,), state=seed(5 + 2**32))
    values = [first, second, other, wide]
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


def test_a_state_is_saved_and_goes_on_where_it_was() -> None:
    module, other = Dropout(0.5, seed=9), Dropout(0.5)
    module(torch.ones(8))
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(torch.ones(64)), other(torch.ones(64)))


def test_dropout_in_evaluation_is_the_identity_and_draws_nothing() -> None:
    module = Dropout(0.5, seed=9).eval()
    value = torch.ones(3)
    assert module(value) is value
    assert module.state.draws == 0


@pytest.mark.ranks
def test_dropout_passes_pending_sums_and_gradients() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Partial()], (4, 4))
        value = torch.arange(16.0).view(4, 4).requires_grad_()
        placed = spread(value.detach(), layout).requires_grad_()
        dense = dropout(value, 0.5, state=seed(1))
        made = dropout(placed, 0.5, state=seed(1))
        assert isinstance(made, DTensor)
        torch.testing.assert_close(made.detach().full_tensor(), dense.detach())
        dense.sum().backward()
        made.sum().backward()
        assert placed.grad is not None
        torch.testing.assert_close(placed.grad.full_tensor(), value.grad)

    run_ranks(body, 2)


def _initialized(module: nn.Module) -> dict[str, torch.Tensor]:
    with Initializing(seed(3)):
        for child in module.children():
            child.reset_parameters()  # type: ignore[operator]
        nn.init.trunc_normal_(module[2].weight, std=0.1)  # type: ignore[index]
        module[0].bias.data.normal_(0.0, 0.1)  # type: ignore[index]
    return dict(module.named_parameters())


def test_initialisers_give_every_layout_its_part_of_the_same_values() -> None:
    def parts() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Conv1d(3, 4, 2), nn.Embedding(7, 4))

    whole = _initialized(parts())

    def body(mesh: Any) -> None:
        for kind in (DTensor.of_layout, attach_layout):
            module = parts()
            layouts = {name: Layout(mesh, [Shard(p.ndim - 1)], p.shape)
                       for name, p in module.named_parameters()}  # fmt: skip
            for name, layout in layouts.items():
                owner, leaf = name.split(".")
                own = nn.Parameter(kind(torch.empty(layout.local_shape()), layout))
                plain = kind is attach_layout
                own = attach_layout(own, layout) if plain else own
                setattr(module.get_submodule(owner), leaf, own)
            for name, found in _initialized(module).items():
                local = found.to_local() if isinstance(found, DTensor) else found
                expected = whole[name].reshape(-1)[layouts[name].owned_indices()]
                assert torch.equal(local.reshape(-1), expected), name
        with Initializing(seed(3)), pytest.raises(NotImplementedError, match="a part of"):
            module[2].weight[0].fill_(0)  # type: ignore[index, operator]

    run_lockstep(body, {"tp": 3})
    with Initializing(seed(3)), pytest.raises(NotImplementedError, match="differ between ranks"):
        nn.init.sparse_(torch.empty(4, 4), 0.5)


def test_random_values_do_not_fill_integers() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        normal_(torch.zeros(3, dtype=torch.int64), state=seed(0))


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_a_probability_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="p must be"):
        Dropout(p)
