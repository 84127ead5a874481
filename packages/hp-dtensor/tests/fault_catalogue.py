"""Planted sharding faults: what is changed in a good plan, a good model or this package itself,
and which place must be named by what stops it.

`plan`: refused when the plan is applied. `error`: an operator, a boundary or a module raises.
`report`: `check_gradients` reports different values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from dtensor_block import (
    HEADS,
    HIDDEN,
    INNER,
    PENDING,
    SUMMED,
    WHOLE,
    Attention,
    Gated,
    Layer,
    Norm,
    Tiny,
    cut,
    with_boundary,
    with_parameter,
)
from torch import Tensor, nn
from torch.distributed.tensor import Partial

from hp_dtensor import dispatch, end_of_backward, production, steps, vocabulary
from hp_dtensor.cuts import Chunk, Runs
from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard
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
from hp_dtensor.transition import Transition

AVERAGED = Contract({"tp": Partial("avg")})
LARGEST = Contract({"tp": Partial("max")})
OPAQUE = Region(RegionKind.OPAQUE)
Change = Callable[[ShardingPlan], ShardingPlan]


@frozen
class Fault:
    """A planted fault.

    Attributes:
        change: of the plan.
        message: what the error, or the report's first difference, must match.
        stops: "plan", "error" or "report".
        model: makes the model; the dense reference is the same code.
        sequence_parallel: of the good plan.
        plant: a fault in this package, for the time of the check.
    """

    change: Change
    message: str
    stops: str = "error"
    model: Callable[[], nn.Module] = Tiny
    sequence_parallel: bool = True
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext


def same(plan: ShardingPlan) -> ShardingPlan:
    return plan


def parameter(name: str, contract: Contract) -> Change:
    return lambda plan: with_parameter(plan, name, contract=contract)


def changed(module: str, direction: str, where: str, **changes: Any) -> Change:
    """One tensor of one boundary, changed."""

    def change(plan: ShardingPlan) -> ShardingPlan:
        tensors = getattr(plan.boundary(module), direction)
        assert any(tensor.where == where for tensor in tensors)
        new = [evolve(t, **changes) if t.where == where else t for t in tensors]
        return with_boundary(plan, module, **{direction: new})

    return change


def opaque(module: str) -> Change:
    return lambda plan: with_boundary(plan, module, region=OPAQUE)


def both(*changes: Change) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        for each in changes:
            plan = each(plan)
        return plan

    return change


def output_bias(plan: ShardingPlan) -> ShardingPlan:
    """The output projection's bias, replicated beside a weight that is cut by columns."""
    extra = [
        ParameterSpec(f"layers.{i}.attention.o.bias", "bias", (HIDDEN,), WHOLE, "")
        for i in range(2)
    ]
    return evolve(plan, parameters=[*plan.parameters, *extra])


def without_boundary(name: str) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        return evolve(plan, boundaries=[b for b in plan.boundaries if b.module != name])

    return change


def without_parameter(name: str) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        return evolve(plan, parameters=[p for p in plan.parameters if p.name != name])

    return change


def more_boundaries(*boundaries: BoundarySpec) -> Change:
    return lambda plan: evolve(plan, boundaries=[*plan.boundaries, *boundaries])


# -- modules with a fault of their own ----------------------------------------------------------


class LosesLayout(Norm):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result.to_local() if isinstance(result, DTensor) else result


class Gathers(Norm):
    """Takes the whole tensor where a part is declared."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result.full_tensor() if isinstance(result, DTensor) else result


class Redistributes(Norm):
    """Changes the layout on its own authority; production would not."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if isinstance(result, DTensor):
            return result.redistribute(placements=[cut(2).placement("tp")])
        return result


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class OwnFunction(Norm):
    """An autograd.Function outside any region."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Square.apply(x))


class LocalSum(Norm):
    """Normalises over the sequence, of which a rank holds a part."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


