"""One parameter of a unit: its shard, its gathered form, and its places in the modules.

The shard is what optimizers, checkpoints and gradient clipping see: a `DTensor` parameter. The
gathered form is what `forward` and `backward` see: a plain leaf, a view of its bucket's persistent
buffer. Exactly one of the two is registered on the owning modules at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import attach_layout
from hp_fsdp.cut import AnyCut, partial_gradient_layout, sharded_layout
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError
from hp_fsdp.schedule import Candidate

SHARDED_MARK = "_hp_fsdp_sharded"
"""Attribute of a parameter that a unit has taken, of its gathered form and of its origin."""

CALL_ADVICE = (
    "these parameters are under fully_shard and whole only inside forward. Call the module itself, "
    "module(...), rather than module.forward(...); for other methods that compute, call "
    "hp_fsdp.register_fsdp_forward_method(module, 'name') once after fully_shard. To load full "
    "values, call hp_fsdp.load_full_state_dict(module, state); to compute with a shard and a full "
    "tensor outside forward, cut that one alike by hp_dtensor.distribute_tensor. "
    "DistributedDataParallel and PyTorch's own sharding do not take them: to repeat shards over "
    "replicas, give fully_shard a mesh of two axes"
)
"""Shown where a shard meets a plain tensor, or is read by what does not know it."""


def advise(shard: Tensor) -> None:
    """Where this one meets a plain tensor, the error says how to call the module."""
    shard._hp_advice = CALL_ADVICE  # type: ignore[attr-defined]


class ShardedParameter:
    """A parameter under `fully_shard`.

    Attributes:
        name: qualified name, for errors.
        owners: every place where it is registered.
        cut: how it is divided over the shard axis.
        layout: layout of `sharded`.
        partial_layout: `layout` with the model-axis partial gradients the parameter declared, or
            None where it declared none.
        of_unit: all parameters of the unit, for errors.
        sharded: the `DTensor` parameter that holds this rank's shard.
        full: the gathered form, or None before the first gather; its values are valid only while
            the unit is gathered.
        shown: what the modules see of it: itself, or a DTensor of PyTorch's over it.
        parallel: how PyTorch's tensor parallelism describes the parameter, or None.
    """

    def __init__(self, candidate: Candidate, cut: AnyCut, data: DataMesh) -> None:
        self.name = candidate.name
        self.owners = candidate.owners
        self.cut = cut
        self._source = candidate.source
        self._parameter: nn.Parameter | None = candidate.parameter
        self._original: nn.Parameter | None = candidate.original
        self.parallel = candidate.parallel
        self.layout = sharded_layout(self.name, cut, self._source, data)
        self.partial_layout = partial_gradient_layout(self.layout, self._source)
        # Where this holds, the shard's own gradient is read as what has been summed.
        self._reads_as_summed = self.layout.of_gradient == self.layout
        if self.layout.local_shape() != cut.local_shape:
            raise ShardingError(
                f"parameter {self.name!r}: {self.layout} gives this rank "
                f"{self.layout.local_shape()}, but its part of the local tensor {cut.shape} is "
                f"{cut.local_shape}"
            )
        self.of_unit: Sequence[ShardedParameter] = (self,)
        self.sharded: nn.Parameter
        self.full: nn.Parameter | None = None
        self.shown: Tensor | None = None
        self._gathered_version = -1
        # A dry run: the mesh itself is on the meta device.
        self._without_values = data.shard.device.type == "meta"

    def take_original(self, local: Tensor) -> None:
        """Copies this rank's share of the original into `local` and registers that as the shard."""
        original, self._parameter = self._parameter, None
        replaced, self._original = self._original, None
        assert original is not None
        if not local.is_meta:
            local.copy_(self.cut.take(original.detach()))
        self.sharded = nn.Parameter(self.as_dtensor(local), requires_grad=original.requires_grad)
        # The original too: where it is still registered, a tie would be cut without a word.
        setattr(replaced, SHARDED_MARK, True)
        self._mark(self.sharded)
        self.register(self.sharded)

    # -- the shard ---------------------------------------------------------------------------

    def as_dtensor(self, local: Tensor) -> DTensor:
        """A value or gradient of this rank's shard, with its layout."""
        return DTensor.of_layout(local, self.layout)

    @property
    def local(self) -> Tensor:
        """This rank's shard as a plain tensor: the leaf that holds the gradient."""
        # Asked several times a step. A parameter is no result of an autograd.Function, whose graph
        # `to_local` would see to.
        shard: Any = self.sharded
        local: Tensor = shard._local_tensor
        return local

    def adopt(self) -> Tensor:
        """Takes over the parameter that the modules have registered now; returns `local`.

        `Module.to_empty`, `load_state_dict(assign=True)` and the like replace it.

        Raises:
            ShardingError: it is on the meta device, or is not a shard of this layout.
        """
        owner = self.owners[0]
        registered = owner.module._parameters[owner.name]
        if registered is not self.sharded and registered is not self.shown:
            self.sharded = self._checked_replacement(registered)
            self.register(self.sharded)
        local = self.local
        if local.is_meta and not self._without_values:
            names = [other.name for other in self.of_unit if other._is_registered_on_meta]
            raise ShardingError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {names}; call module.to_empty(device=...) "
                "and initialise them before the first forward"
            )
        return local

    @property
    def _is_registered_on_meta(self) -> bool:
        owner = self.owners[0]
        registered = owner.module._parameters[owner.name]
        return registered is not None and registered.device.type == "meta"

    def move(self, local: Tensor) -> None:
        """Copies the shard into `local`, which from now on is its memory."""
        local.copy_(self.local.detach().reshape(local.shape))
        self.sharded.data = self.as_dtensor(local)

    def tie(self) -> None:
        """Registers in every place what the first one holds.

        `Module._apply` may make a new parameter for each place, which cuts ties.
        """
        first = self.owners[0]
        parameter = first.module._parameters[first.name]
        for owner in self.owners[1:]:
            owner.module._parameters[owner.name] = parameter

    def _checked_replacement(self, found: nn.Parameter | None) -> nn.Parameter:
        layout = found.layout if isinstance(found, DTensor) else None
        if found is None or layout is None or layout.abstract != self.layout.abstract:
            kind = (
                "nothing"
                if found is None
                else f"a DTensor with {layout}"
                if layout is not None
                else f"a plain {type(found).__name__} of shape {tuple(found.shape)}"
            )
            raise ShardingError(
                f"parameter {self.name!r} was replaced by {kind}; expected a DTensor with "
                f"{self.layout}. Load values into the sharded parameter instead, with "
                "load_state_dict or hp_fsdp.load_full_state_dict"
            )
        self._mark(found)
        return found

    def _mark(self, parameter: nn.Parameter) -> None:
        setattr(parameter, SHARDED_MARK, True)
        advise(parameter)

    @property
    def form_ids(self) -> tuple[int, int]:
        """`id` of the shard and of the gathered form: what the modules may have registered."""
        return id(self.sharded), id(self.shown)

    # -- the gathered form -------------------------------------------------------------------

    def make_full(self, view: Tensor) -> nn.Parameter:
        """Makes the gathered form out of its place in the buffer."""
        self.full = nn.Parameter(view, requires_grad=self.sharded.requires_grad)
        if self._source is not None:
            attach_layout(self.full, self._source)
        setattr(self.full, SHARDED_MARK, True)
        self.shown = self.full
        return self.full

    def show_parallel(self) -> Tensor:
        """The DTensor that PyTorch's tensor parallelism sees of the gathered form."""
        full, shown = self.full, self.shown
        assert full is not None
        assert shown is not None
        if shown is full or shown.requires_grad != full.requires_grad:
            assert self.parallel is not None
            self.shown = shown = self.parallel.over(full)
            setattr(shown, SHARDED_MARK, True)
        return shown

    def note_gathered(self) -> None:
        """The values of the shard are being gathered."""
        self._gathered_version = self.local._version

    def is_as_gathered(self, address: int, storage: Tensor) -> bool:
        """Whether a gather needs no preparation: the modules hold the shard, or the form made from
        it, the shard lies in `storage`, at `address`, and it trains or does not train as the form
        does."""
        owner, shard, full = self.owners[0], self.sharded, self.full
        registered = owner.module._parameters[owner.name]
        if full is None or (registered is not shard and registered is not self.shown):
            return False
        leaf = self.local
        if leaf.data_ptr() != address or leaf.requires_grad != full.requires_grad:
            return False
        # Empty shards lie nowhere, and shards on the meta device too.
        return address != 0 or (
            leaf.numel() == 0 and leaf.dtype == storage.dtype and leaf.device == storage.device
        )

    def is_stale(self, address: int) -> bool:
        """The shard, which lay at `address`, has been written to or moved since it was gathered."""
        local = self.local
        moved = local.numel() > 0 and local.data_ptr() != address
        return moved or local._version != self._gathered_version

    @property
    def is_replaced(self) -> bool:
        """The modules have been given another parameter."""
        owner = self.owners[0]
        return id(owner.module._parameters[owner.name]) not in self.form_ids

    # -- gradients ---------------------------------------------------------------------------

    def write_gradient(self, gradient: Tensor) -> None:
        """Adds `gradient` (local, final) to the shard's `.grad`, calling the shard's hooks as
        autograd does: those on the gradient before, those on its accumulation after."""
        local = self.local
        if gradient.device != local.device:
            gradient = gradient.to(local.device)
        if local._backward_hooks:
            for hook in list(local._backward_hooks.values()):
                answer = hook(gradient)
                gradient = gradient if answer is None else answer
        self._accumulate(gradient)
        accumulated = local._post_accumulate_grad_hooks
        if accumulated:
            for hook in list(accumulated.values()):
                hook(local)

    def _accumulate(self, gradient: Tensor) -> None:
        present = self.local.grad
        if present is not None:
            present.add_(gradient)
            return
        dtype = self.sharded.dtype
        if gradient.dtype != dtype or not gradient.is_contiguous():
            gradient = gradient.to(dtype).contiguous()
        if self._reads_as_summed:
            self.local.grad = gradient
        else:
            self.sharded.grad = self.as_dtensor(gradient)

    def zero_gradient(self, set_to_none: bool) -> None:
        """Forgets the shard's gradient, or fills it with zeros."""
        present = self.sharded.grad
        if set_to_none:
            self.sharded.grad = None
        elif isinstance(present, DTensor):
            present.to_local().zero_()

    # -- registration ------------------------------------------------------------------------

    def register(self, parameter: Tensor) -> None:
        """Puts `parameter` in every place that the original one had."""
        for owner in self.owners:
            owner.module._parameters[owner.name] = parameter  # type: ignore[assignment]
