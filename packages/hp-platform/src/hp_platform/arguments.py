"""Refuses, before the call, what a backend would corrupt, misread or hang on.

gloo, for one, accepts strided tensors and silently writes to the wrong places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

import torch
from torch import Tensor

from hp_platform.axis import MeshAxis
from hp_platform.capabilities import TABLE, Capabilities
from hp_platform.handle import refuse
from hp_platform.ledger import Origin

_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
# Devices whose tensors have an address exactly when they have memory.
_ADDRESSED = ("cpu", "cuda")
# What a subclass has that leaves its operations, and so its memory, to PyTorch.
_NO_DISPATCH = Tensor.__torch_dispatch__

_REMEDIES = {
    torch.bool: "reduce .to(torch.uint8) or .to(torch.int32): 'max' is any, 'min' is all",
    torch.complex32: "reduce torch.view_as_real(tensor)",
    torch.complex64: "reduce torch.view_as_real(tensor)",
    torch.complex128: "reduce torch.view_as_real(tensor)",
}


def check_tensor(
    operation: str,
    tensor: Tensor,
    axis: MeshAxis,
    origin: Origin,
    reduces: bool = False,
    rows: bool = False,
    writes: bool = False,
) -> Capabilities | None:
    """Checks type, memory, contiguity, device and dtype; returns the backend's capabilities.

    Args:
        reduces: the collective computes, so the backend must know the dtype.
        rows: the collective divides dim 0, so there must be one.
        writes: the collective changes the tensor.

    Returns:
        None when the tensor is in host memory, or a single element on another device than the
        axis, and the caller has to carry it there and back.
    """
    able = axis.capabilities
    # One conjunction, because this is on the path of every collective; what is wrong with a
    # tensor that fails it is found out afterwards.
    if (
        able is not None
        and type(tensor) in _PLAIN
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and tensor.device == axis.device
        # Complex types, which alone can be conjugated, are in neither set.
        and tensor.dtype in (able.reduces if reduces else able.moves)
        and not tensor.is_neg()
        and not tensor.is_nested
        and (not rows or tensor.shape)
        and not (writes and (tensor.requires_grad or tensor.is_inference()))
        and _has_memory(tensor)
    ):
        return able
    return _examine(operation, tensor, axis, origin, reduces, rows, writes)


def _examine(
    operation: str,
    tensor: Tensor,
    axis: MeshAxis,
    origin: Origin,
    reduces: bool,
    rows: bool,
    writes: bool,
) -> Capabilities | None:
    if not isinstance(tensor, Tensor):
        refuse(operation, axis, origin, f"expected a tensor, got {type(tensor).__name__}")
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        problem = f"a {type(tensor).__name__} cannot be sent; pass its local tensor"
        refuse(operation, axis, origin, problem)
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        problem = f"a {type(tensor).__name__} handles operations itself and may have no memory"
        refuse(operation, axis, origin, f"{problem}; pass the plain tensors inside it")
    if tensor.is_nested or tensor.is_quantized:
        problem = f"a {'nested' if tensor.is_nested else 'quantized'} tensor cannot be sent; pass "
        refuse(operation, axis, origin, f"{problem}the plain tensors that it is made of")
    if tensor.layout != _STRIDED:
        refuse(operation, axis, origin, f"a {tensor.layout} tensor cannot be sent; densify it")
    if not tensor.is_contiguous():
        problem = f"the tensor of shape {tuple(tensor.shape)} is not contiguous "
        problem = f"{problem}(strides {tensor.stride()}); call .contiguous()"
        refuse(operation, axis, origin, problem)
    if tensor.is_neg() or tensor.is_conj():
        problem = "the tensor is a negated or conjugated view, whose memory holds other values; "
        refuse(operation, axis, origin, f"{problem}call .resolve_neg() or .resolve_conj()")
    if rows and tensor.ndim == 0:
        problem = "the tensor is 0-dimensional and has no rows; use .view(1)"
        refuse(operation, axis, origin, problem)
    if writes:
        check_written(operation, axis, origin, "the tensor", tensor)
    able = axis.capabilities
    if able is None:
        problem = f"backend {axis.backend!r} on {axis.device.type} is not supported"
        refuse(operation, axis, origin, f"{problem}; use one of {', '.join(TABLE)}")
    if reduces and tensor.dtype not in able.reduces:
        known = sorted(str(dtype).removeprefix("torch.") for dtype in able.reduces)
        remedy = _REMEDIES.get(tensor.dtype, f"convert to one of {', '.join(known)}")
        refuse(operation, axis, origin, f"{able.backend} cannot reduce {tensor.dtype}; {remedy}")
    if tensor.device != axis.device:
        device, axis_device = tensor.device.type, axis.device.type
        if "meta" not in (device, axis_device) and (device == "cpu" or tensor.numel() == 1):
            return None
        problem = f"the tensor is on {tensor.device}, the axis communicates on {axis.device}"
        remedy = "move it there (what is in host memory is carried there and back)"
        refuse(operation, axis, origin, f"{problem}; {remedy}")
    if tensor.numel() and tensor.device.type in _ADDRESSED and not _has_memory(tensor):
        problem = "the tensor has no memory: its storage was freed, or a transform of torch.func "
        refuse(operation, axis, origin, f"{problem}wraps it; pass a tensor that holds its values")
    return able


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # wrapped by a transform of torch.func
        return False


def check_written(
    operation: str, axis: MeshAxis, origin: Origin, what: str, tensor: Tensor
) -> None:
    """Checks that autograd allows a tensor to be overwritten, by the rule of in-place operations.

    Without it a graph that holds the tensor would silently differentiate other values.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        problem = f"{what} was made in inference mode and cannot be overwritten outside of it; "
        refuse(operation, axis, origin, f"{problem}call under torch.inference_mode()")
    if tensor.requires_grad and torch.is_grad_enabled():
        problem = f"{what} requires grad and would be overwritten outside of autograd; "
        refuse(operation, axis, origin, f"{problem}call under torch.no_grad(), or pass .detach()")


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
        problem = f"the average of {dtype} is not defined; use op='sum', or convert to float32"
        refuse(operation, axis, origin, problem)


