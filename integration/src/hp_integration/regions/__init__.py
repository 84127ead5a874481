"""Regions that plans refer to: modules that exchange data inside, declared opaque.

- `expert_parallel`: fused experts spread over an axis, tokens sent to them and back.
- `context_parallel`: attention whose queries are sharded along the sequence.

A plan names them (`hp_dtensor.plan.Region.function`), and `hp_dtensor.parallelize` installs them.
Their obligations are in their docstrings, and each is tested by itself against the dense module.
"""

from hp_integration.regions.context_parallel import context_parallel
from hp_integration.regions.expert_parallel import expert_parallel

__all__ = ["context_parallel", "expert_parallel"]
