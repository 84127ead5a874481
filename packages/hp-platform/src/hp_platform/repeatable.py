"""Collectives that are made many times with the same tensors: their arguments are checked once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hp_platform.arguments import check_scratch, check_tensor, make_output
from hp_platform.axis import MeshAxis
from hp_platform.collectives import all_gather, reduce_scatter
from hp_platform.equal_shares import prepare_equal_all_gather, prepare_equal_reduce_scatter
from hp_platform.handle import NOBODY, Handle, issue, refuse
from hp_platform.ledger import Origin
from hp_platform.staging import plain, transportable
from hp_platform.uneven import all_gather_even, reduce_scatter_even

__all__ = ["repeatable_all_gather", "repeatable_reduce_scatter"]


def repeatable_all_gather(
    tensor: Tensor, axis: MeshAxis, *, output: Tensor, lends: bool = False
) -> Callable[[Origin], Handle[Tensor]]:
    """An all-gather that is made many times between the same tensors, of equal shares.

    Arguments are checked now; each call of the result issues it, for the given origin.

    Args:
        tensor, output, lends: as for `all_gather`.

    Raises:
        CollectiveError: an argument cannot be used.
    """
    name = "all_gather"
    able = check_tensor(name, tensor, axis, NOBODY, rows=True)
    rows = tensor.shape[0]
    result = make_output(
        name, axis, NOBODY, output, rows * axis.size, tensor, lambda: axis.rank * rows
    )
    group = axis.process_group
    if group is None or not result.numel() or able is None:
        return lambda origin: all_gather(tensor, axis, output=output, lends=lends, origin=origin)
    source, target = transportable(tensor, able), transportable(result, able)
    tensors, size, dtype = (tensor, result), result.nbytes, tensor.dtype
    if able.direct:
        begin = prepare_equal_all_gather(source.view(-1), target.view(-1), axis, lends)
        return lambda o: issue(name, axis, o, lambda: begin(o), result, size, tensors, dtype)

    def start() -> tuple[Any, ...]:
        return (all_gather_even(target, source, group=group, async_op=True),)

    return lambda origin: issue(name, axis, origin, start, result, size, tensors, dtype)


def repeatable_reduce_scatter(
    tensor: Tensor, axis: MeshAxis, *, scratch: Tensor | None = None, lends: bool = False
) -> Callable[[Tensor, Origin], Handle[Tensor]]:
    """A reduce-scatter (sum, equal shares) that is made many times of the same flat tensor.

    `tensor` and `scratch` are checked now, as `reduce_scatter` does. Each call of the result
    issues it into the given output, which lies in memory of its own, for the given origin. `lends`
    is as for `all_gather`.

    Raises:
        CollectiveError: an argument cannot be used.
    """
    name = "reduce_scatter"
    able = check_tensor(name, tensor, axis, NOBODY, True, True)
    length = tensor.numel() // axis.size
    if tensor.dim() != 1 or length * axis.size != tensor.numel():
        problem = f"a repeatable call needs a flat tensor that divides by the axis size {axis.size}"
        refuse(name, axis, NOBODY, f"{problem}, found shape {tuple(tensor.shape)}")
    check_scratch(name, axis, NOBODY, scratch, tensor, tensor[:length])
    group = axis.process_group
    if group is None or not tensor.numel() or able is None:
        return lambda output, origin: reduce_scatter(
            tensor, axis, output=output, scratch=scratch, lends=lends, origin=origin
        )
    source, size, dtype = plain(tensor), tensor.nbytes, tensor.dtype
    prepare = prepare_equal_reduce_scatter(source, scratch, axis, lends) if able.direct else None

    def direct(output: Tensor, origin: Origin) -> Handle[Tensor]:
        make_output(name, axis, origin, output, length, tensor)
        assert prepare is not None
        call = prepare(output, origin)
        return issue(
            name, axis, origin, call.start, output, size, (tensor, output), dtype,
            call.keep, call.finish,
        )  # fmt: skip

    def by_backend(output: Tensor, origin: Origin) -> Handle[Tensor]:
        make_output(name, axis, origin, output, length, tensor)
        return issue(
            name, axis, origin,
            lambda: (reduce_scatter_even(output, source, group=group, async_op=True),),
            output, size, (tensor, output), dtype,
        )  # fmt: skip

    return by_backend if prepare is None else direct
