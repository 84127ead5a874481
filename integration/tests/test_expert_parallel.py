"""Expert dispatch by itself, against the dense module on the tokens of all ranks."""

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from hp_dtensor import Shard, parallelize
from hp_dtensor.contracts import ContractError
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)
from hp_platform import RankFailure, ledger
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks

EXPERTS, HIDDEN, CHOICES = 8, 8, 2


class Block(nn.Module):
    """Holds the experts, so that they have a name."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.experts(*args)
        return out


def qwen_experts(implementation: str = "eager", **changes: object) -> Block:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=HIDDEN,
        moe_intermediate_size=4,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        **changes,
    )
    config._experts_implementation = implementation
    return seeded(Block(Qwen3MoeExperts(config)))


def gpt_oss_experts() -> Block:
    """Transposed, interleaved, clamped and with biases: all the module's own business."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=HIDDEN, intermediate_size=4, num_local_experts=EXPERTS
    )
    config._experts_implementation = "eager"
    return seeded(Block(GptOssExperts(config)))


class ScalarExperts(nn.Module):
    """`y = w_e x`: the smallest fused experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, 1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = self.weight[top_k_index]
        return (hidden_states[:, None] * chosen * top_k_weights[..., None]).sum(1)


def seeded(block: Block) -> Block:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    return block.double()


def plan_of(block: nn.Module, ranks: int, declared: int = 3) -> ShardingPlan:
    whole = Contract()
    inputs = list(inspect.signature(block.experts.forward).parameters)[:declared]
    attributes = [name for name in ("num_experts",) if hasattr(block.experts, name)]
    return ShardingPlan(
        "Block",
        AbstractMesh.of({"ep": ranks}),
        ("ep",),
        [
            ParameterSpec(name, "expert", tuple(p.shape), Contract({"ep": Shard(0)}), "experts")
            for name, p in block.named_parameters()
        ],
        [
            BoundarySpec(
                "experts",
                BoundaryKind.EXPERTS,
                [BoundaryTensor(name, whole, whole, plain="ind" in name) for name in inputs],
                [BoundaryTensor("", whole, whole)],
                [LocalAttribute(name, "ep", EXPERTS) for name in attributes],
                Region(RegionKind.OPAQUE, function="hp_integration.regions:expert_parallel"),
            )
        ],
    )


def distributed(block: Block, ranks: int, declared: int = 3) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    return parallelize(copy.deepcopy(block), plan_of(block, ranks, declared), mesh)


def batch(
    seed: int, index: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the index and weights, [T, H], [T, k], [T, k]."""
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(index.shape[0], HIDDEN, generator=made, dtype=dtype)
    weights = torch.rand(index.shape, generator=made, dtype=dtype)
    return hidden.requires_grad_(), index, weights.requires_grad_()


