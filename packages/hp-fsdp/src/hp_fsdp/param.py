"""One parameter of a unit: its shard, its gathered form, and its places in the modules.

The shard is what optimizers, checkpoints and gradient clipping see: a `DTensor` parameter. The
gathered form is what `forward` and `backward` see: a plain leaf, a view of the parameter's
persistent buffer. Exactly one of the two is registered on the owning modules at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout, attach_layout, layout_of
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError
from hp_fsdp.full_buffer import FullBuffer
from hp_fsdp.policies import MixedPrecisionPolicy
from hp_fsdp.schedule import Cut, partial_gradient_layout, sharded_layout
from hp_platform import Handle, Origin, all_gather
from hp_platform.buffers import aligned_empty

SHARDED_MARK = "_hp_fsdp_sharded"
"""Attribute of a parameter that a unit has taken, of its gathered form and of its origin."""

CALL_ADVICE = (
    "these parameters are under fully_shard and whole only inside forward. Call the module itself, "
    "module(...), rather than module.forward(...); for other methods that compute, call "
    "hp_fsdp.register_fsdp_forward_method(module, 'name') once after fully_shard. To load full "
    "values, call hp_fsdp.load_full_state_dict(module, state)"
)
"""Shown where a shard meets a plain tensor."""


@frozen
class Owner:
    """A place where the parameter is registered. Tied parameters have several."""

    module: nn.Module
    name: str


class ShardedParameter:
    """A parameter under `fully_shard`.

    Attributes:
        name: qualified name, for errors.
        cut: how it is divided over the shard axis.
        sharded: the `DTensor` parameter that holds this rank's shard.
        full: the gathered form; its values are valid only while the unit is gathered.
        layout: layout of `sharded`.
        partial_layout: `layout` with the model-axis partial gradients the parameter declared, or
            None where it declared none.
        reduce_dtype: type in which its gradient is reduced.
        accumulated: gradient of earlier micro-steps that has not been reduced, or None.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        owners: tuple[Owner, ...],
        name: str,
        data: DataMesh,
        placement: Shard | None,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.name = name
        self.owners = owners
        self._data = data
        self._source = _checked_source(parameter, name)
        dim = _checked_dim(parameter, name, placement)
        self.cut = Cut(tuple(parameter.shape), dim, data.shard.size, data.shard.rank)
        self.layout = sharded_layout(name, self.cut.shape, self._source, dim, data)
        self.partial_layout = partial_gradient_layout(self.layout, self._source)
        if self.layout.local_shape() != self.cut.local_shape:
            raise ShardingError(
                f"parameter {name!r}: {self.layout} gives this rank {self.layout.local_shape()}, "
                f"but the chunk of the local tensor {self.cut.shape} is {self.cut.local_shape}"
            )
        self._policy = policy
        self.compute_dtype = policy.computes_in(parameter.dtype)
        self.reduce_dtype = policy.reduces_in(parameter.dtype)
        self.accumulated: Tensor | None = None
        self._buffer: FullBuffer | None = None
        self._full: nn.Parameter | None = None
        self._on_gradient: Callable[[ShardedParameter], None] | None = None
        self._hooked = False
        self._gathering: tuple[Handle[Tensor], Tensor | None] | None = None
        self._version = -1
        self._storage = self._cut_out(parameter)
        local = self._local_view(self._storage)
        self.sharded = nn.Parameter(self.as_dtensor(local), requires_grad=parameter.requires_grad)
        # The original too: where it is still registered, a tie would be cut without a word.
        setattr(parameter, SHARDED_MARK, True)
        self._mark(self.sharded)
        self.register(self.sharded)

    # -- the shard ---------------------------------------------------------------------------

    def _cut_out(self, parameter: Tensor) -> Tensor:
        """This rank's chunk as flat aligned memory, padded with zeros to a whole chunk."""
        cut, device = self.cut, self._data.shard.device
        whole = parameter.detach()
        if whole.is_meta:
            return torch.empty(self._storage_numel, dtype=whole.dtype, device="meta")
        piece = whole.narrow(cut.dim, cut.start, cut.length(cut.rank))
        storage = aligned_empty(self._storage_numel, whole.dtype, device)
        storage[: piece.numel()].view(cut.local_shape).copy_(piece)
        storage[piece.numel() :].zero_()
        return storage

    @property
    def _storage_numel(self) -> int:
        """Leading cuts are stored padded, ready to travel; others as they are."""
        cut = self.cut
        return cut.padded_numel if cut.is_leading else _numel(cut.local_shape)

    def _local_view(self, storage: Tensor) -> Tensor:
        shape = self.cut.local_shape
        return storage[: _numel(shape)].view(shape)

    def as_dtensor(self, local: Tensor) -> DTensor:
        """A value or gradient of this rank's shard, with its layout."""
        return DTensor.of_layout(local, self.layout)

    @property
    def local(self) -> Tensor:
        """This rank's shard as a plain tensor: the leaf that holds the gradient."""
        shard = self.sharded
        assert isinstance(shard, DTensor)
        return shard.to_local()

    def adopt(self) -> None:
        """Takes over whatever the modules or the `DTensor` hold now.

        `Module.to_empty`, `load_state_dict(assign=True)` and `parameter.data = ...` replace the
        parameter or its memory. The new shard is moved to padded, aligned memory if it has to be.

        Raises:
            ShardingError: it is on the meta device, or is not a shard of this layout.
        """
        owner = self.owners[0]
        registered = owner.module._parameters[owner.name]
        if registered is not self.sharded and registered is not self._full:
            self.sharded = self._checked_replacement(registered)
            self.register(self.sharded)
        local = self.local
        if local.is_meta:
            raise ShardingError(
                f"parameter {self.name!r} is still on the meta device: call "
                "module.to_empty(device=...) and initialise it before the first forward"
            )
        if local.dtype != self._storage.dtype:
            self._change_type(local.dtype)
        if local.data_ptr() == self._storage.data_ptr() or local.numel() == 0:
            if self._storage.is_meta or local.dtype != self._storage.dtype:
                self._storage = aligned_empty(
                    self._storage_numel, local.dtype, self._data.shard.device
                ).zero_()
            return
        storage = aligned_empty(self._storage_numel, local.dtype, self._data.shard.device)
        storage[: local.numel()].copy_(local.detach().reshape(-1))
        storage[local.numel() :].zero_()
        self.sharded.data = self.as_dtensor(self._local_view(storage))
        self._storage = storage

    def tie(self) -> None:
        """Registers in every place what the first one holds.

        `Module._apply` may make a new parameter for each place, which cuts ties.
        """
        first = self.owners[0]
        parameter = first.module._parameters[first.name]
        for owner in self.owners[1:]:
            owner.module._parameters[owner.name] = parameter

    def _change_type(self, dtype: torch.dtype) -> None:
        """The shard has a new type, as after `module.to(dtype)`: so has everything made from it."""
        self.compute_dtype = self._policy.computes_in(dtype)
        self.reduce_dtype = self._policy.reduces_in(dtype)
        if self._full is not None and self._full.dtype != self.compute_dtype:
            self._full, self._buffer, self._hooked = None, None, False
        if self.accumulated is not None:
            self.accumulated = self.accumulated.to(self.reduce_dtype)

    def _checked_replacement(self, found: nn.Parameter | None) -> nn.Parameter:
        layout = found.layout if isinstance(found, DTensor) else None
        if found is None or layout is None or layout.abstract != self.layout.abstract:
            kind = "nothing" if found is None else f"{type(found).__name__} {layout_of(found)}"
            raise ShardingError(
                f"parameter {self.name!r} was replaced by {kind}; expected a DTensor with "
                f"{self.layout}. Load values into the sharded parameter instead"
            )
        self._mark(found)
        return found

    def _mark(self, parameter: nn.Parameter) -> None:
        setattr(parameter, SHARDED_MARK, True)
        parameter._hp_advice = CALL_ADVICE  # type: ignore[attr-defined]

    @property
    def form_ids(self) -> tuple[int, int]:
        """`id` of the shard and of the gathered form: what the modules may have registered."""
        return id(self.sharded), id(self._full)

    # -- gathering ---------------------------------------------------------------------------

    @property
    def full(self) -> nn.Parameter:
        if self._full is None:
            self._make_full()
        assert self._full is not None
        return self._full

    def _make_full(self) -> None:
        # Neither inference mode nor no_grad of the caller may mark the leaf for good.
        with torch.inference_mode(False), torch.no_grad():
            numel = self.cut.gathered_numel if self.cut.is_leading else self.cut.numel
            self._buffer = FullBuffer(numel, self.compute_dtype, self._data.shard.device)
            # `.data` gives the view a version counter of its own: gathering again must not look
            # to autograd like a modification of what it has saved.
            view = self._buffer.data.data[: self.cut.numel].view(self.cut.shape)
            self._full = nn.Parameter(view, requires_grad=self.sharded.requires_grad)
        if self._source is not None:
            attach_layout(self._full, self._source)
        setattr(self._full, SHARDED_MARK, True)

    def begin_gather(self, origin: Origin) -> None:
        """Issues the all-gather; nothing is valid before `finish_gather`."""
        self.adopt()
        full, buffer = self.full, self._buffer
        assert buffer is not None
        if full.requires_grad != self.sharded.requires_grad:
            full.requires_grad_(self.sharded.requires_grad)
        self._hook_gradient()
        self._version = self.local._version
        piece = self._travelling_piece()
        buffer.hold()
        if self.cut.is_leading:
            handle = all_gather(piece, self._data.shard, output=buffer.data, origin=origin)
            self._gathering = (handle, None)
        else:
            chunks = aligned_empty(self.cut.gathered_numel, piece.dtype, piece.device)
            handle = all_gather(piece, self._data.shard, output=chunks, origin=origin)
            self._gathering = (handle, chunks)

    def finish_gather(self) -> None:
        """Waits for the all-gather and registers the gathered parameter on the modules."""
        assert self._gathering is not None
        handle, chunks = self._gathering
        self._gathering = None
        handle.wait()
        if chunks is not None:
            self._concatenate(chunks)
        self.register(self.full)

    def release(self) -> None:
        """Registers the shard and gives the gathered memory back."""
        self.register(self.sharded)
        if self._buffer is not None:
            self._buffer.release()

    @property
    def is_replaced(self) -> bool:
        """The modules have been given another parameter."""
        owner = self.owners[0]
        return id(owner.module._parameters[owner.name]) not in self.form_ids

    @property
    def is_stale(self) -> bool:
        """The shard has been written to since it was last gathered."""
        local = self.local
        moved = local.numel() > 0 and local.data_ptr() != self._storage.data_ptr()
        return moved or local._version != self._version

    def _travelling_piece(self) -> Tensor:
        """The whole chunk in the type it travels in: the shard's own memory wherever it can be."""
        cut, piece = self.cut, self._storage.detach()
        if not cut.is_leading and cut.local_shape != cut.padded_shape:
            padded = aligned_empty(cut.padded_numel, piece.dtype, piece.device).zero_()
            target = padded.view(cut.padded_shape).narrow(cut.dim, 0, cut.length(cut.rank))
            target.copy_(piece.view(cut.local_shape))
            piece = padded
        if piece.dtype == self.compute_dtype:
            return piece
        return aligned_empty(piece.numel(), self.compute_dtype, piece.device).copy_(piece)

    def _concatenate(self, chunks: Tensor) -> None:
        cut = self.cut
        pieces = [
            piece.view(cut.padded_shape).narrow(cut.dim, 0, cut.length(rank))
            for rank, piece in enumerate(chunks.split(cut.padded_numel))
        ]
        torch.cat(pieces, dim=cut.dim, out=self.full.data)

    # -- gradients ---------------------------------------------------------------------------

    def on_gradient(self, callback: Callable[[ShardedParameter], None]) -> None:
        """Calls `callback` whenever autograd has finished a gradient of the gathered parameter."""
        self._on_gradient = callback

    def _hook_gradient(self) -> None:
        if self._hooked or not self.full.requires_grad or self._on_gradient is None:
            return
        callback = self._on_gradient

        def finished(_: Tensor) -> None:
            callback(self)

        self.full.register_post_accumulate_grad_hook(finished)
        self._hooked = True

    @property
    def has_gradient(self) -> bool:
        return self.accumulated is not None or self.full.grad is not None

    def accumulate(self) -> None:
        """Keeps this backward's gradient, unreduced, in the type of the reduction."""
        gradient, self.full.grad = self.full.grad, None
        if gradient is None:
            return
        if self.accumulated is None:
            self.accumulated = gradient.to(self.reduce_dtype)
        else:
            self.accumulated += gradient

    def take_gradient(self) -> Tensor | None:
        """The gradient to reduce, earlier micro-steps included, and forgets it here."""
        gradient, self.full.grad = self.full.grad, None
        total, self.accumulated = self.accumulated, None
        if total is None:
            return None if gradient is None else gradient.to(self.reduce_dtype)
        return total if gradient is None else total.add_(gradient)

    def reduction_input(self, gradient: Tensor | None) -> Tensor:
        """Flat `[gathered_numel]`: the gradient itself, or a padded copy where chunks are uneven.

        None, a parameter that this backward did not use, counts as zero.
        """
        cut = self.cut
        if gradient is not None and cut.is_leading and cut.is_even:
            return gradient.contiguous().view(-1)
        flat = aligned_empty(cut.gathered_numel, self.reduce_dtype, self._data.shard.device)
        if gradient is None:
            return flat.zero_()
        if cut.is_leading:
            flat[: cut.numel].view(cut.shape).copy_(gradient)
            flat[cut.numel :].zero_()
            return flat
        for rank, piece in enumerate(flat.split(cut.padded_numel)):
            length = cut.length(rank)
            if length < cut.chunk:
                piece.zero_()
            target = piece.view(cut.padded_shape).narrow(cut.dim, 0, length)
            target.copy_(
                gradient.narrow(cut.dim, min(rank * cut.chunk, cut.shape[cut.dim]), length)
            )
        return flat

    def local_gradient(self, reduced: Tensor) -> Tensor:
        """This rank's gradient inside its reduced chunk `[padded_numel]`: a view."""
        cut = self.cut
        if cut.is_leading:
            return self._local_view(reduced)
        return reduced.view(cut.padded_shape).narrow(cut.dim, 0, cut.length(cut.rank))

    def write_gradient(self, gradient: Tensor) -> None:
        """Adds `gradient` (local, final) to the shard's `.grad`."""
        present = self.sharded.grad
        if present is not None:
            assert isinstance(present, DTensor)
            present.to_local().add_(gradient)
            return
        gradient = gradient.to(self.sharded.dtype).contiguous()
        self.sharded.grad = self.as_dtensor(gradient)

    def zero_gradient(self, set_to_none: bool) -> None:
        """Forgets the shard's gradient, or fills it with zeros."""
        present = self.sharded.grad
        if set_to_none:
            self.sharded.grad = None
        elif isinstance(present, DTensor):
            present.to_local().zero_()

    # -- registration ------------------------------------------------------------------------

    def register(self, parameter: nn.Parameter) -> None:
        """Puts `parameter` in every place that the original one had."""
        for owner in self.owners:
            owner.module._parameters[owner.name] = parameter


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _checked_source(parameter: nn.Parameter, name: str) -> Layout | None:
    if isinstance(parameter, DTensor | TorchDTensor):
        raise ShardingError(
            f"parameter {name!r} is a {type(parameter).__module__}.{type(parameter).__name__}: "
            "fully_shard takes plain local parameters. Apply the plan with "
            "hp_dtensor.parallelize(..., mode='production') first, and fully_shard only once"
        )
    return layout_of(parameter)


def _checked_dim(parameter: nn.Parameter, name: str, placement: Shard | None) -> int:
    if parameter.ndim == 0:
        raise ShardingError(
            f"parameter {name!r} is 0-dimensional and cannot be cut: give it shape (1,), or list "
            "it in ignored_params"
        )
    dim = 0 if placement is None else placement.dim
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ShardingError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} has no dim {dim}, which "
            "shard_placement_fn asked to cut"
        )
    return dim % parameter.ndim
