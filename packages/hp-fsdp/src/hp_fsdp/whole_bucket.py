"""The bucket whose parameter cannot be cut."""

from __future__ import annotations

from torch import Tensor

from hp_fsdp.bucket import Bucket
from hp_platform.buffers import aligned_empty


class WholeBucket(Bucket):
    """A 0-dimensional parameter: every rank holds it and receives the sum of its gradients."""

    def _packed(self, gradients: Tensor) -> Tensor:
        flat = aligned_empty(self.gathered_numel, gradients.dtype, gradients.device)
        return flat.copy_(gradients[:1].expand(self.gathered_numel))
