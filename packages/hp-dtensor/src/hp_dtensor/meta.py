"""A plan checked without values: meta tensors on a mesh that need not exist (decision D8).

The whole model runs forward and backward in validate mode, so every operator, boundary, neighbour
and gradient placement is checked as with real ranks; what is not checked is values. Collectives
give shapes only, and an opaque region is not run: its outputs are shaped as it declares.

What has no layout until a boundary gives it one (positions, masks, tables) is small and keeps its
values, because models branch on them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import HPError
from hp_dtensor.implicit import implicit
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.operands import is_known_whole
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.rules.recipe import is_inplace
from hp_dtensor.rules.refusal import OperatorError
from hp_dtensor.whole_values import current_values, mark_whole

__all__ = ["MetaReport", "validate_on_meta"]


@frozen
class MetaReport:
    """What one run without values went through.

    Attributes:
        digest: the plan's.
        mesh: axis names and sizes.
        parameters, boundaries: how many of each the plan has.
        gradients: trainable parameters that the backward pass reached; 0 without one.
        unreached: names of those that it did not reach: unused, or inside an opaque region whose
            gradients the region owes.
        seconds: of the run, plan application included.
    """

    digest: str
    mesh: AbstractMesh
    parameters: int
    boundaries: int
    gradients: int
    unreached: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"plan {self.digest} holds on {self.mesh} ({self.mesh.world_size} ranks), without "
            f"values: {self.parameters} parameters, {self.boundaries} boundaries, "
            f"{self.gradients} gradients, {self.seconds:.1f} s"
        ]
        if self.unreached:
            shown = ", ".join(self.unreached[:5]) + (", ..." if len(self.unreached) > 5 else "")
            lines.append(f"{len(self.unreached)} parameters got no gradient: {shown}")
        return "\n".join(lines)


def validate_on_meta(
    model: nn.Module,
    plan: ShardingPlan,
    inputs: Mapping[str, Any],
    *,
    mesh: AbstractMesh | Mapping[str, int] | None = None,
    loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
    backward: bool = True,
) -> MetaReport:
    """Runs a copy of the model in validate mode on the meta device, for a mesh of any size.

    Needs one process, no process group and no memory for values.

    Args:
        model: the module the plan is for, on any device; it is left as it is.
        plan: what is checked.
        inputs: arguments of `forward` by name. Tensors of whose values nothing is used, such as
            ids of zeros or tensors on the meta device, will do; a model that looks at a mask for
            padding is given one with values. Sizes that the plan cuts must divide.
        mesh: axis names and sizes; the plan's by default.
        loss_fn: scalar of the model and the inputs; by default the `loss` of the output where
            there is one, else the sum of its floating-point tensors.
        backward: also run the backward pass, which checks gradients' placements.

    Returns:
        What was gone through. Whatever is wrong is raised.

    Raises:
        PlanError: plan, module and mesh do not fit; every finding at once.
        ContractError, OperatorError: a boundary or an operator, named.
        TypeError: `inputs` is not a mapping, or the model's output has no tensor to differentiate.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"validate_on_meta: inputs is the mapping of the forward arguments by name, found "
            f"{type(inputs).__name__}"
        )
    start = time.perf_counter()
    where = plan.mesh if mesh is None else AbstractMesh.of(mesh)
    copied = _without_values(model)
    parallelize(copied, plan, where, mode="validate")
    given = {name: _detached(value) for name, value in inputs.items()}
    plain = plan.model_mesh.world_size == 1
    context = implicit(reductions=True, adjoints=True, plain=plain)
    told = _told_of_values()
    with torch.set_grad_enabled(backward), context, _PlainValues(), told:
        # Between the model and its scalar nothing is the plan's: what has to be summed may be.
        loss = _default_loss(copied(**given)) if loss_fn is None else loss_fn(copied, given)
        if backward:
            loss.backward()
    trained = [(n, p) for n, p in copied.named_parameters() if p.requires_grad]
    unreached = tuple(name for name, p in trained if p.grad is None) if backward else ()
    return MetaReport(
        digest=plan.digest,
        mesh=where,
        parameters=len(plan.parameters),
        boundaries=len(plan.boundaries),
        gradients=len(trained) - len(unreached) if backward else 0,
        unreached=unreached,
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _told_of_values() -> Iterator[None]:
    """Code that asks for values, or a kernel that has no form without, says what to do about it."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, HPError) or "meta" in str(error):
            error.add_note(
                "on the meta device there are no values, and kernels may take fewer dtypes "
                "(grouped matrix products: bfloat16): declare code that chooses by value an opaque "
                "region whose outputs say which input they are like, or validate with values"
            )
        raise


def _without_values(model: nn.Module) -> nn.Module:
    """A copy with meta parameters; one that has several names stays one. Buffers have values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer
    return copy.deepcopy(model, memo)


class _PlainValues(TorchFunctionMode):
    """Plain tensors asked for on the device of the activations, which is meta, have values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            if is_inplace(func.__name__) and type(args[0]) is Tensor:
                _take_values(func.__name__, args[0])
            if func.__name__ in ("__getitem__", "__setitem__"):
                args = (args[0], _positions(args[1]), *args[2:])
            # A plain tensor may stand beside DTensors where it is known to be whole.
            beside = _unvalued if func.__name__ in _ON_ONE_DEVICE else _beside
            args, kwargs = pytree.tree_map_only(Tensor, beside, (args, kwargs))
        else:
            args = tuple([_CPU if _is_meta(value) else value for value in args])
            kwargs = {name: _CPU if _is_meta(v) else v for name, v in kwargs.items()}
            if any(type(value) is Tensor and value.is_meta for value in args):
                args, kwargs = pytree.tree_map_only(Tensor, _beside, (args, kwargs))
        return func(*args, **kwargs)


def _positions(index: Any) -> Any:
    """The index, with plain masks, which have values, as the positions that they choose."""
    found: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if type(item) is Tensor and item.dtype is torch.bool and item.ndim and not item.is_meta:
            chosen = item.nonzero(as_tuple=True)
            if is_known_whole(item):
                for positions in chosen:
                    mark_whole(positions)
            found.extend(chosen)
        else:
            found.append(item)
    return tuple(found) if isinstance(index, tuple) or len(found) > 1 else found[0]


def _take_values(name: str, target: Tensor) -> None:
    """A plain tensor into which DTensors are written has no values from then on.

    It stays the object that it is, so that whatever is computed of it depends on what was written.

    Raises:
        OperatorError: that cannot be, for others share its memory.
    """
    values = current_values()
    if values is None or not values.holds(target) or target.is_meta:
        return
    values.forget(target)
    try:
        if target._is_view():
            raise RuntimeError("it is a view of another tensor")
        torch.utils.swap_tensors(target, target.to("meta"))
    except RuntimeError as error:
        raise OperatorError(
            f"{name}: values of DTensors are written into a plain tensor of shape "
            f"{tuple(target.shape)} that cannot lose its own, as it must on the meta device "
            f"({error}). Remedy: write into the whole tensor before taking views of it, build the "
            "result from its parts (torch.cat, torch.where), or validate with values."
        ) from error
    values.mark(target)


# Functions that take no number in host memory beside tensors of another device.
_ON_ONE_DEVICE = frozenset({"masked_fill", "masked_fill_"})


def _beside(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 0 else _unvalued(tensor)


def _unvalued(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return tensor
    unvalued = tensor.to("meta")
    if is_known_whole(tensor):
        mark_whole(unvalued)
    return unvalued


_CPU = torch.device("cpu")


def _is_meta(value: Any) -> bool:
    if type(value) is torch.device:
        return value.type == "meta"
    return type(value) is str and value == "meta"


def _detached(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), value)


def _default_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    parts = [tensor.sum() for tensor in _tensors(output) if tensor.is_floating_point()]
    if not parts:
        raise TypeError(
            f"validate_on_meta: the model gives a {type(output).__name__} without a tensor of "
            "floating point; pass loss_fn, or backward=False"
        )
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor | DTensor):
            yield leaf
