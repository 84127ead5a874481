"""The override file: what a user states where the derived plan should differ.

A file or mapping from names to values. A name is the exact qualified name of a module or a
parameter, or a glob (`*` crosses dots). Values:

- `auto`: as derived;
- `none`: leave whole on every rank (for a block, hidden states are gathered around it);
- `{tp: S(0)}`, `{tp: R grad P}`: placement of a parameter, and of its gradient where it differs;
- `{order: q|k|v}`: in which order the rows of a block's fused weight lie (`hp_planner.order`);
  `names` and `divide` beside it say what else its forward uses;
- `{when: {axis: tp, min: 2, boundary: moe, config: {model_type: qwen3_moe}}, use: none}`, or with
  placements in place of `use`: only where every condition holds.

Placements say what a parameter is on the axes they name; on the others it stays as derived, and an
axis of one rank is passed over. Order: an exact name beats every glob; among globs the first in the
file whose condition holds wins. A name that matches nothing is an error, and so is a glob that
reaches modules of several kinds (or parameters of several roles) without saying which one it means.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from hp_dtensor.placements import Placement
from hp_dtensor.plan import BoundaryKind, Contract
from hp_dtensor.plan_yaml import parse_placement
from hp_planner.errors import PlanError
from hp_planner.graph import ConfigValue
from hp_planner.order import ORDERS, Order
from hp_planner.settings import DATA_AXES, MODEL_AXES

DECLARED = "declared"


WHEN_KEYS = ("axis", "min", "boundary", "config")


class Sentinel(enum.Enum):
    """Values that are words."""

    AUTO = "auto"
    NONE = "none"


ORDER_KEYS = ("order", "names", "divide")

Value = Sentinel | Contract | Order


@frozen
class Condition:
    """All given parts must hold. `axis` alone means at least 2 ranks on it."""

    axis: str | None = None
    minimum: int = 2
    boundary: BoundaryKind | None = None
    config: tuple[tuple[str, ConfigValue], ...] = ()


@frozen
class Override:
    """One entry of an override file.

    Attributes:
        axes: those that placements are given for, replicated ones too.
    """

    key: str
    value: Value
    condition: Condition = Condition()
    axes: tuple[str, ...] = ()

    @property
    def is_glob(self) -> bool:
        return any(character in self.key for character in "*?[")


Overrides = tuple[Override, ...]


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise PlanError(f"overrides: {', '.join(repeated)} is given more than once")
        return super().construct_mapping(node, deep)


def read_overrides(source: Mapping[str, Any] | str | Path | None) -> Overrides:
    """Overrides from a mapping or a YAML file.

    Raises:
        PlanError: the file cannot be read, or a value is not one of the documented forms.
    """
    if source is None:
        return ()
    if isinstance(source, str | Path):
        source = _read_file(Path(source))
    if not isinstance(source, Mapping):
        raise PlanError(f"overrides: expected a mapping of names, found {type(source).__name__}")
    return tuple(_read_entry(str(key), value) for key, value in source.items())


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        loaded = yaml.load(path.read_text(), Loader=_UniqueKeys)
    except OSError as error:
        raise PlanError(f"overrides: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise PlanError(f"overrides: {path} is not YAML: {error}") from error
    return {} if loaded is None else loaded


def _read_entry(key: str, value: Any) -> Override:
    if not (isinstance(value, Mapping) and "when" in value):
        return Override(key, _read_value(key, value), axes=_axes(value))
    rest = {name: part for name, part in value.items() if name != "when"}
    if "use" in rest and len(rest) > 1:
        raise PlanError(f"override {key!r}: give either `use` or placements beside `when`")
    inner = rest.get("use", rest)
    condition = _read_condition(key, value["when"])
    return Override(key, _read_value(key, inner), condition, _axes(inner))


def _axes(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, Mapping) and "order" not in value else ()


def _read_value(key: str, value: Any) -> Value:
    if value in ("auto", "none"):
        return Sentinel(value)
    if value is None:
        raise PlanError(f"override {key!r} is empty; write `none` (as a word) to leave it whole")
    if not isinstance(value, Mapping) or not value:
        raise PlanError(
            f"override {key!r}: expected auto, none, placements such as {{tp: S(0)}}, "
            f"{{order: ...}}, or a mapping with `when`; found {value!r}"
        )
    if "order" in value:
        return _read_order(key, value)
    placements: dict[str, Placement] = {}
    gradients: dict[str, Placement] = {}
    for axis, text in value.items():
        if axis not in MODEL_AXES:
            raise PlanError(
                f"override {key!r}: {axis!r} is not a model axis; placements are given for "
                f"{', '.join(MODEL_AXES)} (data axes belong to fully_shard)"
            )
        placement, _, gradient = str(text).partition(" grad ")
        placements[axis] = _placement(key, placement)
        if gradient:
            gradients[axis] = _placement(key, gradient)
    try:
        return Contract(placements, gradients)
    except ValueError as error:
        raise PlanError(f"override {key!r}: {error}") from error


def _read_order(key: str, value: Mapping[str, Any]) -> Order:
    """`{order: q|k|v, names: [split], divide: [split_size]}`."""
    unknown = [name for name in value if name not in ORDER_KEYS]
    if unknown:
        raise PlanError(
            f"override {key!r}: beside `order` stand {', '.join(ORDER_KEYS[1:])} only; found "
            f"{', '.join(map(str, unknown))}"
        )
    if value["order"] not in ORDERS:
        raise PlanError(
            f"override {key!r}: no order {value['order']!r}; orders: {', '.join(ORDERS)}"
        )
    lists: dict[str, frozenset[str]] = {}
    for label in ORDER_KEYS[1:]:
        names = value.get(label, ())
        words = isinstance(names, list | tuple) and all(
            isinstance(name, str) and name.isidentifier() for name in names
        )
        if not words:
            raise PlanError(f"override {key!r}: `{label}` takes a list of names, found {names!r}")
        lists[label] = frozenset(names)
    return Order(value["order"], lists["names"], lists["divide"], source=key)


def _placement(key: str, text: str) -> Placement:
    """`R`, `P`, `S(0)`, `Sec(0,[4,2,2])`: as in a plan's YAML, where `P` is short for `P(sum)`."""
    short = text.strip()
    try:
        return parse_placement("P(sum)" if short == "P" else short)
    except ValueError as error:
        raise PlanError(f"override {key!r}: {error}") from error


