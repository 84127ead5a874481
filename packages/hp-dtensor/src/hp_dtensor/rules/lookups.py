"""Rules of operators that read or write at positions given by a tensor.

Reading along a cut dim, every rank looks up the positions it holds and has zeros for the others:
a pending sum, as in an embedding whose vocabulary is cut. Writing along one, every rank writes at
its own positions and nothing else, and the result stays cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import sharded_dims
from hp_dtensor.rules.dims import letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import own_indices
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule, is_inplace

# -- positions -------------------------------------------------------------------------------------


class OwnDim:
    """One dim of a tensor of which this rank has some positions."""

    def __init__(self, layout: Layout, dim: int, *, wraps: bool = False) -> None:
        self.size = layout.shape[dim]
        self.wraps = wraps  # negative positions count from the end
        self.is_cut = any(dim in sharded_dims(placement) for placement in layout.placements)
        self.held = own_indices(layout, dim) if self.is_cut else torch.empty(0)
        count = len(self.held)
        self.count = count if self.is_cut else self.size
        self.start = int(self.held[0]) if count else 0
        self.contiguous = not count or int(self.held[-1]) - self.start + 1 == count

    def local(self, index: Tensor, operator: str) -> tuple[Tensor, Tensor | None]:
        """Local positions (0 for those of other ranks), and which are this rank's own.

        Raises:
            IndexError: a position is outside the global dim; torch's kernel would not see it.
        """
        if not self.is_cut:
            return index, None
        self.check(index, operator)
        if self.wraps:
            index = torch.where(index < 0, index + self.size, index)
        if self.count == 0:
            return torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
        if self.contiguous:
            position = index - self.start
            mine = (position >= 0) & (position < self.count)
            return position * mine, mine
        own = self.held.to(index.device)
        position = torch.searchsorted(own, index.contiguous()).clamp(max=self.count - 1)
        mine = own[position] == index
        return position * mine, mine

    def check(self, index: Tensor, operator: str) -> None:
        if index.is_meta or not index.numel():
            return
        inside = ((index >= (-self.size if self.wraps else 0)) & (index < self.size)).all()
        if index.device.type != "cpu":
            torch._assert_async(inside)  # no wait for the device, as in torch's own kernels
        elif not inside:
            raise IndexError(f"{operator}: an index is out of range for a dim of size {self.size}")

    def slotted(self, index: Tensor, operator: str) -> Tensor:
        """Local positions; those of other ranks are one past the end."""
        position, mine = self.local(index, operator)
        return position if mine is None else torch.where(mine, position, self.count)


def _refuse_partial_index(call: Call, *names: str) -> None:
    for name in names:
        index = call.get(name)
        if isinstance(index, Operand) and index.layout.partial_axes():
            raise call.error(
                f"the {name} is a pending sum, and a look-up is not linear in it",
                f"redistribute the {name} to Replicate() first",
            )


def _cleared(found: Tensor, mine: Tensor | None) -> Tensor:
    """Zeros where the position is another rank's."""
    if mine is None:
        return found
    while mine.ndim < found.ndim:
        mine = mine.unsqueeze(-1)
    return found.masked_fill(~mine, 0)


