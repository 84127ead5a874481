"""Which parameters of a unit travel alone and which together, decided once.

On a link whose latency is small against the message, one collective per parameter is right: it
overlaps with the computation that needs another parameter. Where latency dominates, small
parameters share a buffer and with it one collective. `auto` decides for every parameter, from its
size and the latency and bandwidth of the axis that shards; that all ranks decide alike is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout, layout_of
from hp_dtensor.torch_kind import is_torch_dtensor
from hp_fsdp.cut import AnyCut, Cut, SharedCut, SharedLayout, Uncut, check_source
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import AssertedError, NotAvailableError, ShardingError
from hp_fsdp.policies import CommPolicy, MixedPrecisionPolicy
from hp_fsdp.torch_parallel import TorchParallel, local_parameter
from hp_platform.links import Link


@frozen
class Owner:
    """A place where the parameter is registered. Tied parameters have several."""

    module: nn.Module
    name: str


@frozen(eq=False)
class Candidate:
    """A parameter that `fully_shard` is about to take.

    Attributes:
        parameter: as it is registered now.
        name: qualified, for errors.
        owners: every place that holds it.
        placement: what `shard_placement_fn` said, or None.
        source: layout the parameter came with, or None.
        parallel: how PyTorch's tensor parallelism describes it, or None; `parameter` is its local
            tensor then.
        original: what the modules hold now.
    """

    parameter: nn.Parameter
    name: str
    owners: tuple[Owner, ...]
    placement: Shard | None
    source: Layout | None
    parallel: TorchParallel | None
    original: nn.Parameter

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        name: str,
        owners: tuple[Owner, ...],
        placement: Shard | None,
        data: DataMesh,
    ) -> Candidate:
        """Checks that the parameter can be cut.

        Raises:
            ShardingError: it cannot; the message names it.
            NotAvailableError: it is a tensor subclass.
        """
        original, parallel = parameter, None
        if isinstance(parameter, DTensor):
            kind = type(parameter)
            raise ShardingError(
                f"parameter {name!r} is a {kind.__module__}.{kind.__name__}: fully_shard takes "
                "plain local parameters. Apply the plan with hp_dtensor.parallelize(..., "
                "mode='production') first, and fully_shard only once"
            )
        if is_torch_dtensor(parameter):
            parallel = TorchParallel.of(parameter, name)  # type: ignore[arg-type]
            parameter = local_parameter(parameter)
        if is_traceable_wrapper_subclass(parameter) or hasattr(parameter, "fsdp_pre_all_gather"):
            raise NotAvailableError(
                f"parameter {name!r} is a {type(parameter).__name__}: tensor subclasses, whose "
                "values are not where a plain tensor's are and which may gather themselves "
                "(fsdp_pre_all_gather), are not available. Shard the plain tensor; to gather in "
                "another type, pass mp_policy=MixedPrecisionPolicy(param_dtype=...)"
            )
        source = parallel.layout(name, data) if parallel else layout_of(parameter)
        candidate = cls(parameter, name, owners, placement, source, parallel, original)
        candidate.dim  # noqa: B018  raises
        if source is not None:
            check_source(name, source, data)
        return candidate

    @property
    def dim(self) -> int:
        """The dim that is cut when the parameter travels alone; 0 where there is none."""
        ndim = self.parameter.ndim
        if ndim == 0 and self.placement is None:
            return 0
        dim = 0 if self.placement is None else self.placement.dim
        if not -ndim <= dim < ndim:
            raise AssertedError(
                f"Shard dim {dim} is invalid for {ndim}D tensor: parameter {self.name!r} of shape "
                f"{tuple(self.parameter.shape)} has no such dim, which shard_placement_fn asked to "
                "cut"
            )
        return dim % ndim

    @property
    def may_share(self) -> bool:
        """Whether its layout may be ragged: nobody asked for another, and its size is the same on
        all ranks of the model axes."""
        even = self.source is None or self.source.is_even
        has_rows = self.parameter.ndim > 0 and self.parameter.numel() > 0
        return self.placement is None and has_rows and even


@frozen(eq=False)
class Journey:
    """Parameters that travel in one collective, and how each is cut.

    Attributes:
        candidates: one, or several that share a buffer.
        cuts: one for each.
        part: elements that each rank contributes: the length of a rank's part of the buffer.
    """

    candidates: tuple[Candidate, ...]
    cuts: tuple[AnyCut, ...]
    part: int

    @classmethod
    def alone(cls, candidate: Candidate, data: DataMesh) -> Journey:
        """One parameter, cut by chunks along its dim."""
        shape = tuple(candidate.parameter.shape)
        cut: Cut | Uncut
        if shape:
            cut = Cut(shape, candidate.dim, data.shard.size, data.shard.rank)
        else:
            cut = Uncut(data.shard.size, data.shard.rank)
        return cls((candidate,), (cut,), cut.padded_numel)

    @classmethod
    def together(cls, candidates: Sequence[Candidate], data: DataMesh) -> Journey:
        """Several in one buffer that is cut evenly."""
        shapes = [tuple(c.parameter.shape) for c in candidates]
        world, rank = data.shard.size, data.shard.rank
        layout = SharedLayout.of(shapes, candidates[0].parameter.dtype.itemsize, world)
        cuts = [
            SharedCut(shape, offset, layout.part, world, rank)
            for shape, offset in zip(shapes, layout.offsets)
        ]
        return cls(tuple(candidates), tuple(cuts), layout.part)


def schedule(
    candidates: Sequence[Candidate],
    data: DataMesh,
    precision: MixedPrecisionPolicy,
    policy: CommPolicy,
    link: Link | None,
) -> list[Journey]:
    """Every candidate in one journey; journeys in the order of their first parameter.

    Args:
        link: the shard axis's; needed by `auto` only.
    """
    together: dict[tuple[torch.dtype, bool], list[Candidate]] = {}
    for candidate in candidates:
        nbytes = (
            candidate.parameter.numel() * precision.computes_in(candidate.parameter.dtype).itemsize
        )
        if data.shard.size > 1 and candidate.may_share and policy.shares(nbytes, link):
            kind = (candidate.parameter.dtype, candidate.parameter.requires_grad)
            together.setdefault(kind, []).append(candidate)
    groups = [group for group in together.values() if len(group) > 1]
    group_of = {id(c): group for group in groups for c in group}
    journeys = []
    for candidate in candidates:
        group = group_of.get(id(candidate))
        if group is None:
            journeys.append(Journey.alone(candidate, data))
        elif group[0] is candidate:
            journeys.append(Journey.together(group, data))
    return journeys
