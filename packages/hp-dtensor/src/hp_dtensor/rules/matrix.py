"""Rules of products: linear layers, matrix products, einsum, products of groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import of_nothing, own_shape
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule, words


def pattern_rule(name: str, text: str, parameters: tuple[str, ...], *, linear: bool = True) -> Rule:
    """A rule that is one pattern over the operands in order."""

    def rule(call: Call) -> Recipe:
        derivation = derive(call.operator, parse(text, linear=linear), call.layouts)
        return Recipe(derivation.operands, derivation.outputs[0])

    return Rule(name, rule, parameters)


def _linear(call: Call) -> Recipe:
    text = "... i, o i + o -> ... o" if len(call.operands) == 3 else "... i, o i -> ... o"
    derivation = derive(call.operator, parse(text), call.layouts, names=("input", "weight", "bias"))
    return Recipe(derivation.operands, derivation.outputs[0])


def _matmul(call: Call) -> Recipe:
    """As `torch.matmul`: vectors lose their dim, leading dims broadcast."""
    left, right = (len(operand.shape) for operand in call.operands[:2])
    if not left or not right:
        raise call.error("both arguments must have at least one dim", "multiply by the number")
    first = "k" if left == 1 else "... m k"
    second = "k" if right == 1 else "... k n"
    output = ("... " if max(left, right) > 2 else "") + ("m " if left > 1 else "")
    if left <= 2 and right <= 2:
        first, second = first.replace("... ", ""), second.replace("... ", "")
    text = f"{first}, {second} -> {output}{'n' if right > 1 else ''}"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _addmm(call: Call) -> Recipe:
    """`beta * input + alpha * a @ b`; the input broadcasts."""
    bias = {0: "", 1: "n", 2: "m n"}[len(call.operands[0].shape)]
    text = f"{bias} + m k, k n -> m n"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _einsum(call: Call) -> Recipe:
    """The equation is the pattern."""
    equation = str(call.get("equation", "")).replace(" ", "")
    left, _, right = equation.partition("->")
    if "->" not in equation:  # letters that occur once, in order, as torch does
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    dims = [_spaced(each) for each in left.split(",")]
    if any(len(set(each)) != len(each) for each in left.replace("...", "").split(",")):
        raise call.error("a letter twice in one operand has no rule", "take torch.diagonal first")
    text = f"{', '.join(dims)} -> {_spaced(right)}"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _spaced(dims: str) -> str:
    return " ".join(dims.replace("...", ".")).replace(".", "...")


def _tensordot(call: Call) -> Recipe:
    """The last dims of one with the first of the other, or the pairs that are named."""
    dims = call.get("dims", 2)
    left, right = (len(operand.shape) for operand in call.operands[:2])
    if isinstance(dims, Operand):
        raise call.error("a tensor of dims has no rule", "pass integers or two lists")
    if isinstance(dims, int):
        pairs = list(zip(range(left - dims, left), range(dims)))
    else:
        first, second = ([d] if isinstance(d, int) else d for d in dims)
        pairs = [(a % left, b % right) for a, b in zip(first, second)]
    one = [f"a{i}" for i in range(left)]
    other = [f"b{i}" for i in range(right)]
    for a, b in pairs:
        other[b] = one[a]
    gone = {one[a] for a, _ in pairs}
    out = [name for name in (*one, *other) if name not in gone]
    derivation = derive(
        call.operator, parse(f"{' '.join(one)}, {' '.join(other)} -> {' '.join(out)}"), call.layouts
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _inner(call: Call) -> Recipe:
    left, right = (len(operand.shape) for operand in call.operands[:2])
    if not left or not right:
        derivation = derive(call.operator, parse("..., ... -> ..."), call.layouts)
        return Recipe(derivation.operands, derivation.outputs[0])
    one = [f"a{i}" for i in range(left - 1)]
    other = [f"b{i}" for i in range(right - 1)]
    text = f"{' '.join([*one, 'k'])}, {' '.join([*other, 'k'])} -> {' '.join([*one, *other])}"
    derivation = derive(call.operator, parse(text), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _vecdot(call: Call) -> Recipe:
    """A product and its sum over one dim."""
    return Recipe(None, None, composite=lambda x, y, dim=-1, out=None: (x.conj() * y).sum(dim))


def _chain(call: Call) -> Recipe:
    def product(*matrices: Any, out: Any = None) -> Any:
        given = matrices[0] if isinstance(matrices[0], tuple | list) else matrices
        found = given[0]
        for matrix in given[1:]:
            found = torch.matmul(found, matrix)
        return found

    return Recipe(None, None, composite=product)


_BILINEAR = ("input1", "input2", "weight", "bias")


def _bilinear(call: Call) -> Recipe:
    text = "... i, o i j, ... j" + (" + o" if len(call.operands) == 4 else "") + " -> ... o"
    order = [0, 2, 1, *range(3, len(call.operands))]
    derivation = derive(call.operator, parse(text), [call.layouts[i] for i in order])
    operands = [derivation.operands[order.index(i)] for i in range(len(order))]
    output = derivation.outputs[0]

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        given = dict(zip(_BILINEAR, args)) | kwargs
        factors = [given[name] for name in _BILINEAR[:3]]
        if all(factor.numel() for factor in factors):
            found: Tensor = func(**given)
            return found
        bias, nothing = given.get("bias"), of_nothing(own_shape(output), *factors)
        return nothing if bias is None else nothing + bias

    return Recipe(tuple(operands), output, run)


def _grouped(call: Call) -> Recipe:
    """Groups of rows, each with its own matrix. `offs` are ends of the groups in all rows, so
    rows, and experts where rows are shared out among them, are whole."""
    left, right = (len(call.operands[i].shape) for i in range(2))
    offsets = call.get("offs")
    patterns = {
        (2, 3): "[t] k, [g] k n{offs}{bias} -> t n",
        (3, 2): "[g] m k, k [t]{offs}{bias} -> m t",
        (2, 2): "m [t], [t] n{offs}{bias} -> [g] m n",
        (3, 3): "g m k, g k n{offs}{bias} -> g m n",
    }
    text = patterns[left, right]
    text = text.replace("{offs}", ", [g]" if isinstance(offsets, Operand) else "")
    bias = isinstance(call.get("bias"), Operand)
    if bias:
        raise call.error("a bias has no rule", "add it to the rows afterwards")
    text = text.replace("{bias}", "")
    if isinstance(offsets, Operand) and offsets.layout.partial_axes():
        raise call.error("the offsets are a pending sum", "redistribute them to Replicate()")
    sizes = {"g": offsets.shape[0]} if isinstance(offsets, Operand) else {}
    derivation = derive(call.operator, parse(text), call.layouts, sizes=sizes)
    for operand in call.operands[:2]:
        _check_rows_of_memory(call, operand)
    return Recipe(derivation.operands, derivation.outputs[0])


def _check_rows_of_memory(call: Call, operand: Operand) -> None:
    """Kernels of grouped products want rows of memory of whole 16 bytes, on every rank alike."""
    layout, unit = operand.layout, 16 // operand.dtype.itemsize
    dims = range(len(layout.shape) - 2, len(layout.shape))
    for coordinate in layout.abstract_mesh.coordinates():
        local = layout.local_shape(coordinate)
        for dim in dims:
            if local[dim] != layout.shape[dim] and (local[dim] % unit or not local[dim]):
                raise call.error(
                    f"the kernel takes rows of whole 16 bytes ({unit} of {operand.dtype}), and "
                    f"the rank at {coordinate} has {local[dim]} along dim {dim}",
                    f"cut dim {dim} into multiples of {unit}, or redistribute it to Replicate()",
                )


def _solve(call: Call) -> Recipe | None:
    """Columns of the right-hand side are solved for one by one, so they may be cut."""
    left, right = call.operands[:2]
    if len(right.shape) != len(left.shape) or not call.get("left", True):
        return None
    text = "... [m] [k], ... [k] n -> ... [m] n"
    derivation = derive(call.operator, parse(text, linear=False), call.layouts)
    return Recipe(derivation.operands, derivation.outputs[0])


def _whole_matrices(name: str, output: str = "... m n", count: int = 1) -> Rule:
    """Functions of each matrix: batches may be cut."""

    def rule(call: Call) -> Recipe:
        text = f"... [m] [n] -> {' , '.join([output] * count)}"
        derivation = derive(call.operator, parse(text, linear=False), [call.input.layout])
        made = derivation.outputs[0] if count == 1 else derivation.outputs
        return Recipe(derivation.operands, made)

    return Rule(name, rule, ("input", "n"))


def rules() -> Mapping[str, Rule]:
    found = {
        "linear": Rule("linear", _linear, ("input", "weight", "bias")),
        "matmul": Rule("matmul", _matmul, ("input", "other")),
        "__matmul__": Rule("matmul", _matmul, ("input", "other")),
        "mm": Rule("mm", _matmul, ("input", "other")),
        "mv": Rule("mv", _matmul, ("input", "other")),
        "dot": Rule("dot", _matmul, ("input", "other")),
        "vdot": Rule("vdot", _matmul, ("input", "other")),
        "inner": Rule("inner", _inner, ("input", "other")),
        "tensordot": Rule("tensordot", _tensordot, ("input", "other", "dims")),
        "vecdot": Rule("vecdot", _vecdot, ("x", "y", "dim")),
        "chain_matmul": Rule("chain_matmul", _chain, ("*matrices",)),
        "multi_dot": Rule("multi_dot", _chain, ("tensors",)),
        "bilinear": Rule("bilinear", _bilinear, _BILINEAR),
        "ger": pattern_rule("ger", "i, j -> i j", ("input", "other")),
        "addr": pattern_rule("addr", "i j + i, j -> i j", ("input", "first", "second")),
        "addmv": pattern_rule("addmv", "i + i k, k -> i", ("input", "first", "second")),
        "addbmm": pattern_rule("addbmm", "m n + b m k, b k n -> m n", ("input", "first", "second")),
        "bmm": pattern_rule("bmm", "b m k, b k n -> b m n", ("input", "other")),
        "outer": pattern_rule("outer", "i, j -> i j", ("input", "other")),
        "baddbmm": pattern_rule(
            "baddbmm", "b m n + b m k, b k n -> b m n", ("input", "first", "second")
        ),
        "addmm": Rule("addmm", _addmm, ("input", "first", "second")),
        "einsum": Rule("einsum", _einsum, ("equation", "*operands")),
    }
    for name in ("grouped_mm", "_grouped_mm"):
        found[name] = Rule(name, _grouped, ("input", "other", "offs", "bias", "out_dtype"))
    for name in words("inv inverse cholesky matrix_exp matrix_power"):
        found[name] = _whole_matrices(name)
    for name in ("solve", "solve_triangular"):
        found[name] = Rule(name, _solve, ("input", "other"))
    for name in words("det logdet"):
        found[name] = _whole_matrices(name, "...")
    found["slogdet"] = _whole_matrices("slogdet", "...", 2)
    return found
