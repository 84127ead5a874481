"""The conformance cases on PyTorch's LocalTensorMode, as a second opinion on the laws.

`torch.distributed._local_tensor` is private: nothing but this module uses it, and only tests use
this module. It has true semantics for some operations and none for others; `run` says which.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hp_platform.testing.conformance import Case
from hp_platform.uneven import all_gather_even, reduce_scatter_even

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class Unsupported(NotImplementedError):  # noqa: N818  (no error: there is nothing to try)
    """LocalTensorMode cannot run a case, and why."""


def run(case: Case) -> list[Tensor]:
    """Every rank's result. Needs a default process group of the `fake` backend.

    Raises:
        Unsupported: the mode has no such operation, or not for shares of different lengths.
    """
    try:
        from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    except ImportError as error:
        raise Unsupported(f"this PyTorch has no LocalTensorMode: {error}") from error
    _require(case)
    ranks = range(case.world_size)
    rows = case.shares[0]
    # A rank is a tensor of its own in here; the calls are made once for all of them.
    with LocalTensorMode(case.world_size):
        tensor = LocalTensor({rank: case.input(rank) for rank in ranks})
        if case.operation == "all_gather":
            result = tensor.new_empty(rows * case.world_size, *tensor.shape[1:])
            all_gather_even(result, tensor)
        elif case.operation == "reduce_scatter":
            result = tensor.new_empty(rows, *tensor.shape[1:])
            reduce_scatter_even(result, tensor, op=_OPS[case.op])
        elif case.operation == "all_to_all":
            result = tensor.new_empty(tensor.shape)
            dist.all_to_all_single(result, tensor)
        elif case.operation == "broadcast":
            result = tensor
            dist.broadcast(result, src=case.root)
        else:
            result = tensor
            dist.all_reduce(result, op=_OPS[case.op])
    return [result._local_tensors[rank] for rank in ranks]  # type: ignore[attr-defined]


def _require(case: Case) -> None:
    if case.operation in ("reduce", "exchange"):
        raise Unsupported(f"LocalTensorMode has no {case.operation}")
    if len(set(case.shares)) > 1:
        raise Unsupported("its ranks' calls are one call, which cannot give each its own length")
    if not case.shares[0]:
        raise Unsupported("empty messages are never sent by hp-platform")
