"""Regions that plans refer to: modules that exchange data inside, declared opaque.

- `expert_parallel`: fused experts spread over an axis, tokens sent to them and back.
- `expert_biases`: fused experts whose features are spread, with a bias that is added once;
  `expert_parallel_with_biases`: the same with the experts spread, too.
- `context_parallel`: attention whose queries are sharded along the sequence.
- `shared_heads`: tensor-parallel attention with fewer key/value heads than ranks;
  `context_parallel_shared_heads`: the same with the sequence sharded.

A plan names them (`hp_dtensor.plan.Region.function`), and `hp_dtensor.parallelize` installs them.
Their obligations are in their docstrings, and each is tested by itself against the dense module.
"""

from hp_integration.regions.context_parallel import context_parallel
from hp_integration.regions.expert_biases import expert_biases, expert_parallel_with_biases
from hp_integration.regions.expert_parallel import expert_parallel
from hp_integration.regions.shared_heads import context_parallel_shared_heads, shared_heads

__all__ = [
    "context_parallel",
    "context_parallel_shared_heads",
    "expert_biases",
    "expert_parallel",
    "expert_parallel_with_biases",
    "shared_heads",
]
