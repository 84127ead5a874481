"""The sharding plan as YAML, both ways, and its canonical bytes (decision D6).

Placements are short text: `S(0)`, `SS(0,2)`, `Sec(0,[4,2,2])`, `Rag([0],[1,0])`, `R`, `P(sum)`.
A contract maps mesh axes to that text; where a replicated value's gradient is a sum over ranks,
the text is `R grad P(sum)`. Axes that a contract leaves out are replicated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from typing import Any

import yaml
from attrs import fields, has
from cattrs import Converter, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard, describe
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

__all__ = ["FORMAT", "canonical_bytes", "from_yaml", "parse_placement", "to_yaml"]

FORMAT = "hp-sharding-plan/1"

_INTEGER = r"(-?\d+)"
_INTEGERS = r"\[(\d+(?:,\d+)*)\]"
_SHARD = re.compile(rf"S\({_INTEGER}\)")
_STRIDED = re.compile(rf"SS\({_INTEGER},(\d+)\)")
_SECTIONED = re.compile(rf"Sec\({_INTEGER},{_INTEGERS}\)")
_RAGGED = re.compile(rf"Rag\({_INTEGERS},{_INTEGERS}\)")
_PARTIAL = re.compile(r"P\((sum|avg|max|min)\)")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


_READERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Placement]], ...] = (
    (re.compile("R"), lambda match: Replicate()),
    (_SHARD, lambda match: Shard(int(match[1]))),
    (_PARTIAL, lambda match: Partial(match[1])),
    (_STRIDED, lambda match: StridedShard(int(match[1]), int(match[2]))),
    (_SECTIONED, lambda match: SectionedShard(int(match[1]), _integers(match[2]))),
    (_RAGGED, lambda match: RaggedShard(_integers(match[1]), _integers(match[2]))),
)


def parse_placement(text: str) -> Placement:
    """Reads what `hp_dtensor.placements.describe` writes.

    Raises:
        ValueError: the text is not a placement.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected a placement such as S(0), R or P(sum), found {text!r}")
    compact = text.replace(" ", "")
    for pattern, build in _READERS:
        if match := pattern.fullmatch(compact):
            return build(match)
    raise ValueError(
        f"{text!r} is not a placement; write S(dim), SS(dim,split_factor), "
        "Sec(dim,[lengths]), Rag([dims],[units]), R, or P(sum|avg|max|min)"
    )


def _contract_to_data(contract: Contract) -> dict[str, str]:
    data = {axis: describe(placement) for axis, placement in contract.placements}
    for axis, grad in contract.grad_placements:
        data[axis] = f"R grad {describe(grad)}"
    return dict(sorted(data.items()))


def _contract_from_data(data: Any, _: Any = None) -> Contract:
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping of mesh axis to placement, found {data!r}")
    placements: dict[str, Placement] = {}
    grads: dict[str, Placement] = {}
    for axis, text in data.items():
        value, separator, grad = str(text).partition(" grad ")
        try:
            placements[axis] = parse_placement(value)
            if separator:
                grads[axis] = parse_placement(grad)
        except ValueError as error:
            raise ValueError(f"mesh axis {axis!r}: {error}") from None
    return Contract(placements, grads)


def _mesh_from_data(data: Any, _: Any = None) -> AbstractMesh:
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping of mesh axis to size, found {data!r}")
    for axis, size in data.items():
        if not isinstance(axis, str) or not _is_integer(size):
            raise ValueError(f"mesh axis {axis!r}: expected a size, found {size!r}")
    return AbstractMesh.of(data)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _exactly(kind: type) -> Callable[[Any, Any], Any]:
    """A reader that takes the YAML value as it is; `int("3")` or `str(3)` would hide mistakes."""

    def read(data: Any, _: Any) -> Any:
        if type(data) is not kind:
            raise ValueError(f"expected {kind.__name__}, found {data!r}")
        return data

    return read


def _shape_from_data(data: Any, _: Any = None) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(_is_integer(size) and size >= 0 for size in data):
        raise ValueError(f"expected a list of sizes, found {data!r}")
    return tuple(data)


def _build_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, omit_if_default=True)
    converter.register_unstructure_hook(Contract, _contract_to_data)
    converter.register_structure_hook(Contract, _contract_from_data)
    converter.register_unstructure_hook(
        AbstractMesh, lambda mesh: dict(zip(mesh.axis_names, mesh.sizes))
    )
    converter.register_structure_hook(AbstractMesh, _mesh_from_data)
    for kind in (str, bool, int):
        converter.register_structure_hook(kind, _exactly(kind))
    converter.register_structure_hook_func(lambda cls: cls == tuple[int, ...], _shape_from_data)
    for cls in (ParameterSpec, BoundaryTensor, LocalAttribute, Region, BoundarySpec, ShardingPlan):
        _register(converter, cls)
    return converter


