"""Transition: a layout pair compiled to a short list of collectives, and replayed.

Compiling looks for the cheapest path (`hp_dtensor.path`) and works out every block to move
(`hp_dtensor.steps`); applying only runs the list. The backward pass is the transition between the
ends' gradient layouts (`hp_dtensor.adjoint`), so it is compiled in the same way and can itself be
differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.adjoint import dual, factor, has_adjoint
from hp_dtensor.layout import Coordinate, Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.path import shortest_path
from hp_dtensor.steps import Run, Step, compile_step, simulate_step
from hp_platform.axis import MeshAxis
from hp_platform.ledger import Origin

_ORIGIN = Origin("hp_dtensor", phase="forward")

Bound = tuple[Coordinate, torch.Size, tuple[Run, ...]]
"""This rank's coordinate, the shape of its local tensor, and its part in every step."""


@frozen(eq=False, repr=False, slots=False)
class Transition:
    """A compiled redistribution of one tensor from `source` to `target`.

    Attributes:
        steps: what happens, in order; empty where every rank already holds what it should.
        factor: by what the values are multiplied (1.0 except between gradients of averages).
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    factor: float

    @classmethod
    def compile(cls, source: Layout, target: Layout) -> Transition:
        """The cheapest sequence of single-axis steps by elements moved per rank.

        Paths are cached by value, so compiling the same pair again costs a look-up.

        Raises:
            ValueError: the layouts differ in mesh or global shape.
        """
        if source.shape != target.shape:
            raise ValueError(
                f"a transition keeps the global shape: source {source}, target {target}"
            )
        if source.mesh != target.mesh:
            raise ValueError(f"a transition stays on one mesh: source {source}, target {target}")
        steps = _compiled_steps(source.abstract, target.abstract)
        transition = cls(source, target, steps, factor(source, target))
        transition._prepare()
        return transition

    def _prepare(self) -> None:
        """Works out this rank's part now, so that replaying finds it ready."""
        if not isinstance(self.source.mesh, AbstractMesh):
            own = self.source.mesh.get_coordinate()
            for step in self.steps:
                if own is not None:
                    step.at(tuple(own))

    @cached_property
    def adjoint(self) -> Transition:
        """The transition of gradients: from the target's gradient layout to the source's.

        Raises:
            ValueError: an end is a maximum or minimum over ranks, which has no adjoint.
        """
        for end in (self.source, self.target):
            if not has_adjoint(end):
                raise ValueError(
                    f"{end} is not linear in its local tensors and has no gradient here; "
                    "redistribute it to Replicate under torch.no_grad, or detach it"
                )
        return Transition.compile(dual(self.target), dual(self.source))

    @cached_property
    def is_identity(self) -> bool:
        """The local tensors do not change. (Their gradients may: see `adjoint`.)"""
        return not self.steps and self.factor == 1.0

    @cached_property
    def leaves_graph(self) -> bool:
        """Neither the local tensors nor their gradients change."""
        return self.is_identity and self.adjoint.is_identity

    @property
    def elements(self) -> int:
        """A bound on what any rank sends and on what any receives, its own parts left out.

        By this the cheapest path is chosen. It is reached where dims are cut evenly, and it is
        never above that of gathering the whole value on every rank.
        """
        return sum(step.move.elements for step in self.steps)

    @property
    def bytes(self) -> int:
        """`elements` in bytes of float32. For a dtype: `elements * dtype.itemsize`."""
        return 4 * self.elements

    # -- running ------------------------------------------------------------------------------

    def apply(
        self,
        local: Tensor,
        *,
        origin: Origin = _ORIGIN,
        axes: Mapping[str, MeshAxis] | None = None,
    ) -> Tensor:
        """The target's local tensor from the source's, differentiable any number of times.

        Args:
            local: this rank's local tensor, of the source's local shape.
            origin: who asks; shown in the ledger (the backward pass with phase "backward").
            axes: the mesh's axes by name; None takes them from the layouts' DeviceMesh.

        Raises:
            ValueError: the local tensor has another shape, or the layouts are on an abstract
                mesh and no axes are given.
        """
        if not (local.requires_grad and torch.is_grad_enabled()):
            return self._replay(local, origin, axes)
        if self.leaves_graph:
            return local
        replay = Replay(self, origin, axes)
        if replay.expected is not None and local.shape != replay.expected:
            raise self._misfit(local, self.source.coordinate(), replay.expected)
        return replay(local)

    def replay(self, origin: Origin) -> Replay:
        """`apply` for one asker, with nothing left to look up. For what happens at every step."""
        return Replay(self, origin, None)

    def run_forward(
        self,
        local: Tensor,
        *,
        origin: Origin = _ORIGIN,
        axes: Mapping[str, MeshAxis] | None = None,
    ) -> Tensor:
        """As `apply`, without autograd."""
        if self.is_identity:
            return local
        with torch.no_grad():
            return self._replay(local, origin, axes)

    def _replay(self, local: Tensor, origin: Origin, axes: Mapping[str, MeshAxis] | None) -> Tensor:
        """The caller sees to it that autograd does not follow."""
        if self.is_identity:
            return local
        if axes is None and local.is_meta and isinstance(self.source.mesh, AbstractMesh):
            return self._without_values(local)
        coord, expected, bound = self._bound if axes is None else self._bind(axes)
        if local.shape != expected:
            raise self._misfit(local, coord, expected)
        for run in bound:
            local = run(local, origin)
        return local if self.factor == 1.0 else local * self.factor

    def _fixed(self, axes: Mapping[str, MeshAxis] | None) -> tuple[Run, torch.Size | None]:
        """`_replay` for these axes, and the local shape that it takes without checking."""
        if axes is None and not self.is_identity and not isinstance(self.source.mesh, AbstractMesh):
            _, expected, bound = self._bound
            if len(bound) == 1 and self.factor == 1.0:
                return bound[0], expected
        return (lambda local, origin: self._replay(local, origin, axes)), None

    def _misfit(self, local: Tensor, coord: Coordinate, expected: torch.Size) -> ValueError:
        return ValueError(
            f"{self}: the local tensor has shape {tuple(local.shape)}, but the source gives "
            f"coordinate {coord} the shape {tuple(expected)}"
        )

    def _without_values(self, local: Tensor) -> Tensor:
        """The shape alone, for coordinate 0 of a mesh that has no ranks."""
        first = (0,) * self.source.abstract_mesh.ndim
        expected = self.source.local_shape(first)
        if tuple(local.shape) != expected:
            raise ValueError(
                f"{self}: the meta tensor has shape {tuple(local.shape)}, but the source gives "
                f"coordinate {first} the shape {expected}"
            )
        return local.new_empty(self.target.local_shape(first))

    def simulate(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """All ranks at once, in one process: local tensors in rank order, before and after."""
        result = list(locals_)
        for step in self.steps:
            result = simulate_step(step, result)
        return result if self.factor == 1.0 else [local * self.factor for local in result]

    @property
    def _bound(self) -> Bound:
        """This rank's part, found once.

        Not a `cached_property`: the ranks of an axis may exchange where they are at this point,
        and before Python 3.12 that decorator computes under one lock for all transitions, at
        which ranks that are threads of one process would wait for one another for ever.
        """
        known: Bound | None = self.__dict__.get("_kept_bound")
        if known is None:
            known = self.__dict__["_kept_bound"] = self._bind_to_mesh()
        return known

    def _bind_to_mesh(self) -> Bound:
        mesh = self.source.mesh
        if isinstance(mesh, AbstractMesh):
            raise ValueError(
                f"{self} is on an abstract mesh: pass axes={{name: MeshAxis}}, or use simulate"
            )
        coord = self.source.coordinate()
        bound = [
            compile_step(step, step.at(coord), mesh_axis(mesh, step.move.axis))
            for step in self.steps
        ]
        return coord, torch.Size(self.source.local_shape(coord)), tuple(bound)

    def _bind(self, axes: Mapping[str, MeshAxis]) -> Bound:
        mesh = self.source.abstract_mesh
        missing = [
            name for name, size in zip(mesh.axis_names, mesh.sizes) if size > 1 and name not in axes
        ]
        if missing:
            raise ValueError(f"{self}: axes lacks {missing}, found {sorted(axes)}")
        coord = tuple(axes[name].rank if name in axes else 0 for name in mesh.axis_names)
        bound = [
            compile_step(step, step.at(coord), axes[mesh.axis_names[step.move.axis]])
            for step in self.steps
        ]
        return coord, torch.Size(self.source.local_shape(coord)), tuple(bound)

    # -- as text ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Transition({self.source} -> {self.target})"

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}"]
        lines += [f"  {step}" for step in self.steps] or ["  nothing to do"]
        if self.factor != 1.0:
            lines.append(f"  multiply by {self.factor:g}")
        return "\n".join(lines)