class OwnMean(Norm):
    """The same on its own part, in an opaque region."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(1, keepdim=True))


class TwoSums(Norm):
    """The same operator twice, over other dims."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x + x.sum(0, keepdim=True) + x.sum(2, keepdim=True)) / 10


class HardCoded(Attention):
    """Knows the number of heads without the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.split = HEADS

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        held, self.heads = self.heads, self.split
        try:
            return super().forward(x, positions, mask)
        finally:
            self.heads = held


class AddsToPending(Attention):
    """Adds a constant to its output, which is a summand on every rank."""

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        mixed, rest = super().forward(x, positions, mask)
        return mixed + 1.0, rest


class NonLinear(Attention):
    """Applies a nonlinear function to a summand."""

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        mixed, rest = super().forward(x, positions, mask)
        return torch.relu(mixed), rest


class OwnScale(Gated):
    """Scales its input by the largest element of its own features."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        gate = gate / gate.abs().amax(-1, keepdim=True)
        return F.linear(F.silu(gate) * up, self.down)


class Detached(Gated):
    """Cuts its output off from the graph where it finds itself sharded."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.down.shape[1] == INNER else result.detach()


class Twice(Gated):
    """Sums over the ranks by counting its output twice."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.down.shape[1] == INNER else 2 * result


class Detour(Layer):
    """Takes the local part of what the attention gave, as code outside torch functions may."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.first(x), positions=positions)[0]
        second = self.second(x)
        plain = second.to_local() if isinstance(second, DTensor) else second
        return x + self.mlp(plain)


class Mixes(Layer):
    """Adds a plain tensor of the whole sequence to a part of it."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(x + torch.ones(x.shape[1], HIDDEN), positions)


class KeepsOld(Layer):
    """Adds what came before the attention's reduction."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        whole = self.attention(self.first(x), positions=positions)[0]
        return x + whole.full_tensor() if isinstance(whole, DTensor) else x + whole


def with_layer(kind: Callable[..., nn.Module], attribute: str) -> nn.Module:
    """The tiny model with one module of layer 0, or the layer itself, replaced."""
    model = Tiny()
    target: Any = model.layers[0]
    new: Any = kind(HIDDEN) if attribute in ("first", "second") else kind()
    if attribute:
        new.load_state_dict(getattr(target, attribute).state_dict())
        setattr(target, attribute, new)
    else:
        new.load_state_dict(target.state_dict())
        model.layers[0] = new
    return model


def layer(kind: Callable[..., nn.Module], attribute: str = "") -> Callable[[], nn.Module]:
    return partial(with_layer, kind, attribute)


# -- faults of this package ---------------------------------------------------------------------


def wrong_reduction() -> AbstractContextManager[Any]:
    return mock.patch.object(steps.Step, "reduction", "avg")


def forgotten_adjoint() -> AbstractContextManager[Any]:
    """Gradients take the way of values."""
    return mock.patch.object(
        Transition, "adjoint", property(lambda self: Transition.compile(self.target, self.source))
    )


def swapped_ranks() -> AbstractContextManager[Any]:
    """What comes from coordinate 0 is put where coordinate 1's belongs."""
    right = vars(steps.RankStep)["unpack"].func

    def swapped(self: steps.RankStep) -> Callable[[Tensor], Tensor]:
        put = right(self)
        if self.kind is not steps.Kind.ALL_GATHER:
            return put  # type: ignore[no-any-return]
        return lambda received: put(torch.cat(received.chunk(2)[::-1]))

    return mock.patch.object(steps.RankStep, "unpack", property(swapped))


