"""Values: a family's own plan on two ranks, held to one process.

The planner plans without overrides; two ranks run one step in production; logits and the gradient
of every parameter are compared with those of the whole model. What a rank holds of a gradient is
cut from the dense one by the plan's layout.
"""

from __future__ import annotations

import copy
import enum
import inspect
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hp_planner
from hp_dtensor.layout import Layout
from hp_dtensor.meta import validate_on_meta
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.production import local_part
from hp_integration.families.configs import VOCABULARY, randomise, tiny_model
from hp_integration.families.remedies import follow
from hp_planner import PlanError
from hp_platform.errors import HPError
from hp_platform.testing import run_ranks

Mode = Literal["production", "validate", "meta"]
TOLERANCE = 1e-3
NOISE = 1e-4
SEQUENCE = 8


class Verdict(enum.Enum):
    """What became of one family."""

    RIGHT = "right"
    REFUSED = "refused"
    STOPPED = "stopped"
    WRONG = "wrong"
    NOT_BUILT = "not built"


@frozen
class Result:
    """One family's verdict.

    Attributes:
        note: what was refused, where it stopped, or which tensor is wrong.
        error: largest error of logits and gradients, relative to the tensor's largest element.
        sharded: elements in cut parameters, as a part of all.
        overridden: what became of a refused family with the overrides that its refusal names; None
            if it was not refused.
    """

    family: str
    verdict: Verdict
    note: str = ""
    error: float = 0.0
    sharded: float = 0.0
    overridden: Result | None = None


def judge(
    family: str, mesh: dict[str, int] | None = None, mode: Mode = "production", **options: Any
) -> Result:
    """Plans, runs and compares one family."""
    try:
        model = tiny_model(family)
        randomise(model)
        inputs = batch()
        dense = copy.deepcopy(model)
        wanted = step(dense, inputs)
        if not torch.isfinite(wanted).all():
            return Result(family, Verdict.NOT_BUILT, "the dense logits are not finite")
    except Exception as error:  # whatever transformers says about tiny sizes
        return Result(family, Verdict.NOT_BUILT, brief(error))
    mesh = mesh or {"tp": 2}
    judged = partial(judge_model, family, model, dense, wanted, mesh, mode)
    result = judged(**options)
    if result.verdict is not Verdict.REFUSED:
        return result
    # Once more, with what its refusals say to type.
    try:
        overrides = follow(model, mesh)
    except PlanError as error:
        return evolve(result, overridden=Result(family, Verdict.REFUSED, str(error)))
    return evolve(result, overridden=judged(overrides=overrides))


def judge_model(
    family: str,
    model: nn.Module,
    dense: nn.Module,
    wanted: Tensor,
    mesh: dict[str, int],
    mode: Mode,
    ids: Tensor | None = None,
    **options: Any,
) -> Result:
    """Compares `model` under its own plan with `dense`, which has run its step on `ids`."""
    try:
        found = hp_planner.plan(model, mesh, **options)
    except PlanError as error:
        return Result(family, Verdict.REFUSED, str(error))
    share = sharded_share(found)
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    if mode == "meta":
        note = unvalued_problem(model, found, batch() if ids is None else ids, gradients)
        return Result(family, Verdict.STOPPED if note else Verdict.RIGHT, note, sharded=share)
    names, sizes = tuple(mesh), tuple(mesh.values())

    def body(rank: int) -> tuple[str, float]:
        devices = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        mine = parallelize(copy.deepcopy(model), found, devices, mode=mode)
        logits = step(mine, batch() if ids is None else ids)
        return worst_error(mine, logits, wanted, gradients, found, devices.get_coordinate())

    world = 1
    for size in sizes:
        world *= size
    try:
        results = run_ranks(body, world, timeout=60)
    except HPError as error:
        return Result(family, Verdict.STOPPED, last_line(error), sharded=share)
    name, worst = max(results, key=lambda each: each[1])
    verdict = Verdict.RIGHT if worst < TOLERANCE else Verdict.WRONG
    return Result(family, verdict, name if verdict is Verdict.WRONG else "", worst, share)


def unvalued_problem(
    model: nn.Module, plan: ShardingPlan, ids: Tensor, gradients: dict[str, Tensor | None]
) -> str:
    """What `validate_on_meta` says against a plan, empty if nothing.

    Parameters that have a gradient in the whole model have to get one. A mask keeps models from
    looking for padding among ids without values.
    """
    inputs = {"input_ids": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(ids)

    def loss(found: nn.Module, given: Mapping[str, Any]) -> Tensor:
        logits: Tensor = found(**given, use_cache=False).logits
        return logits.float().sum()

    try:
        report = validate_on_meta(model, plan, inputs, loss_fn=loss)
    except Exception as error:  # whatever the model's own code says about what it is given
        return " ".join([brief(error), *getattr(error, "__notes__", [])[:1]])
    missing = [name for name in report.unreached if gradients.get(name) is not None]
    return f"no gradient reaches {', '.join(missing)}" if missing else ""


def batch() -> Tensor:
    """[2, SEQUENCE] token ids, away from the special ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, VOCABULARY - 4, (2, SEQUENCE), generator=generator)


def step(model: nn.Module, ids: Tensor) -> Tensor:
    """Forward and backward; returns the logits. The loss weighs every logit differently."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    whole = getattr(logits, "full_tensor", None)
    if whole is not None:
        logits = whole()
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
    (logits.float() * weights).sum().backward()
    return logits.detach()


def worst_error(
    model: nn.Module,
    logits: Tensor,
    wanted: Tensor,
    gradients: dict[str, Tensor | None],
    plan: ShardingPlan,
    coordinate: Any,
) -> tuple[str, float]:
    """Name and size of the largest error among the logits and all gradients of this rank."""
    errors = {"logits": distance(logits, wanted)}
    # A gradient that is zero in exact arithmetic (a key's bias) is rounding on both sides.
    floor = NOISE * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for spec in plan.parameters:
        dense, mine = gradients[spec.name], parameters[spec.name].grad
        if mine is not None and hasattr(mine, "to_local"):
            mine = mine.to_local()
        if dense is None or mine is None:
            unlike = (dense is not None and bool(dense.any())) or (
                mine is not None and bool(mine.any())
            )
            errors[spec.name] = float("inf") if unlike else 0.0
            continue
        placements, _ = spec.contract.on(plan.mesh)
        layout = Layout(plan.mesh, placements, spec.shape)
        errors[spec.name] = distance(
            mine, local_part(dense, layout, tuple(coordinate)), max(floor, float(dense.abs().max()))
        )
    return max(errors.items(), key=lambda item: item[1])


def distance(found: Tensor, wanted: Tensor, scale: float | None = None) -> float:
    """Largest difference, relative to the largest element wanted."""
    if found.shape != wanted.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    largest = float(wanted.abs().max()) if scale is None else scale
    error = float((found - wanted).abs().max()) / max(largest, 1e-6)
    return error if error == error else float("inf")


def sharded_share(plan: ShardingPlan) -> float:
    """Elements of parameters that some axis cuts, as a part of all elements."""
    whole = cut = 0
    for spec in plan.parameters:
        count = torch.Size(spec.shape).numel()
        whole += count
        cut += count if spec.contract.placements else 0
    return cut / whole if whole else 0.0


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return " ".join((named or lines)[-1].split())[:400] if lines else traceback.format_exc()[-200:]
