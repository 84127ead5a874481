"""The six passes, by name and in order (paper section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import ShardingPlan
from hp_planner.boundaries import group_boundaries, infer_boundary_types
from hp_planner.errors import LintError
from hp_planner.graph import ModuleGraph, read_module
from hp_planner.lint import lint, report
from hp_planner.override_file import Overrides, read_overrides
from hp_planner.overrides import merge_overrides
from hp_planner.rules import classify_roles
from hp_planner.settings import Settings, read_mesh
from hp_planner.stated_orders import state_orders
from hp_planner.templates import instantiate_templates

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def derive(graph: ModuleGraph, settings: Settings, overrides: Overrides = ()) -> ShardingPlan:
    """The plan for a graph: six pure passes, none of which needs a process group.

    Raises:
        PlanError: an override cannot be applied.
        LintError: the plan breaks rules; all of them are listed.
    """
    graph = state_orders(graph, settings, overrides)
    roles = classify_roles(graph)
    groups = group_boundaries(graph, roles)
    boundaries = infer_boundary_types(graph, groups)
    draft = instantiate_templates(graph, boundaries, settings)
    merged = merge_overrides(graph, boundaries, settings, draft, overrides)
    violations = lint(graph, merged)
    if violations:
        raise LintError(report(graph, merged, violations), violations)
    return merged


def plan(
    model: nn.Module,
    mesh: DeviceMesh | AbstractMesh | Mapping[str, int],
    *,
    overrides: Mapping[str, Any] | str | Path | None = None,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
) -> ShardingPlan:
    """The sharding plan of a model, derived from its module graph.

    Args:
        model: a module, on any device, the meta device included. It is read, never changed.
        mesh: a DeviceMesh, or names and sizes, `{"dp_shard": 2, "tp": 2}`. The planner shards over
            `tp`, `ep` (experts) and `cp` (sequences); `dp_replicate` and `dp_shard` are left to
            `fully_shard`.
        overrides: a mapping or a YAML file, see `hp_planner.override_file`.
        sequence_parallel: keep the hidden states between blocks sharded along the sequence.
        loss_parallel: leave the logits sharded over the vocabulary, on `tp`; the loss is then
            computed on the shards, see `hp_integration.vocabulary_cross_entropy`.

    Raises:
        PlanError: the mesh, an argument or an override cannot be used.
        LintError: the model cannot be planned so; every violation is listed, with a remedy.
    """
    settings = Settings(read_mesh(mesh), sequence_parallel, loss_parallel)
    return derive(read_module(model), settings, read_overrides(overrides))