def _empty_lookup(source: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros that keep the source in the graph, whose backward other ranks wait for."""
    return source.new_zeros(tuple(shape)) + source.sum(dtype=source.dtype)


def _bool_is_not_summed(call: Call, output: Layout) -> None:
    if output.partial_axes() and call.input.dtype == torch.bool:
        raise call.error(
            "truth values along a cut dim cannot be summed over ranks", "look up x.to(torch.uint8)"
        )


# -- reading ---------------------------------------------------------------------------------------


def _gather(call: Call) -> Recipe:
    """Along the other dims, index and input are of one size and cut alike."""
    source, index = call.input, call.get("index", call.get("indices"))
    _refuse_partial_index(call, "index", "indices")
    dim = one_dim(call)
    names = letters(len(source.shape))
    if any(i != dim and a > b for i, (a, b) in enumerate(zip(source.shape, index.shape))):
        return Recipe(None, None, composite=partial(_gather_some, dim=dim))
    picked = " ".join("k" if i == dim else name for i, name in enumerate(names))
    derivation = derive(
        call.operator,
        parse(f"{' '.join(names)}, {picked} -> {picked}"),
        [source.layout, index.layout],
    )
    own = OwnDim(derivation.operands[0], dim)
    _bool_is_not_summed(call, derivation.outputs[0])
    if not own.is_cut:
        return Recipe(derivation.operands, derivation.outputs[0])

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local, positions = args[0], _tensor_after(args, kwargs)
        position, mine = own.local(positions, call.operator)
        if own.count == 0:
            return _empty_lookup(local, positions.shape)
        return _cleared(local.gather(dim, position), mine)

    return Recipe(derivation.operands, derivation.outputs[0], run)


def _gather_some(input: Any, *args: Any, dim: int, **kwargs: Any) -> Any:
    """An index of fewer rows reads the first rows of the other dims."""
    index = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    for i, size in enumerate(index.shape):
        if i != dim:
            input = input.narrow(i, 0, size)
    return input.gather(dim, index)


def _tensor_after(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """The index: the second tensor among the arguments."""
    given = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
    return given[0]


def _take_along_dim(call: Call) -> Recipe | None:
    if call.get("dim") is None:
        return None
    return _gather(call)


def _index_select(call: Call) -> Recipe:
    source, index = call.input, call.get("index")
    _refuse_partial_index(call, "index")
    return looked_up(call, {one_dim(call): index}, source.layout)


def looked_up(
    call: Call, at: Mapping[int, Operand], source: Layout, *, front: bool = False
) -> Recipe:
    """`source` with the dims in `at` replaced by those of the indices, which broadcast.

    The new dims are where the first replaced dim was, or in front.
    """
    ndim = max(len(index.shape) for index in at.values())
    new = [f"i{k}" for k in range(ndim)]
    names = letters(len(source.shape))
    first = 0 if front else min(at)
    kept = [name for i, name in enumerate(names) if i not in at]
    before = 0 if front else sum(1 for i in range(first) if i not in at)
    out = [*kept[:before], *new, *kept[before:]]
    operands = [" ".join(names)]
    operands += [" ".join(new[ndim - len(index.shape) :]) for index in at.values()]
    pattern = parse(f"{', '.join(operands)} -> {' '.join(out)}")
    derivation = derive(call.operator, pattern, [source, *(index.layout for index in at.values())])
    _bool_is_not_summed(call, derivation.outputs[0])
    wraps = call.operator == "__getitem__"
    owns = {dim: OwnDim(derivation.operands[0], dim, wraps=wraps) for dim in at}

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local, *indices = _tensors(args, kwargs)
        mine: Tensor | None = None
        positions = []
        for index, own in zip(indices, owns.values()):
            position, held = own.local(index, call.operator)
            positions.append(position)
            mine = held if mine is None else (mine if held is None else mine & held)
        steps: list[Any] = [slice(None)] * local.ndim
        for dim, position in zip(owns, positions):
            steps[dim] = position
        if any(own.count == 0 and own.is_cut for own in owns.values()):
            broadcast = torch.broadcast_shapes(*(index.shape for index in indices))
            rest = [n for i, n in enumerate(local.shape) if i not in owns]
            return _empty_lookup(local, (*rest[:before], *broadcast, *rest[before:]))
        found = local[tuple(steps)]
        if mine is None:
            return found
        aligned = mine.view(*mine.shape, *[1] * (found.ndim - before - mine.ndim))
        return found.masked_fill(~aligned, 0)

    cut = any(own.is_cut for own in owns.values())
    return Recipe(derivation.operands, derivation.outputs[0], run if cut else None)


def _tensors(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


# -- writing ---------------------------------------------------------------------------------------


def _add_at(call: Call, *, source_name: str, linear: bool) -> Recipe:
    """`index_add`, `index_copy`: rows of a source go to the positions in a 1-D index."""
    dim = one_dim(call)
    _refuse_partial_index(call, "index")
    names = letters(len(call.input.shape))
    rows = [f"k{dim}" if i == dim else name for i, name in enumerate(names)]
    source = call.get(source_name)
    index, target = call.get("index").layout, call.input.layout
    if isinstance(source, Operand):
        moved = " ".join(rows) if source.shape else ""
        # The source is the first factor: where one term is a summand, it is what becomes one.
        text = f"{' '.join(names)} + {moved}, k{dim} -> {' '.join(names)}"
        layouts = [target, source.layout, index]
    else:
        text = f"{' '.join(names)} + k{dim} -> {' '.join(names)}"
        layouts = [target, index]
    derivation = derive(call.operator, parse(text, linear=linear), layouts)
    operands = _as_given(call, derivation.operands)
    return _written_at(call, operands, derivation.outputs[0], {dim: 0})


def _as_given(call: Call, operands: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Target, source, index in the order target, index, source of the call."""
    return operands if len(operands) < 3 else (operands[0], operands[2], operands[1])


def _scatter(call: Call, *, linear: bool) -> Recipe | None:
    """The index has the input's sizes along the other dims, and is cut like the input there."""
    dim = one_dim(call)
    _refuse_partial_index(call, "index")
    names = letters(len(call.input.shape))
    index = call.get("index")
    for i, (a, b) in enumerate(zip(call.input.shape, index.shape)):
        if i != dim and a != b:
            if all(each.is_replicated and each.grad_placements == each.placements
                   for each in call.layouts):  # fmt: skip
                return None
            raise call.error(
                f"dim {i} of the index has size {b}, the input {a}", "narrow the input first"
            )
    rows = " ".join("k" if i == dim else name for i, name in enumerate(names))
    source = call.get("src", call.get("value"))
    parts = [rows, rows] if isinstance(source, Operand) and source.shape else [rows]
    if isinstance(source, Operand) and not source.shape:
        parts.append("")
    if isinstance(source, Operand) and source.shape and source.shape != index.shape:
        raise call.error(
            f"the source has shape {source.shape}, the index {index.shape}", "narrow the source"
        )
    linear = linear and call.get("reduce") is None
    layouts = call.layouts
    if len(parts) == 2:  # the source first, as above
        parts.reverse()
        layouts = [layouts[0], layouts[2], layouts[1]]
    derivation = derive(
        call.operator,
        parse(f"{' '.join(names)} + {', '.join(parts)} -> {' '.join(names)}", linear=linear),
        layouts,
    )
    operands = _as_given(call, derivation.operands)
    return _written_at(call, operands, derivation.outputs[0], {dim: 0})


def _written_at(
    call: Call, operands: tuple[Layout, ...], output: Layout, indices: Mapping[int, int]
) -> Recipe:
    """The function on local tensors; along cut dims, with one slot more for foreign positions."""
    owns = {dim: OwnDim(operands[0], dim) for dim in indices}
    if not any(own.is_cut for own in owns.values()):
        return Recipe(operands, output)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        seen = 0

        def local(value: Any) -> Any:
            nonlocal seen
            if not isinstance(value, Tensor):
                return value
            seen += 1
            if seen == 1:
                return with_slots(value, owns)
            number = seen - 2
            at = next((dim for dim, place in indices.items() if place == number), None)
            return value if at is None else owns[at].slotted(value, call.operator)

        given = [local(value) for value in args]
        named = {name: local(value) for name, value in kwargs.items()}
        wrote = out_of_place(func)(*given, **named)
        return landed(args[0], wrote, owns, is_inplace(call.operator))

    return Recipe(operands, output, run)


def with_slots(local: Tensor, owns: Mapping[int, OwnDim]) -> Tensor:
    """One row more along every cut dim; what is written there is dropped."""
    for dim, own in owns.items():
        if own.is_cut:
            slot = local.new_zeros([1 if i == dim else n for i, n in enumerate(local.shape)])
            local = torch.cat([local, slot], dim)
    return local


def landed(target: Tensor, wrote: Tensor, owns: Mapping[int, OwnDim], inplace: bool) -> Tensor:
    for dim, own in owns.items():
        if own.is_cut:
            wrote = wrote.narrow(dim, 0, own.count)
    return target.copy_(wrote) if inplace else wrote


def out_of_place(func: Callable[..., Any]) -> Callable[..., Any]:
    name = func.__name__
    found: Callable[..., Any] = getattr(Tensor, name.rstrip("_") if is_inplace(name) else name)
    return found


def rules() -> Mapping[str, Rule]:
    found = {
        "gather": Rule("gather", _gather, ("input", "dim", "index")),
        "take_along_dim": Rule("take_along_dim", _take_along_dim, ("input", "indices", "dim")),
        "index_select": Rule("index_select", _index_select, ("input", "dim", "index")),
        "index_add": Rule(
            "index_add",
            partial(_add_at, source_name="source", linear=True),
            ("input", "dim", "index", "source"),
        ),
        "index_copy": Rule(
            "index_copy",
            partial(_add_at, source_name="source", linear=False),
            ("input", "dim", "index", "source"),
        ),
        "index_fill": Rule(
            "index_fill",
            partial(_add_at, source_name="value", linear=False),
            ("input", "dim", "index", "value"),
        ),
        "scatter_add": Rule(
            "scatter_add", partial(_scatter, linear=True), ("input", "dim", "index", "src")
        ),
        "scatter": Rule(
            "scatter", partial(_scatter, linear=False), ("input", "dim", "index", "src")
        ),
        "scatter_reduce": Rule(
            "scatter_reduce",
            partial(_scatter, linear=False),
            ("input", "dim", "index", "src", "reduce"),
        ),
    }
    return found
