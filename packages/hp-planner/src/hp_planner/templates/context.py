"""What the templates share: the graph, the options, and what neighbours exchange."""

from __future__ import annotations

from attrs import field, frozen

from hp_dtensor.plan import REPLICATED, BoundaryKind, Contract
from hp_planner.after_norm import between_norm_and_head
from hp_planner.boundaries import Boundary
from hp_planner.fused import heads_of
from hp_planner.graph import ModuleGraph, is_inside
from hp_planner.heads import Heads
from hp_planner.manners import Manner
from hp_planner.settings import Settings
from hp_planner.shared_heads import needs_sharing, sharing_problem
from hp_planner.stream import final_norm
from hp_planner.templates.contracts import PARTIAL, SEQUENCE, SUMMED_GRADIENT


@frozen
class Context:
    """What the templates share.

    Attributes:
        local: modules that an override leaves whole.
        layers: boundaries of the repeated layers.
        stream: layout of the hidden states between the parts of a layer.
        final_norm: the norm after the last layer.
    """

    graph: ModuleGraph
    settings: Settings
    boundaries: tuple[Boundary, ...]
    local: frozenset[str]
    layers: tuple[Boundary, ...] = field(init=False)
    stream: Contract = field(init=False)
    final_norm: str = field(init=False)
    _by_name: dict[str, Boundary] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        layers = tuple(b for b in self.boundaries if b.kind is BoundaryKind.LAYER)
        object.__setattr__(self, "layers", layers)
        by_name = {boundary.module: boundary for boundary in self.boundaries}
        object.__setattr__(self, "_by_name", by_name)
        cut = self.settings.sequence_parallel and layers and not by_name[""].problem
        object.__setattr__(self, "stream", SEQUENCE if cut else REPLICATED)
        object.__setattr__(self, "final_norm", final_norm(self.graph))

    def find(self, module: str | None) -> Boundary | None:
        return None if module is None else self._by_name.get(module)

    def inside_local(self, name: str) -> bool:
        """Whether an enclosing module is local, so that nothing here is sharded."""
        return any(is_inside(name, module) for module in self.local)

    @property
    def after_final_norm(self) -> Contract:
        """What the final norm hands on: a sharded head makes its gradient a partial sum."""
        heads = [b for b in self.boundaries if b.kind is BoundaryKind.HEAD]
        shards = (
            len(heads) == 1
            and heads[0].module not in self.local
            and heads[0].manner is Manner.SHARDED
            and not between_norm_and_head(self.graph, self.boundaries, self.final_norm)
        )
        return SUMMED_GRADIENT if shards and self.stream != REPLICATED else REPLICATED

    def exchange(self, boundary: Boundary) -> tuple[Contract, Contract]:
        """Hidden states as the neighbours hand them to this boundary, and as they take them.

        The first layer takes what the embedding gives, whole; the final norm takes the stream
        and gives what the head wants; parts of a layer exchange the stream; parts of a block of
        experts that is sharded as one give summands of its result. Elsewhere they are whole.
        """
        home = self.find(boundary.home)
        if boundary.kind is BoundaryKind.LAYER:
            first = boundary.module == self.layers[0].module
            return (REPLICATED if first else self.stream), self.stream
        if boundary.kind is BoundaryKind.HEAD:
            return self.after_final_norm, REPLICATED
        if boundary.kind is BoundaryKind.NORM and boundary.module == self.final_norm:
            return self.stream, self.after_final_norm
        if home is not None and home.kind is BoundaryKind.MOE and home.manner is Manner.SHARDED:
            return SUMMED_GRADIENT, PARTIAL
        around = self.stream if home is not None and home.kind is BoundaryKind.LAYER else REPLICATED
        return around, around

    def sharded_home(self, boundary: Boundary) -> Boundary | None:
        """The block around this one that is sharded as one, if there is such a block."""
        home = self.find(boundary.home)
        blocks = (BoundaryKind.ATTENTION, BoundaryKind.MLP, BoundaryKind.MOE)
        if home is None or home.kind not in blocks:
            return None
        return home if self.manner(home) is Manner.SHARDED else self.sharded_home(home)

    def manner(self, boundary: Boundary) -> Manner:
        """The boundary's manner on this mesh: heads that ranks cannot share are left together."""
        return Manner.BY_LINEAR if self.uneven(boundary) else boundary.manner

    def problem(self, boundary: Boundary) -> str:
        """Why the boundary is not sharded as one, on this mesh."""
        return self.uneven(boundary) or boundary.problem

    def uneven(self, boundary: Boundary) -> str:
        """Too few key/value heads, and why ranks cannot share them: every rank computes all."""
        heads = self.shared_heads(boundary)
        if heads is None:
            return ""
        why = sharing_problem(self.graph, boundary.module, heads, boundary.members)
        few = f"{heads.key_value} key/value heads are too few for {self.settings.tensor_size} ranks"
        return f"{few}, which cannot share them: {why}" if why else ""

    def shared_heads(self, boundary: Boundary) -> Heads | None:
        """The heads of an attention whose key/value heads do not divide over the ranks."""
        if boundary.kind is not BoundaryKind.ATTENTION or boundary.manner is not Manner.SHARDED:
            return None
        heads = heads_of(self.graph, boundary.module)
        if isinstance(heads, str) or not needs_sharing(heads, self.settings.tensor_size):
            return None
        return heads
