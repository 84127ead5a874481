"""Context-parallel attention by itself, against the dense module on the whole sequence."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from hp_dtensor import parallelize
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
    replicated_with_partial_gradient,
    sharded,
)
from hp_platform import RankFailure, ledger
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks

HIDDEN, HEAD_DIM, WINDOW = 16, 4, 3


class Holder(nn.Module):
    """Gives the attention a name, and returns its output alone."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = self.attention(hidden_states=hidden_states, **kwargs)[0]
        return out


def attention(implementation: str, window: bool = False) -> Holder:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_hidden_layers=1,
        use_sliding_window=window,
        sliding_window=WINDOW,
        max_window_layers=0,
    )
    config._attn_implementation = implementation
    torch.manual_seed(0)
    holder = Holder(Qwen3Attention(config, 0)).double()
    with torch.no_grad():
        for parameter in holder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return holder


def plan_of(holder: nn.Module, ranks: int) -> ShardingPlan:
    whole, rows = Contract(), sharded("cp", 1)
    positions = BoundaryTensor("position_embeddings", whole, rows, plain=True)
    return ShardingPlan(
        "Holder",
        AbstractMesh.of({"cp": ranks}),
        ("cp",),
        [
            ParameterSpec(
                name,
                "attention",
                tuple(p.shape),
                replicated_with_partial_gradient("cp"),
                "attention",
            )
            for name, p in holder.named_parameters()
        ],
        [
            BoundarySpec(
                "attention",
                BoundaryKind.ATTENTION,
                [BoundaryTensor("hidden_states", whole, rows), positions],
                [BoundaryTensor("0", whole, rows)],
                region=Region(
                    RegionKind.OPAQUE, function="hp_integration.regions:context_parallel"
                ),
            )
        ],
    )


