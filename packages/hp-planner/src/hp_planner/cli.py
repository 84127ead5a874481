"""`hp-plan MODEL --mesh tp=4,dp_shard=2`: prints the plan of a model.

The model is built on the meta device, so its size does not matter. Exit status, for scripts: 0 for
a plan; 1 for a model that cannot be planned so; 2 for a command line that cannot be understood; 3
for a plan that differs from `--against`; 4 for a plan that `--validate` finds wrong.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import nn

from hp_dtensor.plan import ShardingPlan
from hp_planner.cost import Workload
from hp_planner.derive import plan
from hp_planner.diff import diff
from hp_planner.errors import PlanError
from hp_planner.explain import (
    BOUNDARY_COLUMNS,
    COST_COLUMNS,
    PARAMETER_COLUMNS,
    Row,
    boundary_rows,
    cost_rows,
    memory_lines,
    parameter_rows,
    reason_lines,
    step_title,
    summary_lines,
)
from hp_planner.model_source import UsageError, build_model, parse_mesh, read_settings
from hp_planner.override_file import read_overrides
from hp_planner.page import html_page
from hp_planner.settings import DATA_AXES, MODEL_AXES

PLANNED, NOT_PLANNED, MISUSED, DIFFERENT, INVALID = range(5)
STATUSES = (
    "Exit status: 0 planned; 1 the model cannot be planned so; 2 wrong command line; "
    "3 differs from --against; 4 --validate found an error."
)
CHOICES_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `hp-plan` and returns its exit status."""
    try:
        return _run(_parser().parse_args(arguments))
    except UsageError as error:
        print(f"hp-plan: {error}", file=sys.stderr)
        return MISUSED


def _run(options: argparse.Namespace) -> int:
    # Files and words come before the model, whose library takes seconds to load.
    mesh = parse_mesh(options.mesh, known=(*DATA_AXES, *MODEL_AXES))
    settings = read_settings(options.set)
    against = None if options.against is None else _read_plan(options.against)
    for path in (options.yaml, options.html):
        _require_folder_of(path)
    try:
        read_overrides(options.overrides)
        model = build_model(options.model, settings)
        made = plan(
            model,
            mesh,
            overrides=options.overrides,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
        )
    except PlanError as error:
        print(f"hp-plan: {error}", file=sys.stderr)
        return NOT_PLANNED
    workload = _workload(options, model)
    if not options.quiet:
        print_plan(made, _element_size(model), workload)
    _write(options.yaml, made.to_yaml)
    _write(options.html, lambda: html_page(made, workload))
    status = PLANNED
    if against is not None:
        found = diff(against, made)
        print(f"against {options.against}: {found}")
        status = DIFFERENT if found else status
    if options.validate:
        status = status if _validates(model, made, options) else INVALID
    return status


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as this command's other ones: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (hp-plan --help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hp-plan",
        description="Derives, prints, compares and validates the sharding plan of a model.",
        epilog=STATUSES,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a config JSON file, a model type (qwen3_moe), a class name (LlamaForCausalLM), or a "
        "Python factory (package.module:function) that returns a module; the current folder is "
        "searched first",
    )
    parser.add_argument(
        "--mesh",
        required=True,
        help="sizes of axes, such as tp=2,dp_shard=2; axes are dp_replicate, dp_shard, ep, cp, tp",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="config values that differ from the model's own; a factory's arguments",
    )
    parser.add_argument("--overrides", type=Path, metavar="FILE", help="YAML file of overrides")
    parser.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="keep the hidden states whole between blocks",
    )
    parser.add_argument(
        "--loss-parallel", action="store_true", help="leave the logits sharded over the vocabulary"
    )
    _add_cost(parser.add_argument_group("cost"))
    _add_output(parser.add_argument_group("output and checks"))
    return parser