def swapped_parameters() -> AbstractContextManager[Any]:
    """A rank keeps the other rank's part of the parameters of production."""
    right = production.local_part

    def wrong(full: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
        return right(full, layout, tuple(1 - each for each in coordinate))

    return mock.patch.object(production, "local_part", wrong)


def no_settlement() -> AbstractContextManager[Any]:
    return mock.patch.object(end_of_backward.EndOfBackward, "install", return_value=None)


def double_settlement() -> AbstractContextManager[Any]:
    right = end_of_backward.Settlement.run

    def twice(self: Any, gradients: Any, *rest: Any) -> None:
        right(self, gradients, *rest)
        right(self, gradients, *rest)

    return mock.patch.object(end_of_backward.Settlement, "run", twice)


def stale_key() -> AbstractContextManager[Any]:
    """Plain arguments do not count in the key of a plan."""
    right = dispatch._key

    def forgetful(value: Any, found: list[Tensor]) -> Any:
        key = right(value, found)
        if isinstance(key, tuple) and key and key[0] in (tuple, list):
            return tuple(
                part[:1] if isinstance(part, tuple) and part[:1] == (int,) else part for part in key
            )
        return key

    return mock.patch.object(dispatch, "_key", forgetful)


def wrong_rows() -> AbstractContextManager[Any]:
    """The embedding looks one row too far."""
    right = vocabulary.shard_vocabulary

    def shifted(module: nn.Embedding, layout: Layout, coordinate: tuple[int, ...]) -> Any:
        own = right(module, layout, coordinate)
        return evolve(own, start=own.start + 1, stop=own.stop + 1) if own.start else own

    return mock.patch.object(production, "shard_vocabulary", shifted)


def unmasked_rows() -> AbstractContextManager[Any]:
    """Rows of other ranks are not cleared."""

    def leave(self: Any, module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output

    return mock.patch.object(vocabulary.VocabularyRange, "leave", leave)


def no_reduction_in_production() -> AbstractContextManager[Any]:
    """Exits of production forget a step."""
    right = production.Exit.__call__

    def leave(self: Any, module: Any, args: Any, output: Any) -> Any:
        return output if "mlp" in self.origin.name else right(self, module, args, output)

    return mock.patch.object(production.Exit, "__call__", leave)


def wrong_order_of_cut() -> AbstractContextManager[Any]:
    right = Chunk.keep

    def wrong(self: Chunk, runs: Runs, index: int) -> Runs:
        return right(self, runs, (index + 1) % self.count)

    return mock.patch.object(Chunk, "keep", wrong)


class Unlabelled(Tiny):
    """Is called without labels although the plan says that they come."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if labels is None:
            return super().forward(ids)
        raise AssertionError("called with labels")


ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"

FAULTS: dict[str, Fault] = {
    "weight cut along the wrong dim": Fault(
        parameter(f"{ATTENTION}.o.weight", cut(0)), "in module layers.0.attention.o", "error"
    ),
    "one of q, k, v left whole": Fault(
        both(
            parameter(f"{ATTENTION}.k.weight", WHOLE),
            parameter(f"{ATTENTION}.k.bias", WHOLE),
        ),
        "in module layers.0.attention",
        "error",
    ),
    "bias not cut with its weight": Fault(
        parameter(f"{ATTENTION}.q.bias", WHOLE), "in module layers.0.attention.q", "error"
    ),
    "bias added once per rank": Fault(
        output_bias,
        "in module layers.0.attention.o",
        "error",
        partial(Tiny, bias=True),
    ),
    "reduction missing on exit": Fault(
        changed(ATTENTION, "outputs", "0", inside=cut(1)),
        r"boundary layers.0.attention, output '0': expected tp: S\(1\), found tp: P\(sum\)",
    ),
    "reduction missing between neighbours": Fault(
        changed(ATTENTION, "outputs", "0", outside=PENDING), "in module layers.0", "error"
    ),
    "reduction missing after the embedding": Fault(
        changed("embed", "outputs", "", inside=WHOLE),
        r"boundary embed, output '': expected R, found tp: P\(sum\)",
    ),
    "reduction twice": Fault(
        parameter("embed.weight", WHOLE),
        r"boundary embed, output '': expected tp: P\(sum\), found R",
    ),
    "reduction with another operation": Fault(
        changed(ATTENTION, "outputs", "0", inside=AVERAGED),
        r"output '0': expected tp: P\(avg\), found tp: P\(sum\)",
    ),
    "head's output taken for another dim": Fault(
        changed("head", "outputs", "", inside=cut(1)), r"boundary head, output '': expected"
    ),
    "sum of gradients missing on entry": Fault(
        changed(ATTENTION, "inputs", "x", inside=WHOLE),
        "in module layers.0.attention.q",
        "error",
    ),
    "sum of gradients missing at the head": Fault(
        both(
            changed("head", "inputs", "input", inside=WHOLE, outside=WHOLE),
            changed("norm", "outputs", "", outside=WHOLE),
        ),
        "in module head",
        "error",
    ),
    "parameter's gradient not declared a summand": Fault(
        parameter(f"{ATTENTION}.q_norm.weight", WHOLE),
        "in module layers.0.attention.q_norm",
        "error",
    ),
    "parameter's gradient declared a summand and is none": Fault(
        parameter("layers.0.first.weight", SUMMED),
        "layers.0.first",
        "error",
        sequence_parallel=False,
    ),
    "neighbours disagree": Fault(
        changed("norm", "inputs", "x", outside=WHOLE),
        r"boundary norm, input 'x': expected R, found tp: S\(1\).*made by boundary layers.1, "
        r"which declares tp: S\(1\) outside",
    ),
    "inputs swapped": Fault(
        changed(MLP, "inputs", "x", outside=SUMMED, inside=cut(1)),
        r"boundary layers.0.mlp, input 'x': expected tp: R \(gradient P\(sum\)\), "
        r"found tp: S\(1\).*made by boundary layers.0.second",
    ),
    "layout lost on exit": Fault(
        lambda plan: plan,
        "boundary layers.0.first, output '': a plain tensor .* lost its layout",
        model=partial(with_layer, LosesLayout, "first"),
    ),
    "layout lost on the way": Fault(
        lambda plan: plan,
        "boundary layers.0.mlp, input 'x': a plain tensor .* lost its layout",
        model=partial(with_layer, Detour, ""),
    ),
    "size not localized": Fault(
        lambda plan: with_boundary(plan, ATTENTION, localize=[]),
        "in module layers.0.attention",
        "error",
    ),
    "another size localized": Fault(
        lambda plan: with_boundary(plan, ATTENTION, localize=[LocalAttribute("heads", "tp", 2)]),
        "boundary layers.0.attention: attribute 'heads' is 4",
        "plan",
    ),
    # Inside an opaque region the plan is trusted; only values show the fault.
    "opaque: sections cut as one": Fault(
        parameter(f"{MLP}.gate_up", cut(0)), "output of boundary layers.0.mlp", "report"
    ),
    "opaque: sections of other lengths": Fault(
        parameter(f"{MLP}.gate_up", Contract({"tp": SectionedShard(0, (INNER + 4, INNER - 4))})),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: reduction twice": Fault(
        both(parameter(f"{MLP}.gate_up", WHOLE), parameter(f"{MLP}.down", WHOLE)),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: reduction with another operation": Fault(
        changed(MLP, "outputs", "", inside=AVERAGED), "output of boundary layers.0.mlp", "report"
    ),
    "opaque: sum of gradients missing on entry": Fault(
        changed(MLP, "inputs", "x", inside=WHOLE),
        "gradient of the output of boundary layers.0.second",
        "report",
    ),
    "opaque: parameter's gradient not summed": Fault(
        both(opaque(ATTENTION), parameter(f"{ATTENTION}.q_norm.weight", WHOLE)),
        "gradient of layers.0.attention.q_norm.weight",
        "report",
    ),
    "opaque: parameter's gradient summed twice": Fault(
        both(opaque("layers.0.first"), parameter("layers.0.first.weight", SUMMED)),
        "gradient of layers.0.first.weight",
        "report",
        sequence_parallel=False,
    ),
    "opaque: bias added once per rank": Fault(
        both(output_bias, opaque(ATTENTION), opaque("layers.1.attention")),
        "output of boundary layers.0.attention",
        "report",
        partial(Tiny, bias=True),
    ),
    # Parameters.
    "query cut along the wrong dim": Fault(
        parameter(f"{ATTENTION}.q.weight", cut(1)), "in module layers.0.attention.q"
    ),
    "value cut along the wrong dim": Fault(
        parameter(f"{ATTENTION}.v.weight", cut(1)), "in module layers.0.attention.v"
    ),
    "output projection left whole": Fault(
        parameter(f"{ATTENTION}.o.weight", WHOLE), "in module layers.0.attention.o"
    ),
    "query left whole": Fault(
        both(parameter(f"{ATTENTION}.q.weight", WHOLE), parameter(f"{ATTENTION}.q.bias", WHOLE)),
        "in module layers.0.attention",
    ),
    "wrong rank order of the query's heads": Fault(
        both(
            parameter(f"{ATTENTION}.q.weight", Contract({"tp": StridedShard(0, 2)})),
            parameter(f"{ATTENTION}.q.bias", Contract({"tp": StridedShard(0, 2)})),
        ),
        "in module layers.0.attention",
    ),
    "wrong rank order of the output projection": Fault(
        parameter(f"{ATTENTION}.o.weight", Contract({"tp": StridedShard(1, 2)})),
        "in module layers.0.attention.o",
    ),
    "sections in a weight that has none": Fault(
        both(
            parameter(f"{ATTENTION}.v.weight", Contract({"tp": SectionedShard(0, (4, 4))})),
            parameter(f"{ATTENTION}.v.bias", Contract({"tp": SectionedShard(0, (4, 4))})),
        ),
        "in module layers.0.attention",
    ),
    "bias cut in another order than its weight": Fault(
        parameter(f"{ATTENTION}.k.bias", Contract({"tp": StridedShard(0, 2)})),
        "in module layers.0.attention.k",
    ),
    "head norm cut": Fault(
        parameter(f"{ATTENTION}.q_norm.weight", cut(0)), "in module layers.0.attention.q_norm"
    ),
    "norm cut": Fault(parameter("layers.0.first.weight", cut(0)), "in module layers.0.first"),
    "last norm cut": Fault(parameter("norm.weight", cut(0)), "in module norm"),
    "embedding cut along its features": Fault(
        parameter("embed.weight", cut(1)), r"boundary embed, output ''"
    ),
    "head cut along its features": Fault(parameter("head.weight", cut(1)), "in module head"),
    "head left whole": Fault(
        parameter("head.weight", WHOLE), r"boundary head, output ''|module head"
    ),
    "norm's gradient not declared a summand": Fault(
        parameter("layers.0.second.weight", WHOLE), "in module layers.0.second"
    ),
    "last norm's gradient not declared a summand": Fault(
        parameter("norm.weight", WHOLE), "in module norm"
    ),
    "norm's gradient declared an average": Fault(
        parameter("layers.0.second.weight", Contract({}, {"tp": Partial("avg")})),
        "layers.0.second",
    ),
    "last norm's gradient declared a summand and is none": Fault(
        parameter("norm.weight", SUMMED), "norm", sequence_parallel=False
    ),
    # Boundaries.
    "swapped contract at the attention's entry": Fault(
        changed(ATTENTION, "inputs", "x", outside=SUMMED, inside=cut(1)),
        "boundary layers.0.attention, input 'x'",
    ),
    "swapped contract at the attention's exit": Fault(
        changed(ATTENTION, "outputs", "0", outside=PENDING, inside=cut(1)),
        "boundary layers.0.attention, output '0'",
    ),
    "swapped contract at the embedding's exit": Fault(
        changed("embed", "outputs", "", outside=PENDING, inside=WHOLE), "boundary embed, output ''"
    ),
    "swapped contract of the head": Fault(
        changed("head", "outputs", "", outside=cut(-1), inside=WHOLE), "boundary head, output ''"
    ),
    "swapped contract of a layer": Fault(
        changed("layers.0", "inputs", "x", outside=cut(1), inside=WHOLE),
        "boundary layers.0, input 'x'",
    ),
    "gather missing on entry": Fault(
        changed(ATTENTION, "inputs", "x", inside=cut(1)), "in module layers.0.attention"
    ),
    "gather missing at the head": Fault(
        changed("norm", "outputs", "", outside=cut(1)), "boundary head, input 'input'"
    ),
    "slice missing at the first layer": Fault(
        changed("layers.0", "inputs", "x", inside=WHOLE), "boundary layers.0.first, input 'x'"
    ),
    "slice twice": Fault(
        changed("embed", "outputs", "", outside=cut(1)), "boundary layers.0, input 'x'"
    ),
    "reduction with the maximum": Fault(
        changed(ATTENTION, "outputs", "0", inside=LARGEST),
        "boundary layers.0.attention, output '0'",
    ),
    "embedding reduced with the average": Fault(
        changed("embed", "outputs", "", inside=AVERAGED), "boundary embed, output ''"
    ),
    "entry cut along the features": Fault(
        changed(ATTENTION, "inputs", "x", outside=cut(2)), "boundary layers.0.attention, input 'x'"
    ),
    "exit scattered along another dim": Fault(
        changed(ATTENTION, "outputs", "0", outside=cut(2)), "in module layers.0"
    ),
    "exit left whole in a stream that is cut": Fault(
        changed(ATTENTION, "outputs", "0", outside=WHOLE), "in module layers.0"
    ),
    "norm's output cut along another dim": Fault(
        changed("layers.0.first", "outputs", "", outside=cut(2)),
        "boundary layers.0.attention, input 'x'",
    ),
    "boundary of the embedding missing": Fault(
        without_boundary("embed"), "boundary layers.0, input 'x': expected R, found tp: P"
    ),
    "boundary of the attention missing": Fault(
        without_boundary(ATTENTION), "in module layers.0.attention"
    ),
    "boundary of the head missing": Fault(
        without_boundary("head"), "in module head|in module \\(root\\)"
    ),
    "boundary of the model missing": Fault(
        without_boundary(""), r"cross_entropy: a plain tensor.*in module \(root\)"
    ),
    "boundary of a norm missing": Fault(
        both(
            without_boundary("layers.1.second"),
            changed("layers.1.mlp", "inputs", "x", outside=WHOLE),
        ),
        "boundary layers.1.mlp, input 'x'",
    ),
    "gradient not whole at the head": Fault(
        changed("norm", "outputs", "", outside=WHOLE), "boundary head, input 'input'"
    ),
    "optional argument declared present": Fault(
        changed("", "inputs", "labels", optional=False),
        "boundary \\(root\\), input 'labels'",
        model=partial(Unlabelled),
    ),
    # Modules.
    "whole tensor where a part is declared": Fault(
        same, "boundary layers.0.first, output ''", model=layer(Gathers, "first")
    ),
    "module redistributes by itself": Fault(
        same, "boundary layers.0.second, output ''", model=layer(Redistributes, "second")
    ),
    "autograd.Function outside a region": Fault(
        same, "in module layers.0.first", model=layer(OwnFunction, "first")
    ),
    "mean over a dim that is cut": Fault(
        same, "in module layers.0.first", model=layer(LocalSum, "first")
    ),
    "number of heads hard-coded": Fault(
        same, "in module layers.0.attention", model=layer(HardCoded, "attention")
    ),
    "constant added to a summand": Fault(
        same, "in module layers.0.attention", model=layer(AddsToPending, "attention")
    ),
    "nonlinear function of a summand": Fault(
        same, "in module layers.0.attention", model=layer(NonLinear, "attention")
    ),
    "plain tensor beside parts": Fault(same, "in module layers.0", model=layer(Mixes)),
    "whole tensor beside parts": Fault(same, "in module layers.0", model=layer(KeepsOld)),
    # Inside opaque regions.
    "opaque: scales by its own largest feature": Fault(
        same, "output of boundary layers.0.mlp", "report", layer(OwnScale, "mlp")
    ),
    "opaque: cuts its output off": Fault(
        same,
        "gradient of the output of boundary layers.0|gradient of layers.0.mlp",
        "report",
        layer(Detached, "mlp"),
    ),
    "opaque: counts its output twice": Fault(
        same, "output of boundary layers.0.mlp", "report", layer(Twice, "mlp")
    ),
    "opaque: mean over its own part": Fault(
        opaque("layers.0.first"),
        "output of boundary layers.0.first",
        "report",
        layer(OwnMean, "first"),
    ),
    "opaque: sections in another order": Fault(
        parameter(f"{MLP}.down", Contract({"tp": StridedShard(1, 2)})),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: three sections": Fault(
        parameter(f"{MLP}.gate_up", Contract({"tp": SectionedShard(0, (8, 8, 8))})),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: down cut along the wrong dim": Fault(
        parameter(f"{MLP}.down", cut(0)), "in module layers.0.mlp"
    ),
    "opaque: gather missing on entry": Fault(
        changed(MLP, "inputs", "x", inside=cut(1)), "layers.0.mlp|layers.0"
    ),
    "opaque: reduction missing on exit": Fault(
        changed(MLP, "outputs", "", inside=WHOLE), "output of boundary layers.0.mlp", "report"
    ),
    "opaque: wrong rank order of the queries": Fault(
        both(
            opaque(ATTENTION),
            parameter(f"{ATTENTION}.q.weight", Contract({"tp": StridedShard(0, 2)})),
            parameter(f"{ATTENTION}.q.bias", Contract({"tp": StridedShard(0, 2)})),
        ),
        "output of boundary layers.0.attention",
        "report",
    ),
    "opaque: output is not like the input it names": Fault(
        changed(MLP, "outputs", "", inside=cut(-1), like="x"),
        "boundary layers.0.mlp, output '': declared to be like input 'x'",
    ),
    "opaque: head norm's gradient averaged": Fault(
        both(
            opaque(ATTENTION),
            parameter(f"{ATTENTION}.q_norm.weight", Contract({}, {"tp": Partial("avg")})),
        ),
        "gradient of layers.0.attention.q_norm.weight",
        "report",
    ),
    # Found when the plan is applied.
    "parameter unknown": Fault(
        lambda plan: evolve(
            plan, parameters=[*plan.parameters, ParameterSpec("gone.weight", "x", (2,), WHOLE, "")]
        ),
        "parameter gone.weight",
        "plan",
    ),
    "parameter forgotten": Fault(
        without_parameter("layers.1.first.weight"), "parameter layers.1.first.weight", "plan"
    ),
    "parameter of another shape": Fault(
        lambda plan: with_parameter(plan, "norm.weight", shape=(HIDDEN + 1,)),
        "parameter norm.weight has shape",
        "plan",
    ),
    "dim that the parameter lacks": Fault(
        parameter("norm.weight", cut(1)), "parameter norm.weight", "plan"
    ),
    "axis that the plan does not shard over": Fault(
        parameter("norm.weight", Contract({"dp": cut(0).placement("tp")})),
        "parameter norm.weight is placed on",
        "plan",
    ),
    "uneven cut": Fault(
        parameter(f"{ATTENTION}.q.weight", Contract({"tp": RaggedShard((0,), (3, 5))})),
        "parameter layers.0.attention.q.weight",
        "plan",
    ),
    "ragged tensor at a boundary": Fault(
        changed(ATTENTION, "inputs", "x", inside=Contract({"tp": RaggedShard((1,), (1, 1))})),
        "boundary layers.0.attention, tensor 'x'",
        "plan",
    ),
    "boundary unknown": Fault(
        more_boundaries(BoundarySpec("layers.9", BoundaryKind.LAYER)), "boundary layers.9", "plan"
    ),
    "boundary twice": Fault(
        more_boundaries(BoundarySpec("norm", BoundaryKind.NORM)),
        "boundary norm is in the plan",
        "plan",
    ),
    "argument unknown": Fault(
        lambda plan: with_boundary(plan, "norm", inputs=[BoundaryTensor("y", cut(1), cut(1))]),
        "boundary norm: Norm.forward takes no argument 'y'",
        "plan",
    ),
    "output declared twice": Fault(
        lambda plan: with_boundary(
            plan,
            "norm",
            outputs=[BoundaryTensor("", WHOLE, cut(1)), BoundaryTensor("", WHOLE, cut(1))],
        ),
        "boundary norm: output '' is declared twice",
        "plan",
    ),
    "size localized over another axis": Fault(
        lambda plan: with_boundary(
            plan, ATTENTION, localize=[LocalAttribute("heads", "dp", HEADS)]
        ),
        "boundary layers.0.attention: attribute 'heads'",
        "plan",
    ),
    "attribute unknown": Fault(
        lambda plan: with_boundary(
            plan, ATTENTION, localize=[LocalAttribute("groups", "tp", HEADS)]
        ),
        "boundary layers.0.attention: attribute 'groups'",
        "plan",
    ),
    "tie unknown to the module": Fault(
        lambda plan: evolve(plan, tied=[("embed.weight", "head.weight")]),
        "'embed.weight', 'head.weight'",
        "plan",
    ),
    "vocabulary in pieces that are not one range": Fault(
        parameter("embed.weight", Contract({"tp": StridedShard(0, 2)})),
        "parameter embed.weight",
        "plan",
    ),
    "contract with a gradient that cannot be": Fault(
        lambda plan: parameter(
            "norm.weight", Contract({"tp": cut(0).placement("tp")}, {"tp": Partial()})
        )(plan),
        "mesh axis 'tp'",
        "error",
    ),
    # In this package: values, ranks, sums and keys.
    "planted: reductions take the average": Fault(same, "embed", "report", plant=wrong_reduction),
    "planted: gradients take the way of values": Fault(
        same, "gradient of the output of boundary", "report", plant=forgotten_adjoint
    ),
    "planted: gathered pieces in the wrong order": Fault(
        same, "output of boundary", "report", plant=swapped_ranks
    ),
    "planted: production keeps another rank's part": Fault(
        same, "output of boundary embed", "report", plant=swapped_parameters
    ),
    "planted: gradients not settled": Fault(
        same, "gradient of layers.0.first.weight", "report", plant=no_settlement
    ),
    "planted: gradients settled twice": Fault(
        same, "gradient of layers.0.first.weight", "report", plant=double_settlement
    ),
    "planted: stale cache key": Fault(
        same, "in module|boundary", "any", layer(TwoSums, "second"), plant=stale_key
    ),
    "planted: production looks up other rows": Fault(
        same, "output of boundary embed", "report", plant=wrong_rows
    ),
    "planted: rows of other ranks are not cleared": Fault(
        same, "output of boundary embed", "report", plant=unmasked_rows
    ),
    "planted: production forgets a reduction": Fault(
        same, "in module layers.0", "error", plant=no_reduction_in_production
    ),
    "planted: shards from the wrong coordinate": Fault(
        same, "output of boundary layers.0.mlp", "report", plant=wrong_order_of_cut
    ),
}
