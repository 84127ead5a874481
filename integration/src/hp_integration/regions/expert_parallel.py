"""Expert parallelism: every rank of the axis holds some experts, and tokens travel to them.

For modules that hold their experts fused, `[E, ...]` parameters, and take
`(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k])`: what the expert modules of
transformers are called with, whatever implementation (loop, batched, grouped) runs inside. The
module's own code computes; hooks around it change what it sees. On entry a token goes to the owner
of each of its k experts (one all-to-all of counts, one of tokens, one of weights); the module then
has rows of one expert each, numbered locally; on exit the results go home (one all-to-all) and are
summed over k.

Ranks of the axis see different batches, as data-parallel ranks do, and the loss is the mean of
theirs. A rank's experts see the tokens of all of them, so their gradient would be the sum; it is
divided by the axis's size here, where it arises. Other parameters are averaged over the axis at the
end of backward (gradient placement `P(avg)`).

Obligations: the routing index holds expert numbers in `[0, E)`; `E`, the sentinel that transformers
gives to dropped choices, is not sent. Backward runs the same collectives on every rank: a rank that
was sent nothing still has a graph, and its experts' gradients are zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from hp_dtensor.contracts import Argument, ContractError, ModelAxes
from hp_dtensor.mesh import mesh_axis
from hp_dtensor.plan import BoundarySpec
from hp_integration.regions.exchange import Exchange
from hp_platform import Origin
from hp_platform.axis import MeshAxis
from hp_platform.collectives import all_to_all

__all__ = ["EXPERT_AXIS", "ExpertDispatch", "expert_parallel"]

EXPERT_AXIS = "ep"


def expert_parallel(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Installs expert dispatch on a fused expert module (`hp_dtensor.regions.RegionFunction`).

    The boundary declares the module's hidden states, routing index and routing weights, in this
    order, and its parameters' first dim is cut over the axis `ep`.

    Raises:
        ContractError: the boundary declares other inputs.
    """
    found = [Argument.of(module, tensor.where) for tensor in boundary.inputs]
    arguments = tuple(argument for argument in found if argument is not None)
    name = boundary.module or "(root)"
    if len(arguments) != 3:
        raise ContractError(
            f"boundary {name}: expert dispatch needs hidden states, routing index and routing "
            f"weights as inputs, found {[tensor.where for tensor in boundary.inputs]}"
        )
    axis = mesh_axis(axes.mesh, axes.abstract.axis_index(EXPERT_AXIS))  # type: ignore[arg-type]
    local = next(p for p in module.parameters(recurse=False)).shape[0]
    dispatch = ExpertDispatch(arguments, axis, local, Origin("hp_integration", name, "forward"))
    module.register_forward_pre_hook(dispatch.enter, with_kwargs=True)
    module.register_forward_hook(dispatch.leave, with_kwargs=True)


@frozen(eq=False)
class Journey:
    """What it takes to bring the tokens of one call home.

    Attributes:
        exchange: the way out.
        token: for every row sent, the token (row of the caller's hidden states) it is of.
        tokens: number of the caller's tokens.
        hidden, weights: the rows received, on which the module computes.
    """

    exchange: Exchange
    token: Tensor
    tokens: int
    hidden: Tensor
    weights: Tensor


@frozen(eq=False)
class ExpertDispatch:
    """The hooks of one expert module.

    Attributes:
        arguments: hidden states, routing index, routing weights.
        axis: the ranks among which the experts are shared.
        local: experts of each rank.
    """

    arguments: tuple[Argument, ...]
    axis: MeshAxis
    local: int
    origin: Origin

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Tokens to the owners of their experts."""
        hidden, index, weights = (a.read(args, kwargs) for a in self.arguments)
        self._check(hidden, index, weights)
        journey, local_index = self._send(hidden, index, weights)
        # The journey travels with the index: the module may be called again before it returns.
        local_index._hp_journey = journey  # type: ignore[attr-defined]
        for argument, value in zip(
            self.arguments, (journey.hidden, local_index, journey.weights), strict=True
        ):
            args, kwargs = argument.write(args, kwargs, value)
        return args, kwargs

    def leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Results to the tokens they are of, summed over each token's experts."""
        journey: Journey = self.arguments[1].read(args, kwargs)._hp_journey
        if sum(journey.exchange.received) == 0:
            output = _without_rows(output, journey, module)
        (home,) = journey.exchange.back.apply(output, gradient_factor=1 / self.axis.size)
        result = home.new_zeros(journey.tokens, home.shape[-1])
        return result.index_add(0, journey.token, home)

    def _send(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Journey, Tensor]:
        choices = index.shape[-1]
        order, counts = self._by_expert(index.reshape(-1))
        received = self._counts(counts)
        exchange = Exchange(
            self.axis,
            sent=tuple(counts.view(self.axis.size, self.local).sum(1).tolist()),
            received=tuple(received.sum(1).tolist()),
            origin=self.origin,
        )
        token = order // choices
        # Rows travel with the weight of their one expert; what backward brings home is undone of
        # the division by the axis's size that the way back has put on everything.
        rows, row_weights = exchange.apply(
            hidden[token],
            weights.reshape(-1)[order].unsqueeze(-1),
            gradient_factor=float(self.axis.size),
        )
        numbers = torch.arange(self.local, device=index.device).repeat(self.axis.size)
        local_index = numbers.repeat_interleave(received.reshape(-1)).unsqueeze(-1)
        journey = Journey(exchange, token, hidden.shape[0], rows, row_weights)
        return journey, local_index.to(index.dtype)

    def _by_expert(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Choices in the order of their experts, dropped ones left out, and choices per expert."""
        experts = self.local * self.axis.size
        counts = torch.bincount(flat, minlength=experts + 1)
        if counts.numel() > experts + 1:
            raise ContractError(
                f"{self.origin.name}: the routing index holds expert {int(flat.max())}, but "
                f"there are {experts} experts over {self.axis.size} ranks of {self.axis.name!r}"
            )
        counts = counts[:experts]
        return torch.argsort(flat, stable=True)[: int(counts.sum())], counts

    def _counts(self, counts: Tensor) -> Tensor:
        """Rows that every rank sends to each expert here, [ranks, local experts]."""
        origin = Origin(self.origin.package, f"{self.origin.name} counts", "forward")
        blocks = counts.view(self.axis.size, self.local)
        return all_to_all(blocks.contiguous(), self.axis, origin=origin).wait()

    def _check(self, hidden: Any, index: Any, weights: Any) -> None:
        """Shapes are the same on every rank but for the number of tokens, so all refuse alike."""
        shapes = [tuple(getattr(value, "shape", ())) for value in (hidden, index, weights)]
        fits = [len(shape) == 2 for shape in shapes]
        if all(fits) and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]:
            return
        raise ContractError(
            f"{self.origin.name}: expert dispatch takes hidden states [T, H], routing index [T, k] "
            f"and routing weights [T, k], found {shapes}; replicate the experts with an override"
        )

    def __deepcopy__(self, memo: object) -> ExpertDispatch:
        # A copy of the module communicates over the same groups.
        return self


def _without_rows(output: Tensor, journey: Journey, module: nn.Module) -> Tensor:
    """The empty result of a rank that was sent nothing, made to depend on all that others' do."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    made: Tensor = _Attached.apply(output, journey.hidden, journey.weights, *parameters)
    return made


class _Attached(torch.autograd.Function):
    """The first tensor; the others receive zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (gradients[0], *(torch.zeros_like(other) for other in ctx.saved_tensors))