def _add_cost(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch", type=_positive, default=1, metavar="N", help="sequences a rank (default 1)"
    )
    group.add_argument(
        "--seq-len", type=_positive, metavar="N", help="tokens a sequence; tells bytes and memory"
    )
    group.add_argument(
        "--element-size",
        type=_positive,
        metavar="BYTES",
        help="bytes of an element in the figures (default: the model's own dtype)",
    )
    group.add_argument(
        "--optimizer-bytes",
        type=_positive,
        default=8,
        metavar="BYTES",
        help="bytes of optimizer state a parameter element (default 8: two fp32 moments)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--quiet", action="store_true", help="do not print the plan")
    group.add_argument("--yaml", type=Path, metavar="FILE", help="also write the plan there")
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="draw the plan as one self-contained page"
    )
    group.add_argument(
        "--against", type=Path, metavar="PLAN", help="show how the plan differs from a YAML plan"
    )
    group.add_argument(
        "--validate",
        action="store_true",
        help="run the model in validate mode on meta tensors: every operator and boundary",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def _read_plan(path: Path) -> ShardingPlan:
    try:
        return ShardingPlan.from_yaml(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _require_folder_of(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: no such folder {path.parent}")


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _workload(options: argparse.Namespace, model: nn.Module) -> Workload | None:
    if options.seq_len is None:
        return None
    config = getattr(model, "config", None)
    choices = (getattr(config, name, None) for name in CHOICES_OF_A_TOKEN)
    return Workload(
        batch=options.batch,
        sequence=options.seq_len,
        element_size=options.element_size or _element_size(model),
        optimizer_bytes=options.optimizer_bytes,
        experts_per_token=next((n for n in choices if isinstance(n, int)), None),
    )


def _element_size(model: nn.Module) -> int:
    return max((parameter.element_size() for parameter in model.parameters()), default=4)


def _validates(model: nn.Module, made: ShardingPlan, options: argparse.Namespace) -> bool:
    """Runs validate mode without values and prints what it went through, or what is wrong."""
    from hp_dtensor.errors import PlanError as AnyPlanError
    from hp_dtensor.meta import validate_on_meta

    length = options.seq_len or 2 * made.model_mesh.world_size
    ids = torch.zeros(options.batch, length, dtype=torch.long)
    inputs: dict[str, object] = {"input_ids": ids}
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    try:
        print(validate_on_meta(model, made, inputs))
    except AnyPlanError as error:
        print(f"hp-plan: --validate: {error}", file=sys.stderr)
        return False
    except Exception as error:
        # Whatever the model's own code raises under validate mode is a finding, with its place.
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"hp-plan: --validate: {type(error).__name__}: {error}{notes}", file=sys.stderr)
        return False
    return True


def print_plan(made: ShardingPlan, element_size: int, workload: Workload | None = None) -> None:
    """The plan as tables on standard output; a file or pipe gets lines as long as they need,
    without blanks at their ends."""
    rows = parameter_rows(made)
    parameters = _table(PARAMETER_COLUMNS[:-1], [row[:-1] for row in rows])
    tables = [("Parameters", parameters)]
    if made.boundaries:
        tables.append(("Boundaries", _table(BOUNDARY_COLUMNS, boundary_rows(made))))
    lines = list(summary_lines(made, element_size=element_size))
    if workload is not None:
        try:
            table = _table(COST_COLUMNS, cost_rows(made, workload))
            lines += memory_lines(made, workload)
        except ValueError as error:
            raise UsageError(str(error)) from error
        tables.append((step_title(made, workload), table))
    console = Console()
    if console.is_terminal:
        _print_to(console, str(made), tables, (reason_lines(rows), *lines))
        return
    text = io.StringIO()
    wide = Console(file=text, width=max(_natural_width(table) for _, table in tables))
    _print_to(wide, str(made), tables, (reason_lines(rows), *lines))
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _print_to(
    console: Console, heading: str, tables: Sequence[tuple[str, Table]], lines: Sequence[str]
) -> None:
    whole = not console.is_terminal
    console.print(Text(heading, style="bold"), soft_wrap=whole)
    for title, table in tables:
        console.print(Text(title, style="italic"), soft_wrap=whole)
        console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=whole)


def _natural_width(table: Table) -> int:
    return Measurement.get(Console(width=1000), Console(width=1000).options, table).maximum


def _table(columns: Row, rows: Sequence[Row]) -> Table:
    """Cells are `Text`: a placement such as `Sec(1,[32,32])` is no markup."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


if __name__ == "__main__":
    sys.exit(main())
