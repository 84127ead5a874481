"""`hp-plan MODEL --mesh tp=4,dp_shard=2`: prints the plan of a transformers model.

The model is built on the meta device, so its size does not matter. Exit status: 0 for a plan, 1
for a model that cannot be planned so, 2 for a command line that cannot be understood.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import nn

from hp_dtensor.plan import ShardingPlan
from hp_planner.derive import plan
from hp_planner.errors import PlanError
from hp_planner.explain import (
    BOUNDARY_COLUMNS,
    PARAMETER_COLUMNS,
    Row,
    boundary_rows,
    parameter_rows,
    summary_lines,
)


class UsageError(Exception):
    """The command line names something that does not exist or is not well formed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `hp-plan` and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        mesh = read_mesh_option(options.mesh)
        model = build_model(options.model, read_settings(options.set))
    except UsageError as error:
        print(f"hp-plan: {error}", file=sys.stderr)
        return 2
    try:
        made = plan(
            model,
            mesh,
            overrides=options.overrides,
            sequence_parallel=options.sequence_parallel,
        )
    except PlanError as error:
        print(f"hp-plan: {error}", file=sys.stderr)
        return 1
    print_plan(made, _element_size(model))
    if options.yaml is not None:
        try:
            options.yaml.write_text(made.to_yaml())
        except OSError as error:
            print(f"hp-plan: cannot write {options.yaml}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hp-plan", description="Derives and prints the sharding plan of a transformers model."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a config JSON file, a model type (qwen3_moe), or a class name (LlamaForCausalLM)",
    )
    parser.add_argument("--mesh", required=True, help="axes and sizes, such as tp=2,dp_shard=2")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="config values that differ from the model's own",
    )
    parser.add_argument("--overrides", type=Path, metavar="FILE", help="YAML file of overrides")
    parser.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="keep the hidden states whole between blocks",
    )
    parser.add_argument("--yaml", type=Path, metavar="FILE", help="also write the plan there")
    return parser


def read_mesh_option(text: str) -> dict[str, int]:
    """`tp=2,dp_shard=2` as a mapping, in the order given.

    Raises:
        UsageError: an entry is not `name=size`, or a name is repeated.
    """
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        name, separator, size = entry.strip().partition("=")
        if not (name and separator and size.isdecimal() and int(size) > 0):
            raise UsageError(f"--mesh: expected name=size entries such as tp=2, found {entry!r}")
        if name in mesh:
            raise UsageError(f"--mesh: axis {name!r} is given twice")
        mesh[name] = int(size)
    return mesh


def read_settings(entries: Sequence[str]) -> dict[str, Any]:
    """`name=value` entries; values are JSON where they can be, text otherwise.

    Raises:
        UsageError: an entry is not `name=value`.
    """
    settings: dict[str, Any] = {}
    for entry in entries:
        name, separator, text = entry.partition("=")
        if not (name and separator):
            raise UsageError(f"--set: expected NAME=VALUE, found {entry!r}")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return settings


def build_model(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """A causal language model of transformers on the meta device, with random nothing in it.

    Args:
        name: path of a config JSON file, a model type, or the class name of a model or config.
        settings: config values that replace the ones found there.

    Raises:
        UsageError: transformers is missing, or there is no such model, file or config value.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "building a model needs transformers; install hp-planner[models]"
        ) from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    values = _config_values(name)
    model_type = values.pop("model_type", None) or _model_type(transformers, name)
    if model_type not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"transformers {transformers.__version__} has no model type {model_type!r}"
        )
    if transformers.CONFIG_MAPPING[model_type] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{model_type} is no causal language model of transformers")
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise UsageError(f"--set: the config of {model_type} has no {', '.join(unknown)}")
    try:
        config = transformers.AutoConfig.for_model(model_type, **{**values, **settings})
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # transformers reports a bad config by many exception types.
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"{model_type} cannot be built with these values: {reason}") from error


def _config_values(name: str) -> dict[str, Any]:
    path = Path(name)
    if not (path.suffix == ".json" or path.is_file()):
        return {}
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UsageError(f"{name} is not a config of transformers: it has no model_type")
    return {key: value for key, value in values.items() if key != "transformers_version"}


def _model_type(transformers: Any, name: str) -> str:
    """A model type as it is; the type of a model class or config class."""
    if name in transformers.CONFIG_MAPPING:
        return name
    found = getattr(transformers, name, None) if name.isidentifier() else None
    config_class = getattr(found, "config_class", found)
    model_type = getattr(config_class, "model_type", "")
    if isinstance(model_type, str) and model_type:
        return model_type
    raise UsageError(
        f"{name!r} is neither a config file nor a model type or class of transformers "
        f"{transformers.__version__}"
    )


def _element_size(model: nn.Module) -> int:
    return max((parameter.element_size() for parameter in model.parameters()), default=4)


def print_plan(made: ShardingPlan, element_size: int) -> None:
    """The plan as tables on standard output; a file or pipe gets lines as long as they need."""
    tables = [_table("Parameters", PARAMETER_COLUMNS, parameter_rows(made))]
    if made.boundaries:
        tables.append(_table("Boundaries", BOUNDARY_COLUMNS, boundary_rows(made)))
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(_natural_width(table) for table in tables))
    console.print(Text(str(made), style="bold"))
    for table in tables:
        console.print(table)
    for line in summary_lines(made, element_size=element_size):
        console.print(Text(line))


def _natural_width(table: Table) -> int:
    return Measurement.get(Console(width=1000), Console(width=1000).options, table).maximum


def _table(title: str, columns: Row, rows: Sequence[Row]) -> Table:
    """Cells are `Text`: a placement such as `Sec(1,[32,32])` is no markup."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


if __name__ == "__main__":
    sys.exit(main())
