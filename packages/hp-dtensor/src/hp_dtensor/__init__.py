"""API-level distributed tensor: placement algebra, redistribution, two-mode plans, equivalence.

Names load on first use (PEP 562), so that a package which needs the algebra alone does not load
the operator rules.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_dtensor.dtensor import (
        DTensor,
        distribute_tensor,
    )
    from hp_dtensor.equivalence import (
        EquivalenceError,
        GradientReport,
        check_gradients,
    )
    from hp_dtensor.errors import (
        ContractError,
        PlanError,
    )
    from hp_dtensor.layout import (
        Layout,
        attach_layout,
        layout_of,
    )
    from hp_dtensor.mesh import (
        AbstractMesh,
    )
    from hp_dtensor.meta import (
        MetaReport,
        validate_on_meta,
    )
    from hp_dtensor.parallelize import (
        parallelize,
    )
    from hp_dtensor.placements import (
        Partial,
        Placement,
        RaggedShard,
        Replicate,
        SectionedShard,
        Shard,
        StridedShard,
        describe,
    )
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
    from hp_dtensor.region_contracts import (
        opaque_region,
        transparent_region,
    )
    from hp_dtensor.rules.engine import (
        OperatorError,
    )
    from hp_dtensor.settlement import (
        settle_gradients,
    )
    from hp_dtensor.transition import (
        Transition,
    )

_SUBMODULES = ("initializers", "random", "testing")

# Public name -> module that defines it.
_EXPORTS = {
    "AbstractMesh": "mesh",
    "BoundaryKind": "plan",
    "BoundarySpec": "plan",
    "BoundaryTensor": "plan",
    "Contract": "plan",
    "ContractError": "errors",
    "DTensor": "dtensor",
    "EquivalenceError": "equivalence",
    "GradientReport": "equivalence",
    "Layout": "layout",
    "LocalAttribute": "plan",
    "MetaReport": "meta",
    "OperatorError": "rules.engine",
    "ParameterSpec": "plan",
    "Partial": "placements",
    "Placement": "placements",
    "PlanError": "errors",
    "RaggedShard": "placements",
    "Region": "plan",
    "RegionKind": "plan",
    "Replicate": "placements",
    "SectionedShard": "placements",
    "Shard": "placements",
    "ShardingPlan": "plan",
    "StridedShard": "placements",
    "Transition": "transition",
    "attach_layout": "layout",
    "check_gradients": "equivalence",
    "describe": "placements",
    "distribute_tensor": "dtensor",
    "layout_of": "layout",
    "opaque_region": "region_contracts",
    "parallelize": "parallelize",
    "settle_gradients": "settlement",
    "transparent_region": "region_contracts",
    "validate_on_meta": "meta",
}

__all__ = [
    "AbstractMesh",
    "BoundaryKind",
    "BoundarySpec",
    "BoundaryTensor",
    "Contract",
    "ContractError",
    "DTensor",
    "EquivalenceError",
    "GradientReport",
    "Layout",
    "LocalAttribute",
    "MetaReport",
    "OperatorError",
    "ParameterSpec",
    "Partial",
    "Placement",
    "PlanError",
    "RaggedShard",
    "Region",
    "RegionKind",
    "Replicate",
    "SectionedShard",
    "Shard",
    "ShardingPlan",
    "StridedShard",
    "Transition",
    "attach_layout",
    "check_gradients",
    "describe",
    "distribute_tensor",
    "layout_of",
    "opaque_region",
    "parallelize",
    "settle_gradients",
    "transparent_region",
    "validate_on_meta",
]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"hp_dtensor.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hp_dtensor' has no attribute {name!r}")
    value = getattr(import_module(f"hp_dtensor.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


class _Package(ModuleType):
    """Keeps a public name that is also a submodule's (`parallelize`) bound to the public object.

    Importing a submodule binds it in its package, whoever imports it first.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _EXPORTS and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