def _register(converter: Converter, cls: Any) -> None:
    """Every field but the optional ones is written, in the order of the class."""
    kept: dict[str, Any] = {
        field.name: override(omit_if_default=field.name in _OMITTED_WHEN_DEFAULT)
        for field in fields(cls)
    }
    converter.register_unstructure_hook(cls, make_dict_unstructure_fn(cls, converter, **kept))
    converter.register_structure_hook(
        cls, make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
    )


_OMITTED_WHEN_DEFAULT = frozenset(
    {"reason", "plain", "optional", "like", "localize", "region", "function"}
    | {"inputs", "outputs", "tied"}
)


# Built once: it is written to nowhere after this line.
_CONVERTER = _build_converter()


def _to_data(plan: ShardingPlan) -> dict[str, Any]:
    return {"format": FORMAT, **_CONVERTER.unstructure(plan)}


def canonical_bytes(plan: ShardingPlan) -> bytes:
    """The plan as bytes that depend on nothing but its value: JSON with sorted keys.

    YAML emitters differ in line breaks and quoting, so the digest is taken of this. The order of
    the mesh's axes is part of the value and is kept as a list.
    """
    data = _to_data(plan)
    data["mesh"] = list(data["mesh"].items())
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _FlowList(list[Any]):
    """A list that is written on one line."""


# libyaml where it was compiled in: five times as fast, and the same YAML.
_FastDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(_FastDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Flow,
    lambda dumper, data: dumper.represent_mapping(
        "tag:yaml.org,2002:map", data.items(), flow_style=True
    ),
)
_Dumper.add_representer(
    _FlowList,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def _one_line(plan: dict[str, Any]) -> dict[str, Any]:
    """Marks what reads better on one line: shapes, contracts, meshes, names."""
    plan["mesh"] = _Flow(plan["mesh"])
    plan["model_axes"] = _FlowList(plan["model_axes"])
    if "tied" in plan:
        plan["tied"] = [_FlowList(names) for names in plan["tied"]]
    for parameter in plan["parameters"]:
        parameter["shape"] = _FlowList(parameter["shape"])
        parameter["contract"] = _Flow(parameter["contract"])
    for boundary in plan["boundaries"]:
        for tensor in (*boundary.get("inputs", ()), *boundary.get("outputs", ())):
            tensor["outside"] = _Flow(tensor["outside"])
            tensor["inside"] = _Flow(tensor["inside"])
        if "localize" in boundary:
            boundary["localize"] = [_Flow(attribute) for attribute in boundary["localize"]]
        if "region" in boundary:
            boundary["region"] = _Flow(boundary["region"])
    return plan


def to_yaml(plan: ShardingPlan) -> str:
    """The plan as YAML; `from_yaml` restores an equal plan."""
    data = _one_line(_to_data(plan))
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100)


class _UniqueKeysLoader(_FastLoader):
    """YAML's own rule that a key occurs once, which PyYAML does not enforce."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ValueError(f"key {key!r} occurs twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


def from_yaml(text: str) -> ShardingPlan:
    """Reads a plan written by `to_yaml`.

    Raises:
        ValueError: the text is not YAML, is of another format, or a key is unknown, missing,
            repeated or has a wrong value. The message names each key by its path.
    """
    try:
        data = yaml.load(text, Loader=_UniqueKeysLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"the sharding plan is not YAML: {error}") from None
    except ValueError as error:
        raise ValueError(f"the sharding plan cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"not a sharding plan: expected key 'format' with {FORMAT!r}, found {found!r}"
        )
    body = {key: value for key, value in data.items() if key != "format"}
    try:
        return _CONVERTER.structure(body, ShardingPlan)
    except Exception as error:
        problems = transform_error(error, path="plan", format_exception=_explain)
        raise ValueError("the sharding plan cannot be read:\n  " + "\n  ".join(problems)) from error


def _explain(error: BaseException, kind: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in fields(error.cl)] if has(error.cl) else []
        return f"unknown key {', '.join(map(repr, sorted(error.extra_fields)))}; known: {known}"
    if isinstance(error, KeyError):
        return f"key {error.args[0]!r} is missing"
    if isinstance(error, ValueError) and isinstance(kind, type) and issubclass(kind, _ENUMS):
        return f"{error}; one of {[member.value for member in kind]}"
    return str(error)


_ENUMS = (BoundaryKind, RegionKind)