def loss_of(output: Tensor, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(100 + seed)
    return (output * torch.randn(output.shape, generator=made, dtype=output.dtype)).sum()


def _leaves(batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [each[position] for each in batches for position in (0, 2)]


def compare(block: Block, mine: nn.Module, rank: int, indices: list[Tensor]) -> None:
    """One call: values, gradients of inputs, and of experts, against one process."""
    dense = copy.deepcopy(block)
    dtype = next(dense.parameters()).dtype
    everyone = [batch(seed, index, dtype) for seed, index in enumerate(indices)]
    outputs = [dense(*each) for each in everyone]
    nothing = sum(0 * leaf.sum() for leaf in [*dense.parameters(), *_leaves(everyone)])
    losses = torch.stack([loss_of(output, seed) for seed, output in enumerate(outputs)])
    (losses.mean() + nothing).backward()
    own = batch(rank, indices[rank], dtype)
    output = mine(*own)
    loss_of(output, rank).backward()
    torch.testing.assert_close(output, outputs[rank])
    for found, wanted in zip((own[0], own[2]), (everyone[rank][0], everyone[rank][2])):
        # The dense loss is a mean over ranks, a rank's own is not.
        torch.testing.assert_close(found.grad, wanted.grad * len(indices))
    for parameter, expected in zip(mine.parameters(), dense.parameters()):
        share = expected.grad.chunk(len(indices))[rank]
        torch.testing.assert_close(parameter.grad, share)
        parameter.grad = None


def routings(ranks: int) -> st.SearchStrategy[list[list[list[int]]]]:
    """For every rank up to six tokens of two different experts each, from few or all experts."""
    pools = st.sampled_from([range(EXPERTS), range(2), range(EXPERTS - 2, EXPERTS), range(3, 5)])
    token = pools.flatmap(lambda pool: st.permutations(list(pool)).map(lambda p: p[:CHOICES]))
    return st.lists(st.lists(token, max_size=6), min_size=ranks, max_size=ranks)


def drawn(ranks: int, count: int) -> list[list[Tensor]]:
    """Examples, drawn here once so that all ranks run the same in one group."""
    found: list[list[Tensor]] = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(routings(ranks))
    def collect(example: list[list[list[int]]]) -> None:
        found.append([torch.tensor(each, dtype=torch.long).view(-1, CHOICES) for each in example])

    collect()
    one = torch.tensor([[0, 1]])
    found.append([one.repeat(5, 1)] * ranks)  # all tokens to the first rank's experts
    found.append([one.flip(1).repeat(3, 1), *[one[:0]] * (ranks - 1)])  # and from one rank only
    found.append([one[:0]] * ranks)  # no token anywhere
    return found


DROPPED = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS]])
"""Transformers' loop takes the number of experts as "no expert"."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [qwen_experts, gpt_oss_experts], ids=["qwen", "gpt_oss"])
def test_values_and_gradients_are_those_of_the_dense_experts_for_any_routing(
    ranks: int, make: Callable[[], Block]
) -> None:
    block, examples = make(), drawn(ranks, 30 // ranks)
    examples += [[DROPPED] * ranks] if make is qwen_experts else []

    def body(rank: int) -> None:
        mine = distributed(block, ranks)
        for indices in examples:
            compare(block, mine, rank, indices)

    run_ranks(body, ranks, timeout=240)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_modules_other_implementations_compute_inside(implementation: str) -> None:
    block, examples = qwen_experts(implementation).float(), drawn(2, 6)

    def body(rank: int) -> None:
        mine = distributed(block, 2)
        for indices in examples:
            compare(block, mine, rank, indices)

    run_ranks(body, 2, timeout=240)


def test_experts_gradients_are_of_the_mean_loss_over_the_axis() -> None:
    """Two ranks, two experts `y = w x`; tokens 1, 2 and 3, 4, one for each expert."""

    def body(rank: int) -> float:
        block = Block(ScalarExperts(2))
        mine = distributed(block, 2)
        tokens = torch.tensor([[1.0], [2.0]]) + 2 * rank
        output = mine(tokens, torch.tensor([[0], [1]]), torch.ones(2, 1))
        output.mean().backward()
        assert mine.experts.weight.grad is not None
        return float(mine.experts.weight.grad)

    assert run_ranks(body, 2) == [1.0, 1.5]


def test_a_call_is_four_all_to_alls_forward_and_three_backward() -> None:
    def body(rank: int) -> list[tuple[str, str, int, str]]:
        mine = distributed(qwen_experts(), 2)
        own = batch(0, torch.tensor([[0, 5], [1, 2], [3, 7]]))
        with ledger() as log:
            loss_of(mine(*own), 0).backward()
        return [(r.operation, r.axis, r.bytes, r.origin.phase) for r in log.records]

    row = 8 * HIDDEN
    to_both = {
        0: [
            ("forward", 8 * EXPERTS),
            ("forward", 6 * row),
            ("forward", 6 * 8),
            ("forward", 8 * row),
        ],
        1: [
            ("forward", 8 * EXPERTS),
            ("forward", 6 * row),
            ("forward", 6 * 8),
            ("forward", 4 * row),
        ],
    }
    back = {
        0: [("backward", 6 * row), ("backward", 8 * row), ("backward", 8 * 8)],
        1: [("backward", 6 * row), ("backward", 4 * row), ("backward", 4 * 8)],
    }
    for rank, found in enumerate(run_ranks(body, 2)):
        wanted = [("all_to_all", "ep", size, phase) for phase, size in to_both[rank] + back[rank]]
        assert found == wanted


def test_recomputation_dispatches_again() -> None:
    from torch.utils.checkpoint import checkpoint

    block, index = qwen_experts(), torch.tensor([[0, 5], [1, 2]])

    def body(rank: int) -> None:
        mine = distributed(block, 2)

        def recomputed(*args: Tensor) -> Tensor:
            out: Tensor = checkpoint(mine, *args, use_reentrant=False)
            return out

        recomputed.parameters = mine.parameters  # type: ignore[attr-defined]
        compare(block, recomputed, rank, [index, index[:1]])  # type: ignore[arg-type]

    run_ranks(body, 2)


def test_what_cannot_be_dispatched_is_refused_by_name() -> None:
    def without_weights(rank: int) -> None:
        distributed(qwen_experts(), 2, declared=2)

    def other_shapes(rank: int) -> None:
        hidden, index, _ = batch(0, torch.tensor([[0, 1]]))
        distributed(qwen_experts(), 2)(hidden, index, torch.ones(1, EXPERTS))

    def unknown_expert(rank: int) -> None:
        distributed(qwen_experts(), 2)(*batch(0, torch.tensor([[0, EXPERTS + 1]])))

    for body, text in (
        (without_weights, "routing index and routing weights as inputs"),
        (other_shapes, r"routing weights \[T, k\], found"),
        (unknown_expert, "8 experts over 2 ranks"),
    ):
        with pytest.raises(RankFailure, match=text) as caught:
            run_ranks(body, 2)
        assert ContractError.__name__ in str(caught.value)