@lru_cache(maxsize=16384)
def _compiled_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    # A memo of a pure function of two values; steps hold no process group.
    return tuple(Step(move) for move in shortest_path(source, target))


class Replay:
    """A transition with everything but the local tensor fixed; differentiable as `apply` is.

    Attributes:
        run: without autograd, on a local tensor of the source's local shape.
        expected: that shape where `run` relies on it; None where it looks for itself.
        back: of the backward pass, once differentiated.
    """

    __slots__ = ("axes", "back", "expected", "leaves_graph", "origin", "run", "transition")

    def __init__(
        self, transition: Transition, origin: Origin, axes: Mapping[str, MeshAxis] | None
    ) -> None:
        self.transition, self.origin, self.axes = transition, origin, axes
        self.run, self.expected = transition._fixed(axes)
        self.leaves_graph = False
        self.back: Replay | None = None

    def __call__(self, local: Tensor) -> Tensor:
        """`local` has the source's local shape; nobody looks again."""
        if not (local.requires_grad and torch.is_grad_enabled()):
            return self.run(local, self.origin)
        if self.back is None:
            self.back = self._differentiated()
        return local if self.leaves_graph else _Redistribute.apply(local, self)

    def _differentiated(self) -> Replay:
        """The replay of gradients.

        Raises:
            ValueError: an end is a maximum or minimum over ranks.
        """
        self.leaves_graph = self.transition.leaves_graph
        return Replay(self.transition.adjoint, _backward(self.origin), self.axes)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, replay: Replay) -> Tensor:
        ctx.back = replay.back
        result = replay.run(local, replay.origin)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        back: Replay = ctx.back
        if gradient.requires_grad:
            return back(gradient), None
        return back.run(gradient, back.origin), None


@lru_cache(maxsize=4096)
def _backward(origin: Origin) -> Origin:
    return Origin(origin.package, origin.name, "backward")
