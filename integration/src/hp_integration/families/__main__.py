"""`python -m hp_integration.families [FAMILY ...] [--write FILE]`: the table of families.

`--mode validate` runs the same ranks with every check on, `--mode meta` one process without values.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

from hp_integration.families.configs import HEAVY, families
from hp_integration.families.judge import Mode, Result, judge
from hp_integration.families.table import table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hp_integration.families", description=__doc__)
    parser.add_argument("family", nargs="*", help="model types; all that can be built if none")
    parser.add_argument("--mesh", default="tp=2", help="axes and sizes, such as tp=2,ep=2")
    parser.add_argument("--mode", choices=get_args(Mode), default="production")
    parser.add_argument("--whole", action="store_true", help="without sequence parallelism")
    parser.add_argument("--write", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    mesh = {
        axis: int(size) for axis, _, size in (p.partition("=") for p in options.mesh.split(","))
    }
    names = options.family or [name for name in families() if name not in HEAVY]
    results: list[Result] = []
    for name in names:
        result = judge(name, mesh, options.mode, sequence_parallel=not options.whole)
        results.append(result)
        told = f" (overridden: {result.overridden.verdict.value})" if result.overridden else ""
        print(
            f"{result.family:24} {result.verdict.value:10}{told} {result.error:8.1e} "
            f"{result.sharded:4.0%} {' '.join(result.note.split())[:300]}",
            flush=True,
        )
    print(dict(Counter(result.verdict.value for result in results)))
    if options.write:
        options.write.write_text(table(results, mesh))
    return 0


if __name__ == "__main__":
    sys.exit(main())
