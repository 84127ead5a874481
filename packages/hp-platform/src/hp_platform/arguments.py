"""Refuses, before the call, what a backend would corrupt, misread or hang on.

gloo, for one, accepts strided tensors and silently writes to the wrong places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hp_platform.axis import MeshAxis
from hp_platform.capabilities import GLOO, TABLE, Capabilities, capabilities_of
from hp_platform.handle import refuse
from hp_platform.ledger import Origin

_PLAIN = (Tensor, torch.nn.Parameter)


def check_tensor(
    operation: str,
    tensor: Tensor,
    axis: MeshAxis,
    origin: Origin,
    *,
    reduces: bool,
    rows: bool = False,
) -> Capabilities:
    """Checks type, contiguity, device and dtype; returns the backend's capabilities.

    Args:
        reduces: the collective computes, so the backend must know the dtype.
        rows: the collective divides dim 0, so there must be one.
    """
    if not isinstance(tensor, Tensor):
        refuse(operation, axis, origin, f"expected a tensor, got {type(tensor).__name__}")
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        problem = f"a {type(tensor).__name__} cannot be sent; pass its local tensor"
        refuse(operation, axis, origin, problem)
    if tensor.layout != torch.strided:
        refuse(operation, axis, origin, f"a {tensor.layout} tensor cannot be sent; densify it")
    if not tensor.is_contiguous():
        problem = f"the tensor of shape {tuple(tensor.shape)} is not contiguous "
        problem = f"{problem}(strides {tensor.stride()}); call .contiguous()"
        refuse(operation, axis, origin, problem)
    if rows and tensor.ndim == 0:
        refuse(operation, axis, origin, "the tensor is 0-dimensional and has no rows")
    if tensor.device != axis.device:
        problem = f"the tensor is on {tensor.device}, the axis communicates on {axis.device}"
        refuse(operation, axis, origin, f"{problem}; move it there")
    if axis.process_group is None:
        return GLOO
    capabilities = capabilities_of(axis.backend, axis.device.type)
    if capabilities is None:
        problem = f"backend {axis.backend!r} on {axis.device.type} is not supported"
        refuse(operation, axis, origin, f"{problem}; known are {', '.join(TABLE)}")
    if reduces and tensor.dtype not in capabilities.dtypes:
        known = sorted(str(dtype).removeprefix("torch.") for dtype in capabilities.dtypes)
        problem = f"{capabilities.backend} cannot reduce {tensor.dtype}; convert to one of "
        refuse(operation, axis, origin, problem + ", ".join(known))
    return capabilities


def check_op(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    op: str,
    known: Sequence[str],
    dtype: torch.dtype,
) -> None:
    """Checks that the reduction exists for the dtype."""
    if op not in known:
        refuse(operation, axis, origin, f"op {op!r} is unknown; use one of {', '.join(known)}")
    if op == "avg" and not dtype.is_floating_point:
        refuse(operation, axis, origin, f"the average of {dtype} is not defined; use op='sum'")


def check_coordinate(
    operation: str, axis: MeshAxis, origin: Origin, name: str, coordinate: int
) -> None:
    """Checks that a source or destination is on the axis."""
    if not 0 <= coordinate < axis.size:
        problem = f"{name}={coordinate} is not a coordinate of the axis; use 0 to {axis.size - 1}"
        refuse(operation, axis, origin, problem)


def check_shares(
    operation: str, axis: MeshAxis, origin: Origin, name: str, sizes: Sequence[int]
) -> tuple[int, ...]:
    """Checks that `sizes` has a number of rows for every coordinate."""
    shares = tuple(sizes)
    if len(shares) != axis.size or min(shares) < 0:
        problem = f"{name} {list(shares)} must be {axis.size} non-negative numbers of rows, "
        refuse(operation, axis, origin, f"{problem}one for every coordinate")
    return shares


def cut_rows(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    name: str,
    sizes: Sequence[int] | None,
    tensor: Tensor,
) -> tuple[int, ...]:
    """The shares into which `tensor`'s rows are cut: as given, or equal."""
    rows = tensor.shape[0]
    if sizes is None:
        if rows % axis.size:
            problem = f"{rows} rows do not divide by the axis size {axis.size}; give {name}"
            refuse(operation, axis, origin, problem)
        return (rows // axis.size,) * axis.size
    shares = check_shares(operation, axis, origin, name, sizes)
    if sum(shares) != rows:
        problem = f"{name} {list(shares)} add up to {sum(shares)}, the tensor has {rows} rows"
        refuse(operation, axis, origin, problem)
    return shares


def make_output(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    output: Tensor | None,
    rows: int,
    tensor: Tensor,
) -> Tensor:
    """`output` once it is checked to fit, or a new tensor of `rows` rows like `tensor`'s."""
    shape = (rows, *tensor.shape[1:])
    if output is None:
        return tensor.new_empty(shape)
    if output.shape != shape:
        found = tuple(output.shape)
        refuse(operation, axis, origin, f"output has shape {found}, the result has {shape}")
    if output.dtype != tensor.dtype or output.device != tensor.device:
        problem = f"output is {output.dtype} on {output.device}, the tensor {tensor.dtype} on "
        refuse(operation, axis, origin, f"{problem}{tensor.device}; they must agree")
    if not output.is_contiguous():
        problem = f"output of shape {shape} is not contiguous (strides {output.stride()}); "
        refuse(operation, axis, origin, f"{problem}give a contiguous view")
    return output
