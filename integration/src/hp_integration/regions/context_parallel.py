"""Context parallelism of the all-gather family: queries stay sharded along the sequence.

Every rank of the axis holds a contiguous part of the sequence in every layer. Inside attention,
after rotary embedding, keys and values are gathered over the axis (backward: their gradients are
reduce-scattered) and a rank's queries attend to all positions that the mask allows. Key/value heads
are gathered before they are repeated for grouped queries, so the message is the small one. This is
the scheme of Llama 3's training (Grattafiori et al. 2024, section 3.3.2), with contiguous parts: a
causal mask gives later ranks more work.

Masks. The model makes its mask for the whole sequence (causal, sliding window, padding, packed
documents); a rank uses the rows of its queries. Where the model leaves the mask out because a
causal flag will do, the rows of a causal mask are made here: the flag would align a rank's first
query with the first key of all.

The module's own code runs, with the attention function that it looks up by `config` replaced. That
is transformers' public way (`AttentionInterface.register`); the function registered holds no
state, what it needs is on the module. Attention modules that do not look their function up
(`ALL_ATTENTION_FUNCTIONS`) cannot be planned so; the planner refuses them.

Obligations: hidden states, position embeddings and position ids arrive with this rank's rows, masks
whole; the output has this rank's rows. Attention weights are not returned.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.contracts import ContractError, ModelAxes, layout_under
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import BoundarySpec, replicated_with_partial_gradient, sharded
from hp_dtensor.transition import Transition
from hp_platform import Origin

__all__ = ["CONTEXT_AXIS", "ContextParallelAttention", "context_parallel"]

CONTEXT_AXIS = "cp"
IMPLEMENTATION = "hp_context_parallel"
SUPPORTED = ("eager", "sdpa")
_STATE = "_hp_context_parallel"

SHARDED = sharded(CONTEXT_AXIS, 2)
GATHERED = replicated_with_partial_gradient(CONTEXT_AXIS)
"""Layouts of keys and values, [batch, heads, sequence, head_dim], before and after."""


def context_parallel(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Makes an attention module gather keys and values (`hp_dtensor.regions.RegionFunction`).

    Raises:
        ContractError: the attention implementation is not one whose masks are understood.
    """
    from transformers import AttentionInterface

    name = boundary.module or "(root)"
    config = getattr(module, "config", None)
    chosen = getattr(config, "_attn_implementation", None) or "eager"
    if config is None or chosen not in SUPPORTED:
        raise ContractError(
            f"boundary {name}: context-parallel attention works with attn_implementation "
            f"{' or '.join(SUPPORTED)}, found {chosen!r} on {type(module).__name__}; build the "
            "model with one of these"
        )
    state = ContextParallelAttention(
        mesh=axes.mesh,
        coordinate=axes.coordinate[axes.abstract.axis_index(CONTEXT_AXIS)],
        size=axes.abstract.size(CONTEXT_AXIS),
        inner=_inner(module, chosen),
        is_eager=chosen == "eager",
        origin=Origin("hp_integration", name, "forward"),
    )
    setattr(module, _STATE, state)
    # Idempotent, and without state: see the module's docstring.
    AttentionInterface.register(IMPLEMENTATION, _attend)
    own = copy.copy(config)
    own._attn_implementation_internal = IMPLEMENTATION
    module.config = own


def _inner(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that the module would call."""
    code = sys.modules[inspect.unwrap(type(module).forward).__module__]
    eager = getattr(code, "eager_attention_forward", None)
    functions = getattr(code, "ALL_ATTENTION_FUNCTIONS", None)
    if functions is None or (implementation == "eager" and eager is None):
        raise ContractError(
            f"{type(module).__name__} does not look its attention function up in "
            "ALL_ATTENTION_FUNCTIONS, so context parallelism cannot gather its keys and values; "
            "override the module with none"
        )
    found: Callable[..., Any] = functions.get_interface(implementation, eager)
    return found


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """What the module finds in place of its attention function."""
    state: ContextParallelAttention = getattr(module, _STATE)
    return state(module, *args, **kwargs)


@frozen(eq=False)
class ContextParallelAttention:
    """Attention of this rank's queries to the keys and values of all ranks.

    Attributes:
        mesh: holds the axis `cp`; coordinate, size: this rank's place on it.
        inner: the attention function that computes, with transformers' arguments.
        is_eager: `inner` takes an additive mask and nothing in place of one.
    """

    mesh: DeviceMesh | AbstractMesh
    coordinate: int
    size: int
    inner: Callable[..., Any]
    is_eager: bool
    origin: Origin

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`[B, H, S/cp, D]` each, mask of the whole sequence; returns `[B, S/cp, H, D]`."""
        self._check(query, key, kwargs)
        key, value = self._gather(key, value)
        mask = self._rows(module, query, key, attention_mask, kwargs)
        output, _ = self.inner(module, query, key, value, mask, **kwargs)
        return output, None

    def _check(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
        if query.shape[2] != key.shape[2]:
            raise ContractError(
                f"{self.origin.name}: {query.shape[2]} query and {key.shape[2]} key positions on "
                "this rank; context parallelism is for whole sequences: call the model without a "
                "filled cache"
            )
        if kwargs.get("output_attentions"):
            raise ContractError(
                f"{self.origin.name}: attention weights would have only this rank's queries; call "
                "the model without output_attentions"
            )
        if kwargs.get("position_bias") is not None:
            raise ContractError(
                f"{self.origin.name}: a position bias is for the whole sequence; override the "
                "module with none"
            )

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence, in one message where their heads agree."""
        if key.shape[:3] != value.shape[:3]:
            return self._gathered(key), self._gathered(value)
        both = self._gathered(torch.cat((key, value), dim=-1))
        gathered_key, gathered_value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        return gathered_key, gathered_value

    def _gathered(self, local: Tensor) -> Tensor:
        shape = (*local.shape[:2], local.shape[2] * self.size, local.shape[3])
        transition = Transition.compile(
            layout_under(SHARDED, self.mesh, shape), layout_under(GATHERED, self.mesh, shape)
        )
        return transition.apply(local.contiguous(), origin=self.origin)

    def _rows(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        """The mask's rows of this rank's queries."""
        queries, keys = query.shape[2], key.shape[2]
        first = self.coordinate * queries
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == keys:
            whole = mask.shape[-2] == keys
            if whole or mask.shape[-2] == 1:
                return mask[:, :, first : first + queries] if whole else mask
        if mask is not None:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ContractError(
                f"{self.origin.name}: expected a mask [batch, heads, {keys}, {keys}] of the whole "
                f"sequence or none, found {found}"
            )
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if self.is_eager or not causal:
            return None
        positions = torch.arange(keys, device=query.device)
        rows = positions[first : first + queries]
        return (rows[:, None] >= positions[None, :])[None, None]

    def __deepcopy__(self, memo: object) -> ContextParallelAttention:
        # A copy of the module communicates over the same groups.
        return self
