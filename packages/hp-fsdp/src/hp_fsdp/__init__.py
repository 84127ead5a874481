"""Two-tier fully sharded data parallelism with copy-free per-parameter collectives."""