def check_coordinate(
    operation: str, axis: MeshAxis, origin: Origin, name: str, coordinate: int
) -> None:
    """Checks that a source or destination is on the axis."""
    if not isinstance(coordinate, int) or not 0 <= coordinate < axis.size:
        problem = f"{name}={coordinate} is not a coordinate of the axis; use 0 to {axis.size - 1}"
        refuse(operation, axis, origin, problem)


def check_shares(
    operation: str, axis: MeshAxis, origin: Origin, name: str, sizes: Sequence[int]
) -> tuple[int, ...]:
    """Checks that `sizes` has a number of rows for every coordinate."""
    try:
        shares = tuple(map(index, sizes))
    except TypeError:
        shares = ()
    if len(shares) != axis.size or min(shares) < 0:
        problem = f"{name} {sizes!r} must be {axis.size} non-negative numbers of rows, "
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


def check_scratch(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    scratch: Tensor | None,
    tensor: Tensor,
    result: Tensor,
) -> None:
    """Checks that `scratch`, if it is given, can hold all of `tensor` but what is in `result`."""
    if scratch is None:
        return
    needed = tensor.numel() - result.numel()
    fits = scratch.ndim == 1 and scratch.numel() >= needed and scratch.is_contiguous()
    if not fits or scratch.dtype != tensor.dtype or scratch.device != tensor.device:
        problem = f"scratch is {scratch.dtype} on {scratch.device} of shape {tuple(scratch.shape)}"
        problem = f"{problem}; expected a 1-D {tensor.dtype} on {tensor.device} of at least "
        refuse(operation, axis, origin, f"{problem}{needed} elements")
    if needed and (_share_memory(scratch, tensor) or _share_memory(scratch, result)):
        problem = "scratch shares memory with the tensor or the output; give it memory of its own"
        refuse(operation, axis, origin, problem)


