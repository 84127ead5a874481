"""Benchmarks: ours and the peers interleaved in one process group.

`python -m hp_integration.bench NAME [--json] [--quick]`.
"""