def distributed(holder: Holder, ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    return parallelize(copy.deepcopy(holder), plan_of(holder, ranks), mesh)


def inputs(batch: int, length: int, first: int = 0) -> dict[str, Any]:
    """Hidden states and rotary tables, positions counted from `first`."""
    made = torch.Generator().manual_seed(length)
    hidden = torch.randn(batch, length, HIDDEN, generator=made, dtype=torch.float64)
    angle = torch.arange(first, first + length)[:, None] * torch.tensor([1.0, 0.1]).double()
    angle = torch.cat((angle, angle), dim=-1)[None]
    return {
        "hidden_states": hidden.requires_grad_(),
        "position_embeddings": (angle.cos(), angle.sin()),
    }


def allowed(batch: int, length: int, window: bool, padding: list[int]) -> Tensor:
    """[B, 1, S, S], True where a query may look: causal, windowed, without padded keys."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = query >= key
    if window:
        mask &= query - key < WINDOW
    real = torch.arange(length)[None, :] >= torch.tensor(padding)[:, None]
    # A padded query may look at itself, as transformers' masks let it.
    return (mask & real[:, None, :])[:, None] | torch.eye(length, dtype=torch.bool)


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))


def compare(holder: Holder, mine: nn.Module, given_inputs: dict[str, Any]) -> None:
    dense = copy.deepcopy(holder)
    results = []
    for module in (dense, mine):
        fresh = given_inputs | {
            "hidden_states": given_inputs["hidden_states"].detach().requires_grad_()
        }
        output = module(**fresh)
        made = torch.Generator().manual_seed(3)
        (output * torch.randn(output.shape, generator=made, dtype=output.dtype)).sum().backward()
        results.append((output, fresh["hidden_states"].grad))
    torch.testing.assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1], results[0][1])
    for parameter, expected in zip(mine.parameters(), dense.parameters()):
        torch.testing.assert_close(parameter.grad, expected.grad)
        parameter.grad = None


def drawn(ranks: int) -> list[tuple[int, int, bool, list[int]]]:
    """Batch, sequence length, windowed, left padding of every row."""
    found = []

    @settings(max_examples=8, database=None, derandomize=True, deadline=None)
    @given(
        st.integers(1, 3).flatmap(
            lambda batch: st.tuples(
                st.just(batch),
                st.integers(1, 4).map(lambda n: n * ranks),
                st.booleans(),
                st.lists(st.integers(0, 3), min_size=batch, max_size=batch),
            )
        )
    )
    def collect(example: tuple[int, int, bool, list[int]]) -> None:
        found.append(example)

    collect()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_values_and_gradients_are_those_of_dense_attention_for_any_mask(
    implementation: str, ranks: int
) -> None:
    holder, examples = attention(implementation), drawn(ranks)

    def body(rank: int) -> None:
        mine = distributed(holder, ranks)
        for batch, length, window, padding in examples:
            mask = allowed(batch, length, window, padding)
            given_inputs = inputs(batch, length)
            eager = implementation == "eager"
            compare(
                holder, mine, given_inputs | {"attention_mask": additive(mask) if eager else mask}
            )

    run_ranks(body, ranks, timeout=240)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_without_a_mask_the_causal_flag_means_the_whole_sequence(implementation: str) -> None:
    """sdpa falls back on the flag; transformers' eager attention without a mask sees everything."""
    holder = attention(implementation)

    def body(rank: int) -> None:
        mine = distributed(holder, 2)
        for length in (2, 8):
            compare(holder, mine, inputs(2, length) | {"attention_mask": None})
        everything = inputs(2, 8) | {"attention_mask": None, "is_causal": False}
        compare(holder, mine, everything)

    run_ranks(body, 2)


def test_positions_are_global_on_every_rank() -> None:
    """Positions that do not start at zero reach the rank that they belong to."""
    holder = attention("sdpa")

    def body(rank: int) -> None:
        compare(holder, distributed(holder, 2), inputs(1, 8, first=1000) | {"attention_mask": None})

    run_ranks(body, 2)


def test_keys_and_values_travel_once_each_way_before_they_are_repeated() -> None:
    def body(rank: int) -> list[tuple[str, int]]:
        mine = distributed(attention("sdpa"), 2)
        with ledger() as log:
            mine(**inputs(1, 8), attention_mask=None).sum().backward()
        return [(r.operation, r.bytes) for r in log.records if r.origin.package == "hp_integration"]

    both = 2 * 8 * 2 * HEAD_DIM * 8  # keys and values, positions, heads, dim, bytes
    for found in run_ranks(body, 2):
        assert found == [("all_gather", both), ("reduce_scatter", both)]


def test_the_model_of_another_plan_in_the_same_process_is_left_alone() -> None:
    holder = attention("sdpa")
    other = copy.deepcopy(holder)

    def body(rank: int) -> None:
        distributed(holder, 2)
        assert other.attention.config._attn_implementation == "sdpa"
        other(**inputs(1, 7), attention_mask=None)

    run_ranks(body, 2)


def test_what_is_not_understood_is_refused_by_name() -> None:
    def flash(rank: int) -> None:
        holder = attention("sdpa")
        holder.attention.config._attn_implementation_internal = "flash_attention_2"
        distributed(holder, 2)

    def flat_mask(rank: int) -> None:
        distributed(attention("sdpa"), 2)(**inputs(1, 8), attention_mask=torch.ones(1, 8))

    def weights(rank: int) -> None:
        mine = distributed(attention("eager"), 2)
        mine(**inputs(1, 8), attention_mask=None, output_attentions=True)

    def filled_cache(rank: int) -> None:
        from transformers import DynamicCache

        cache, mine = DynamicCache(), distributed(attention("sdpa"), 2)
        for _ in range(2):
            mine(**inputs(1, 8), attention_mask=None, cache=cache)

    for body, text in (
        (flash, "eager or sdpa, found 'flash_attention_2'"),
        (flat_mask, r"of the whole sequence or none, found \(1, 8\)"),
        (weights, "without output_attentions"),
        (filled_cache, "without a filled cache"),
    ):
        with pytest.raises(RankFailure, match=text):
            run_ranks(body, 2)
