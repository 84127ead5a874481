"""Small programs of tensor operators, for random compositions: the same on dense tensors and parts.

A program is a list of steps `(operator, a, b)`. What a step does follows from the global shapes and
the two numbers alone, so a program takes the same way on dense tensors and on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, field
from torch import Tensor

from hp_dtensor.dtensor import DTensor
from hp_dtensor.placements import Replicate
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.simulated_check import drawn_choices

Step = tuple[str, int, int]


def _dim(x: Tensor, a: int) -> int:
    return a % x.ndim


def _reshaped(x: Tensor, a: int, b: int) -> Tensor:
    """Two dims merged, or one split."""
    if x.ndim > 1 and a % 2:
        first = b % (x.ndim - 1)
        return x.flatten(first, first + 1)
    dim = _dim(x, b)
    size = x.shape[dim]
    factor = next((f for f in (2, 3) if size and size % f == 0), 1)
    return x.unflatten(dim, (factor, size // factor) if a % 4 < 2 else (size // factor, factor))


def _sliced(x: Tensor, a: int, b: int) -> Tensor:
    index: list[Any] = [slice(None)] * x.ndim
    index[_dim(x, a)] = (slice(1, None), slice(None, -1), slice(None, None, 2), slice(1, 3))[b % 4]
    return x[tuple(index)]


def _one_row(x: Tensor, a: int, b: int) -> Tensor:
    return x.select(_dim(x, a), b % x.shape[_dim(x, a)])


def _rows(x: Tensor, a: int, b: int) -> Tensor:
    size = x.shape[_dim(x, a)]
    picked = torch.tensor([b % size, 0, (b + 1) % size])
    if isinstance(x, DTensor):
        everywhere = [Replicate()] * len(x.placements)
        picked = DTensor.from_local(picked, x.device_mesh, everywhere, shape=picked.shape)
    return x.index_select(_dim(x, a), picked)


def _written(x: Tensor, a: int, b: int) -> Tensor:
    """A slice of a copy is written through the index."""
    target = x * 1.5
    index: list[Any] = [slice(None)] * x.ndim
    index[_dim(x, a)] = (slice(1, None), 0, slice(None, -1), slice(1, 2))[b % 4]
    target[tuple(index)] = 0.25
    return target


def _written_by_tensor(x: Tensor, a: int, b: int) -> Tensor:
    target = x * 1.5
    dim = _dim(x, a)
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(1, None)
    target[tuple(index)] = x.narrow(dim, 0, x.shape[dim] - 1) * 2
    return target


def _written_through_a_view(x: Tensor, a: int, b: int) -> Tensor:
    target = x * 1.5
    view = (
        target.narrow(_dim(x, a), 0, max(x.shape[_dim(x, a)] - 1, 1)),
        target.transpose(0, -1),
        target.unsqueeze(0),
        target.narrow(-1, 0, 1),
        target.flatten(),
    )[b % 5]
    view.mul_(3.0)
    return target


def _in_place(x: Tensor, a: int, b: int) -> Tensor:
    target = x * 1
    (target.add_, target.mul_, target.sub_, target.div_)[b % 4](2.0)
    return target.clamp_(-3.0) if a % 2 else target


def _gathered(x: Tensor, a: int, b: int) -> Tensor:
    dim = _dim(x, a)
    return x.gather(dim, x.detach().argmax(dim, keepdim=True))


def _product_with_itself(x: Tensor, a: int, b: int) -> Tensor:
    return (x @ x.transpose(-1, -2)) / (1 + x.shape[-1]) if a % 2 else F.linear(x, x.flatten(0, -2))


def _heads(x: Tensor, a: int, b: int) -> Tensor:
    q = x.reshape(1, 1, *x.shape) if x.ndim == 2 else x.unsqueeze(0)
    return F.scaled_dot_product_attention(q, q, q, is_causal=b % 2 == 1).squeeze(0)


ONE: Mapping[str, tuple[int, Callable[[Any, int, int], Any]]] = {
    # least number of dims, function
    "tanh": (0, lambda x, a, b: x.tanh()),
    "gelu": (0, lambda x, a, b: F.gelu(x)),
    "scale": (0, lambda x, a, b: x * 0.5),
    "shift": (0, lambda x, a, b: x + 1.5),
    "minus": (0, lambda x, a, b: 1.0 - x),
    "single": (0, lambda x, a, b: x.float().double()),
    "softmax": (1, lambda x, a, b: x.softmax(_dim(x, a))),
    "log_softmax": (1, lambda x, a, b: x.log_softmax(_dim(x, a))),
    "logsumexp": (1, lambda x, a, b: x.logsumexp(_dim(x, a), keepdim=b % 2 == 1)),
    "sum": (1, lambda x, a, b: x.sum(_dim(x, a), keepdim=b % 2 == 1)),
    "mean": (1, lambda x, a, b: x.mean(_dim(x, a), keepdim=b % 2 == 1)),
    "amax": (1, lambda x, a, b: x.amax(_dim(x, a), keepdim=b % 2 == 1)),
    "max": (1, lambda x, a, b: x.max(_dim(x, a), keepdim=b % 2 == 1).values),
    "var": (1, lambda x, a, b: x.var(_dim(x, a), keepdim=b % 2 == 1, correction=0)),
    "norm": (1, lambda x, a, b: (x + 3).norm(dim=_dim(x, a), keepdim=b % 2 == 1)),
    "cumsum": (1, lambda x, a, b: x.cumsum(_dim(x, a))),
    "topk": (1, lambda x, a, b: x.topk(min(2, x.shape[_dim(x, a)]), _dim(x, a)).values),
    "gather": (1, _gathered),
    "unsqueeze": (0, lambda x, a, b: x.unsqueeze(a % (x.ndim + 1))),
    "swap": (2, lambda x, a, b: x.transpose(_dim(x, a), _dim(x, b))),
    "reshape": (1, _reshaped),
    "slice": (1, _sliced),
    "select": (2, _one_row),
    "rows": (1, _rows),
    "chunk": (1, lambda x, a, b: x.chunk(2, _dim(x, a))[-1]),
    "cat": (1, lambda x, a, b: torch.cat([x, x * 2], _dim(x, a))),
    "stack": (0, lambda x, a, b: torch.stack([x, x * 2], a % (x.ndim + 1))),
    "pad": (1, lambda x, a, b: F.pad(x, (a % 2, b % 3))),
    "roll": (1, lambda x, a, b: x.roll(1 + b % 2, _dim(x, a))),
    "flip": (1, lambda x, a, b: x.flip(_dim(x, a))),
    "repeat": (1, lambda x, a, b: x.repeat_interleave(2, _dim(x, a))),
    "tril": (2, lambda x, a, b: x.tril(b % 3 - 1)),
    "clip": (0, lambda x, a, b: x.masked_fill(x > 0.5, 0.5)),
    "layer_norm": (1, lambda x, a, b: F.layer_norm(x, (x.shape[-1],))),
    "rms_norm": (1, lambda x, a, b: F.rms_norm(x, (x.shape[-1],), eps=1e-3)),
    "matmul": (2, _product_with_itself),
    "einsum": (2, lambda x, a, b: torch.einsum("...ij,...kj->...ik", x, x.tanh())),
    "attention": (2, _heads),
    "setitem": (1, _written),
    "setitem_tensor": (1, _written_by_tensor),
    "view_write": (1, _written_through_a_view),
    "in_place": (0, _in_place),
}


def _copied(x: Any, y: Any) -> Any:
    target = x * 1
    target.copy_(y.expand_as(x))
    return target + x


def _copied_in_part(x: Any, y: Any) -> Any:
    target = x * 1
    if x.ndim and x.shape == y.shape:
        target[1:] = y[: max(x.shape[0] - 1, 0)]
    return target


TWO: Mapping[str, Callable[[Any, Any], Any]] = {
    "copy": _copied,
    "copy_part": _copied_in_part,
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
}
RELAYOUT = "relayout"
OPERATORS = (*ONE, *TWO, RELAYOUT)


def whole(x: Any) -> Any:
    return x.redistribute(placements=[Replicate()] * len(x.placements))


@define
class Program:
    """Runs steps on what the first tensor becomes; earlier values of its shape are operands.

    Attributes:
        steps: what is done in order; a step that the shape does not allow is left out.
        ran: names of the operators that ran on parts as they were, without being refused.
    """

    steps: Sequence[Step]
    ran: set[str] = field(factory=set)

    def __call__(self, *tensors: Any) -> Any:
        pool = list(tensors)
        x = pool[0]
        for step in self.steps:
            x = self._step(step, x, pool)
            pool.append(x)
        return x

    def _step(self, step: Step, x: Any, pool: Sequence[Any]) -> Any:
        name, a, b = step
        if name == RELAYOUT:
            return _relaid(x, a * 7 + b)
        if name in TWO:
            fitting = [y for y in pool if _fits(tuple(y.shape), tuple(x.shape))]
            return self._run(name, TWO[name], x, fitting[a % len(fitting)])
        least, function = ONE[name]
        if x.ndim < least or x.ndim > 3 or 0 in x.shape or x.numel() > 200:
            return x
        return self._run(name, lambda x: function(x, a, b), x)

    def _run(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """A refusal comes before any communication and on all ranks: what it refuses is gathered,
        as its remedy says."""
        if not isinstance(operands[0], DTensor):
            return function(*operands)
        try:
            found = function(*operands)
            self.ran.add(name)
        except OperatorError as error:
            if "a fault of the operator's rule" in str(error):
                raise AssertionError(f"{name}: {error}") from error
            found = function(*(whole(operand) for operand in operands))
        assert isinstance(found, DTensor), f"{name} gives a plain {type(found).__name__}"
        return found


def _fits(shape: tuple[int, ...], beside: tuple[int, ...]) -> bool:
    """Broadcasts to `beside` without making it larger."""
    if len(shape) > len(beside):
        return False
    return all(size in (1, other) for size, other in zip(reversed(shape), reversed(beside)))


def _relaid(x: Any, seed: int) -> Any:
    if not isinstance(x, DTensor):
        return x
    draw = random.Random(seed)
    chosen = [draw.choice(drawn_choices(x.shape, size, True, draw)) for size in x.device_mesh.shape]
    values, gradients = zip(*chosen)
    try:
        return x.redistribute(placements=values, grad_placements=gradients)
    except ValueError:  # two ragged cuts, or a ragged cut of what another axis has cut
        return x


def of_numbers(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
