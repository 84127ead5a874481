"""`python -m hp_integration.bench NAME [--json] [--quick]`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from rich.console import Console

from hp_integration.bench.result import BenchResult

_BENCHES = {
    "fsdp": "fsdp",
    "two-tier": "two_tier",
    "muon": "muon",
    "host-overhead": "host_overhead",
    "redistribution": "redistribution",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark. The status is 0 whether or not its targets hold."""
    parser = argparse.ArgumentParser(prog="python -m hp_integration.bench")
    parser.add_argument("name", choices=_BENCHES)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="ends within 50 seconds")
    options = parser.parse_args(argv)
    module = import_module(f"hp_integration.bench.{_BENCHES[options.name]}")
    result: BenchResult = module.run(options.quick)
    if options.json:
        print(result.to_json())
    else:
        result.print(Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