def _read_condition(key: str, when: Any) -> Condition:
    if not isinstance(when, Mapping) or not when:
        raise PlanError(f"override {key!r}: `when` takes {', '.join(WHEN_KEYS)}; found {when!r}")
    unknown = [name for name in when if name not in WHEN_KEYS]
    if unknown:
        raise PlanError(
            f"override {key!r}: `when` knows {', '.join(WHEN_KEYS)}; found {', '.join(unknown)}"
        )
    axis, minimum = when.get("axis"), when.get("min", 2)
    if axis is not None and axis not in (*DATA_AXES, *MODEL_AXES):
        known = ", ".join((*DATA_AXES, *MODEL_AXES))
        raise PlanError(f"override {key!r}: unknown axis {axis!r}; the planner knows {known}")
    if "min" in when and axis is None:
        raise PlanError(f"override {key!r}: `min` needs an `axis`")
    if not isinstance(minimum, int):
        raise PlanError(f"override {key!r}: `min` is a number of ranks, found {minimum!r}")
    kind = when.get("boundary")
    kinds = [member.value for member in BoundaryKind]
    if kind is not None and kind not in kinds:
        raise PlanError(f"override {key!r}: no boundary kind {kind!r}; kinds: {', '.join(kinds)}")
    config = when.get("config", {})
    if not isinstance(config, Mapping):
        raise PlanError(f"override {key!r}: `config` takes names and values, found {config!r}")
    return Condition(
        axis, minimum, None if kind is None else BoundaryKind(kind), tuple(sorted(config.items()))
    )