def make_output(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    output: Tensor | None,
    rows: int,
    tensor: Tensor,
    place: Callable[[], int] | None = None,
) -> Tensor:
    """`output` once it is checked to fit, or a new tensor of `rows` rows like `tensor`'s.

    Args:
        place: the row at which the smaller of the two may lie in the larger; None when they may
            not share memory at all.
    """
    shape = (rows,) if tensor.dim() == 1 else (rows, *tensor.shape[1:])
    if output is None:
        return tensor.new_empty(shape)
    # As in check_tensor: one conjunction, and the reasons afterwards.
    if not (
        isinstance(output, Tensor)
        and output.shape == shape
        and output.dtype is tensor.dtype
        and output.device == tensor.device
        and output.is_contiguous()
        and not output.is_neg()
        and not output.is_conj()
        and not (output.requires_grad or output.is_inference())
        and type(output) in _PLAIN
    ):
        _examine_output(operation, axis, origin, output, shape, tensor)
    # Tensors without memory, empty ones and those on the meta device, are at address 0.
    first, second = tensor.data_ptr(), output.data_ptr()
    if first and not second and output.numel():
        problem = "output has no memory, its storage was freed; allocate it first"
        refuse(operation, axis, origin, problem)
    if first and second and first < second + output.nbytes and second < first + tensor.nbytes:
        row = tensor.shape[1:].numel() * tensor.element_size()
        if place is None or abs(first - second) != place() * row:
            problem = "output shares memory with the tensor, at another place than its share's; "
            refuse(operation, axis, origin, f"{problem}give it memory of its own")
    return output


def _examine_output(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    output: Tensor,
    shape: tuple[int, ...],
    tensor: Tensor,
) -> None:
    if not isinstance(output, Tensor):
        refuse(operation, axis, origin, f"output must be a tensor, got {type(output).__name__}")
    if type(output).__torch_dispatch__ is not _NO_DISPATCH:
        problem = f"output is a {type(output).__name__}, which handles operations itself"
        refuse(operation, axis, origin, f"{problem}; pass the plain tensor inside it")
    if output.shape != shape:
        found = tuple(output.shape)
        refuse(operation, axis, origin, f"output has shape {found}, the result has {shape}")
    if output.dtype != tensor.dtype or output.device != tensor.device:
        problem = f"output is {output.dtype} on {output.device}, the tensor {tensor.dtype} on "
        refuse(operation, axis, origin, f"{problem}{tensor.device}; they must agree")
    if not output.is_contiguous():
        problem = f"output of shape {shape} is not contiguous (strides {output.stride()}); "
        refuse(operation, axis, origin, f"{problem}give a contiguous view")
    if output.is_neg() or output.is_conj():
        problem = "output is a negated or conjugated view, whose memory holds other values; "
        refuse(operation, axis, origin, f"{problem}give the tensor that it is a view of")
    check_written(operation, axis, origin, "output", output)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    if not first or not second:
        return False
    return first < second + other.nbytes and second < first + one.nbytes


def refuse_overlaps(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    *,
    written: Sequence[Tensor],
    read: Sequence[Tensor],
) -> None:
    """Checks that no written tensor shares memory with another tensor of the call."""
    extents = [(t.data_ptr(), t.data_ptr() + t.nbytes, True) for t in written if t.nbytes]
    extents += [(t.data_ptr(), t.data_ptr() + t.nbytes, False) for t in read if t.nbytes]
    extents = sorted(extent for extent in extents if extent[0])  # 0: no memory, on meta
    end, end_is_written = 0, False
    for first, last, is_written in extents:
        if first < end and (is_written or end_is_written):
            problem = "a tensor that is received shares memory with another of the call; "
            refuse(operation, axis, origin, f"{problem}give it memory of its own")
        if last > end:
            end, end_is_written = last, is_written
