"""Dropout in a parallelized module: masks of the global activation, not of a rank's part (D11).

`nn.Dropout` draws from each process's generator: on replicated activations the ranks would drop
different elements, and the values that should be equal drift apart. Applying a plan puts
`hp_dtensor.random.Dropout` in its place, which drops the same elements in every layout, in both
modes and on one rank. It has to know how its input is laid out, so a plan that cuts anything
declares it: a boundary of the dropout module with the contract of its input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.contracts import ModelAxes, global_shape, layout_under
from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import Contract, ShardingPlan
from hp_dtensor.random import Dropout, dropout

__all__ = ["PlannedDropout", "dropout_findings", "replace_dropouts"]


class PlannedDropout(Dropout):
    """`Dropout` that knows the contract of its input, so that a plain part will do.

    Args:
        axes: of the plan; None for a whole tensor.
    """

    def __init__(
        self, p: float, *, seed: int, name: str, contract: Contract, axes: ModelAxes | None
    ) -> None:
        super().__init__(p, seed=seed)
        self.name, self.contract, self.axes = name, contract, axes

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"dropout {self.name} runs again inside a backward pass: recomputing it would "
                "drop other elements than the forward pass did; leave it out of what is "
                "checkpointed, or set its p to 0"
            )
        layout = None if isinstance(input, DTensor) else self._layout(tuple(input.shape))
        return dropout(input, self.p, True, state=self.state, layout=layout)

    def _layout(self, local_shape: tuple[int, ...]) -> Layout | None:
        if self.axes is None:
            return None
        shape = global_shape(self.contract, self.axes.abstract, local_shape)
        return layout_under(self.contract, self.axes.mesh, shape)

    def __deepcopy__(self, memo: object) -> PlannedDropout:
        made = PlannedDropout(
            self.p, seed=self.state.seed, name=self.name, contract=self.contract, axes=self.axes
        )
        made.state.draws = self.state.draws
        made.train(self.training)
        return made


def replace_dropouts(
    module: nn.Module,
    plan: ShardingPlan | None = None,
    axes: ModelAxes | None = None,
    mesh: DeviceMesh | AbstractMesh | None = None,
    seed: int = 0,
) -> None:
    """Puts ours in the place of every `nn.Dropout`, in place.

    Every one has a state of its own, from `seed`, its name, and this rank's coordinate on the data
    axes, whose ranks see other samples. Without a plan the module is the whole one.
    """
    contracts = {} if plan is None else _declared(plan)
    place = _data_place(plan, mesh)
    for name, child in list(module.named_modules()):
        for leaf, found in list(child.named_children()):
            if type(found) is not nn.Dropout:
                continue
            path = f"{name}.{leaf}".removeprefix(".")
            made = PlannedDropout(
                found.p,
                seed=_seed_of(seed, path, place),
                name=path,
                contract=contracts.get(path, Contract()),
                axes=axes,
            )
            made.train(found.training)
            setattr(child, leaf, made)


def dropout_findings(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    """Dropout that the ranks of a model axis would do differently."""
    if plan.model_mesh.world_size == 1 or not plan.model_axes:
        return
    declared = _declared(plan)
    for name, child in module.named_modules():
        kind = type(child).__name__
        if type(child) is nn.Dropout:
            if child.p > 0 and name not in declared:
                yield (
                    f"module {name} drops activations (p={child.p}), and the plan does not say how "
                    "they are laid out; add a boundary for it that declares its input, or set p "
                    "to 0"
                )
            continue
        if isinstance(child, nn.modules.dropout._DropoutNd | Dropout):
            if child.p > 0 and not isinstance(child, PlannedDropout):
                yield (
                    f"module {name} is a {kind} (p={child.p}), whose mask would differ between "
                    "ranks; use nn.Dropout, or set p to 0"
                )
            continue
        for attribute, value in vars(child).items():
            if "drop" in attribute and isinstance(value, float) and value > 0:
                yield (
                    f"module {name or '(root)'} ({kind}) has {attribute}={value}: dropout that it "
                    "calls by itself would differ between ranks; set it to 0, or use nn.Dropout"
                )


def _declared(plan: ShardingPlan) -> dict[str, Contract]:
    return {
        boundary.module: tensor.inside
        for boundary in plan.boundaries
        for tensor in boundary.inputs
        if tensor.where == "input"
    }


def _data_place(
    plan: ShardingPlan | None, mesh: DeviceMesh | AbstractMesh | None
) -> tuple[int, ...]:
    if plan is None or mesh is None or isinstance(mesh, AbstractMesh):
        return ()
    own = mesh.get_coordinate() or ()
    names = AbstractMesh.of(mesh).axis_names
    return tuple(c for name, c in zip(names, own) if name not in plan.model_axes and c)


def _seed_of(seed: int, name: str, place: tuple[int, ...]) -> int:
    text = f"{seed}/{name}/{place}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
