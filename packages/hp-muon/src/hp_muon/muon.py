"""`Muon`: a torch.optim.Optimizer over parameters of any layout, with AdamW for the rest."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hp_dtensor import layout_of
from hp_muon.channels import Channels
from hp_muon.errors import MuonError
from hp_muon.coefficients import coefficient_set
from hp_muon.newton_schulz import DEFAULT_EPS, newton_schulz
from hp_muon.rules import update_scale
from hp_muon.split import global_shape
from hp_muon.state import from_owner, local_tensor, to_local_state, with_layout_of
from hp_muon.step import Hyperparameters, StepRun, Workspace, muon_step
from hp_muon.step_plan import Batch, Entry, Orthogonalization, StepPlan, build_plan
from hp_muon.views import MatrixView, ResolvedView
from hp_platform import Topology

Views = Mapping[str, MatrixView]
MOMENTUM = "momentum_buffer"


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest, on sharded, replicated and plain parameters.

    Who must talk to whom follows from the parameters' layouts alone: a PyTorch DTensor (FSDP2,
    tensor parallelism), a DTensor of hp-dtensor, or a plain local tensor with an attached layout.
    A plain tensor without a layout is local to this rank: nothing is known of other ranks, so
    under DistributedDataParallel every rank computes the same update.

    Args:
        params: tensors, (name, tensor) pairs, or groups of either. Groups with
            `use_muon=False` are stepped by AdamW, equal in value to torch.optim.AdamW.
            `split_parameters` makes the groups.
        lr: learning rate; read, like weight_decay, from the groups at every step.
        momentum, nesterov: m <- mu m + g, and the update's input g + mu m, or m.
        weight_decay: decoupled, p <- p (1 - lr weight_decay), for both algorithms.
        ns_steps, coefficients, ns_eps: see `newton_schulz`.
        ns_dtype: dtype of the exchange of shards and updates and of the iteration.
        scale: "match_rms_adamw" (0.2 sqrt(max(rows, cols))), "spectral" or "jordan"
            (sqrt(max(1, rows / cols))), or "none"; rows and cols are the logical matrix's.
        views: logical matrices by parameter name (glob patterns allowed); others are their last
            two dims, leading dims being a batch.
        betas, eps: of AdamW.
        deduplicate_replicas: whether ranks of one host that hold the same shard share the work
            and the momentum.
        topology: hosts of the ranks; discovered when omitted.
        orthogonalize: replaces Newton-Schulz: [n, rows, cols] -> the same shape.

    Calls that communicate, and which all ranks of the parameters' meshes must make together:
    `step` (unless no matrix is cut and no replica shared), `state_dict` (with replica owners),
    and the first of `step`, `state_dict`, `load_state_dict` after construction or after
    `add_param_group`, which builds the plan. `step` of a parameter whose gradient is None on all
    ranks that share its matrices leaves it alone; where some have a gradient, the missing shards
    count as zero.

    Raises:
        MuonError: an argument, view or parameter cannot be used; nothing has been communicated.
    """

    _plan: StepPlan | None
    _channels: Channels | None
    _workspace: Workspace
    _signature: tuple[Any, ...] | None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        coefficients: str | Sequence[Sequence[float]] = "asym5",
        scale: str = "match_rms_adamw",
        views: Views | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_eps: float = DEFAULT_EPS,
        deduplicate_replicas: bool = True,
        topology: Topology | None = None,
        orthogonalize: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if not ns_dtype.is_floating_point or ns_eps <= 0:
            raise MuonError(
                f"Muon needs a floating-point ns_dtype and ns_eps > 0, found {ns_dtype}, {ns_eps}"
            )
        for pattern, view in (views or {}).items():
            if not isinstance(view, MatrixView):
                raise MuonError(
                    f"view {pattern!r}: expected a MatrixView, found {type(view).__name__}; write "
                    "MatrixView('(h d) m -> h d m', h=8)"
                )
        self._settings: dict[str, Any] = {
            "views": dict(views or {}),
            "ns_dtype": ns_dtype,
            "ns_eps": ns_eps,
            "deduplicate_replicas": deduplicate_replicas,
            "topology": topology,
            "orthogonalize": orthogonalize,
        }
        self._forget_plan()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "coefficients": coefficients,
            "scale": scale,
            "betas": betas,
            "eps": eps,
            "use_muon": True,
        }
        super().__init__(params, defaults)
        self._check_views_are_used()

    # -- parameters --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; the plan is built anew at the next step, keeping all momentum.

        Raises:
            MuonError: a setting or parameter cannot be used.
        """
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            self._check_group(number)
        except MuonError:
            self.param_groups.pop()
            raise
        self._signature = None

    def _check_group(self, number: int) -> None:
        group = self.param_groups[number]
        self._check_keys(number)
        names = [name for name, _ in self._named(number)]
        if len({id(parameter) for parameter in group["params"]}) < len(names):
            raise MuonError(
                f"parameter group {number} holds a parameter more than once, so that it would be "
                f"stepped as often; keep one of {names[:10]}"
            )
        for key in ("lr", "weight_decay"):
            if not float(group[key]) >= 0:
                raise MuonError(f"parameter group {number}: {key} must be >= 0, got {group[key]}")
        if not group["use_muon"]:
            betas, eps = group["betas"], group["eps"]
            if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or not eps >= 0:
                raise MuonError(
                    f"parameter group {number}: betas must be two numbers in [0, 1) and eps >= 0, "
                    f"got {betas} and {eps}"
                )
            return
        if not 0 <= group["momentum"] < 1:
            raise MuonError(
                f"parameter group {number}: momentum must be in [0, 1), got {group['momentum']}"
            )
        coefficient_set(group["coefficients"]).steps(group["ns_steps"])
        update_scale(group["scale"], 1, 1)
        for name, parameter in self._named(number):
            if not parameter.is_floating_point():
                raise MuonError(
                    f"parameter {name!r} is {parameter.dtype}; Muon steps floating-point tensors"
                )
            self._view(name, parameter)

    def _check_keys(self, number: int) -> None:
        """Other keys are a scheduler's or the user's own, unless they look like a setting."""
        for key in set(self.param_groups[number]) - set(self.defaults):
            if key in self._settings:
                raise MuonError(
                    f"parameter group {number}: {key} holds for the whole optimizer; pass it to "
                    "Muon(...), not in a group"
                )
            meant = difflib.get_close_matches(key, self.defaults, n=1, cutoff=0.85)
            if meant:
                raise MuonError(
                    f"parameter group {number}: unknown setting {key!r}; {meant[0]!r} was meant?"
                )

    def _named(self, number: int) -> list[tuple[str, Tensor]]:
        group = self.param_groups[number]
        names = group.get("param_names") or [
            f"group {number} parameter {i}" for i in range(len(group["params"]))
        ]
        return list(zip(names, group["params"]))

    def _view(self, name: str, parameter: Tensor) -> ResolvedView:
        """The parameter's logical matrices; decided on its global shape."""
        shape = global_shape(parameter)
        patterns = [p for p in self._settings["views"] if fnmatch.fnmatchcase(name, p)]
        if len(patterns) > 1:
            raise MuonError(f"parameter {name!r} matches several views: {patterns}; keep one")
        if patterns:
            return self._settings["views"][patterns[0]].resolve(shape, f"parameter {name!r}")
        if len(shape) < 2 or (len(shape) > 2 and 1 in shape[-2:]):
            raise MuonError(
                f"parameter {name!r} of shape {shape} holds no matrices in its last two dims; put "
                "it into a group with use_muon=False (split_parameters does), or give a MatrixView"
            )
        return MatrixView.default(len(shape)).resolve(shape, f"parameter {name!r}")

    def _check_views_are_used(self) -> None:
        names = [name for n in range(len(self.param_groups)) for name, _ in self._named(n)]
        for pattern in self._settings["views"]:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise MuonError(
                    f"view {pattern!r} matches no parameter; names are known only for named "
                    f"parameters, here {names[:5]}{' ...' if len(names) > 5 else ''}"
                )

    # -- plan --------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """The static plan of a step; built on first use, by all ranks together."""
        signature = tuple(
            (len(g["params"]), g["use_muon"], g["ns_steps"], str(g["coefficients"]))
            for g in self.param_groups
        )
        if self._plan is None or signature != self._signature:
            self._build_plan()
            self._signature = signature
        assert self._plan is not None
        return self._plan

    def _build_plan(self) -> None:
        momenta = self._canonical_momenta() if self._plan is not None else {}
        entries = self._entries()
        topology = self._settings["topology"]
        if topology is None and dist.is_initialized() and any(e.layout for e in entries):
            topology = Topology.discover()
        plan = build_plan(
            entries, topology=topology, deduplicate=self._settings["deduplicate_replicas"]
        )
        channels = Channels(plan, topology)
        channels.agree(plan)
        self._plan, self._channels, self._workspace = plan, channels, Workspace()
        parameters = self._parameters()
        for index, momentum in momenta.items():
            self.state[parameters[index]][MOMENTUM] = momentum
        self._drop_foreign_momenta(plan)

    def _entries(self) -> list[Entry]:
        entries = []
        index = 0
        for number, group in enumerate(self.param_groups):
            for name, parameter in self._named(number):
                if group["use_muon"]:
                    local = local_tensor(parameter)
                    coefficients = group["coefficients"]
                    how = Orthogonalization(
                        steps=group["ns_steps"],
                        coefficients=coefficients
                        if isinstance(coefficients, str)
                        else tuple(tuple(triple) for triple in coefficients),
                        eps=self._settings["ns_eps"],
                        dtype=self._settings["ns_dtype"],
                    )
                    entries.append(
                        Entry(
                            index=index,
                            name=name,
                            layout=layout_of(parameter),
                            view=self._view(name, parameter),
                            dtype=local.dtype,
                            device=local.device,
                            orthogonalization=how,
                        )
                    )
                index += 1
        return entries

    def _forget_plan(self) -> None:
        self._plan = None
        self._channels = None
        self._workspace = Workspace()
        self._signature = None

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    # -- step --------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps every parameter that has a gradient; see the class for what communicates.

        Args:
            closure: evaluates the model and returns the loss.

        Raises:
            MuonError: a gradient is Partial, sparse, or placed unlike its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self.plan
        run = self._run(plan)
        muon_step(plan, run)
        self._step_adamw(run)
        return loss

    def _run(self, plan: StepPlan) -> StepRun:
        locals: dict[int, Tensor] = {}
        gradients: dict[int, Tensor | None] = {}
        hyperparameters: dict[int, Hyperparameters] = {}
        index = 0
        for number, group in enumerate(self.param_groups):
            live = Hyperparameters(
                lr=float(group["lr"]),
                momentum=float(group["momentum"]),
                nesterov=bool(group["nesterov"]),
                weight_decay=float(group["weight_decay"]),
                scale=group["scale"],
            )
            for name, parameter in self._named(number):
                locals[index] = local_tensor(parameter)
                gradients[index] = _local_gradient(parameter, locals[index], name)
                hyperparameters[index] = live
                index += 1
        parameters = self._parameters()
        for i in plan.owned:
            if MOMENTUM not in self.state[parameters[i]]:
                momentum = torch.zeros_like(locals[i], dtype=torch.float32)
                self.state[parameters[i]][MOMENTUM] = momentum
        assert self._channels is not None
        return StepRun(
            locals=locals,
            gradients=gradients,
            momenta={i: self.state[parameters[i]][MOMENTUM] for i in plan.owned},
            hyperparameters=hyperparameters,
            channels=self._channels.compiled,
            workspace=self._workspace,
            orthogonalize=self._orthogonalize,
        )

    def _orthogonalize(self, matrices: Tensor, batch: Batch) -> Tensor:
        custom = self._settings["orthogonalize"]
        if custom is not None:
            return custom(matrices)
        how = batch.orthogonalization
        return newton_schulz(
            matrices, steps=how.steps, coefficients=how.coefficients, eps=how.eps, dtype=how.dtype
        )

    def _step_adamw(self, run: StepRun) -> None:
        index = 0
        for group in self.param_groups:
            indices = range(index, index + len(group["params"]))
            index += len(group["params"])
            if group["use_muon"]:
                continue
            stepped = [
                (run.locals[i], gradient, self._adamw_state(parameter))
                for i, parameter in zip(indices, group["params"])
                if (gradient := run.gradients[i]) is not None
            ]
            if not stepped:
                continue
            adamw(
                [local for local, _, _ in stepped],
                [gradient for _, gradient, _ in stepped],
                [state["exp_avg"] for *_, state in stepped],
                [state["exp_avg_sq"] for *_, state in stepped],
                [],
                [state["step"] for *_, state in stepped],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=float(group["lr"]),
                weight_decay=float(group["weight_decay"]),
                eps=group["eps"],
                maximize=False,
            )

    def _adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if "step" not in state:
            state.update(_new_adamw_state(local_tensor(parameter)))
        return state

    # -- state -------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state in canonical form: every tensor with its parameter's layout, on every rank.

        Parameters that were never stepped have zeros, so that a fresh optimizer's state_dict is
        a target for torch.distributed.checkpoint.load. Collective where replicas share momentum.
        """
        mine = self.state
        self.state = self._canonical_state()
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def _canonical_state(self) -> defaultdict[Tensor, Any]:
        canonical: defaultdict[Tensor, Any] = defaultdict(dict)
        momenta = self._canonical_momenta()
        for index, (group, parameter) in enumerate(self._grouped()):
            layout = layout_of(parameter)
            held = dict(self.state.get(parameter, {}))
            if group["use_muon"]:
                held = {MOMENTUM: momenta[index]}
            elif "step" not in held:
                held = dict(_new_adamw_state(local_tensor(parameter)))
            canonical[parameter] = {
                key: with_layout_of(parameter, layout, value)
                if isinstance(value, Tensor) and key != "step"
                else value
                for key, value in held.items()
            }
        return canonical

    def _grouped(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _canonical_momenta(self) -> dict[int, Tensor]:
        """Local momentum of every Muon parameter, from its replica owner where shared."""
        plan = self._plan if self._plan is not None else self.plan
        assert self._channels is not None
        parameters = self._parameters()
        momenta: dict[int, Tensor] = {}
        for batch in plan.batches:
            axes = self._channels.replica_axes(batch.domain)
            for replica, part in enumerate(batch.parts):
                owner = _coordinates(replica, batch.domain.replica_sizes)
                for member in part.members:
                    parameter = parameters[member.index]
                    held = self.state[parameter].get(MOMENTUM)
                    like = local_tensor(parameter)
                    momenta[member.index] = from_owner(held, like, owner, axes, member.name)
        return momenta

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, here or elsewhere, or torch.optim.Muon's state.

        Parameters are matched by name where both sides know names, by order otherwise. Momentum
        stays float32 whatever the parameters' dtype; copies that this rank does not own are
        dropped. Tensors are copied, so that the loaded state is not written by later steps. Groups'
        settings are loaded too, as in every torch optimizer.

        Raises:
            MuonError: groups, names, shapes or layouts do not fit.
        """
        state_dict = dict(state_dict)
        # PyTorch keeps registered hooks under private names only; `test_muon` calls one of each.
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved_groups = state_dict["param_groups"]
        saved_ids = self._match(saved_groups)
        loaded: defaultdict[Tensor, Any] = defaultdict(dict)
        for number, group in enumerate(self.param_groups):
            for name, parameter in self._named(number):
                saved = state_dict["state"].get(saved_ids[parameter], {})
                loaded[parameter] = self._localise(saved, parameter, group, name)
        groups = [
            {**current, **dict(saved), "params": current["params"]}
            | ({"param_names": current["param_names"]} if "param_names" in current else {})
            for current, saved in zip(self.param_groups, saved_groups)
        ]
        self.__setstate__({"state": loaded, "param_groups": groups})
        self._drop_foreign_momenta(self.plan)  # built here, by all ranks together, if not yet
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _match(self, saved_groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, Any]:
        """The saved id of every parameter."""
        found = [len(group["params"]) for group in saved_groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if found != expected:
            raise MuonError(
                f"loaded state has groups of {found} parameters, this optimizer has {expected}"
            )
        matched: dict[Tensor, Any] = {}
        for number, (saved, group) in enumerate(zip(saved_groups, self.param_groups)):
            ids = list(saved["params"])
            if saved.get("param_names") and group.get("param_names"):
                by_name = dict(zip(saved["param_names"], ids))
                missing = [name for name in group["param_names"] if name not in by_name]
                if missing:
                    raise MuonError(
                        f"loaded state, group {number}: no state for parameters {missing}; it "
                        f"has {list(by_name)[:5]} and others"
                    )
                ids = [by_name[name] for name in group["param_names"]]
            matched.update(zip(group["params"], ids))
        return matched

    def _localise(
        self, saved: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any], name: str
    ) -> dict[str, Any]:
        layout = layout_of(parameter)
        local = local_tensor(parameter)
        state: dict[str, Any] = {}
        needed = MOMENTUM if group["use_muon"] else "exp_avg"
        if saved and needed not in saved:
            raise MuonError(
                f"state of parameter {name!r}: loaded {sorted(saved)} without {needed!r}, which "
                f"{'Muon' if group['use_muon'] else 'AdamW'} steps with; load the state of the "
                "same algorithm, or leave this parameter's state out to begin anew"
            )
        for key, value in saved.items():
            if not isinstance(value, Tensor):
                state[key] = value
            elif key == "step":
                state[key] = value.detach().clone()
            else:
                found = to_local_state(value.detach(), parameter, layout, name)
                dtype = torch.float32 if group["use_muon"] else local.dtype
                state[key] = found.to(device=local.device, dtype=dtype, copy=True)
        return state

    def _drop_foreign_momenta(self, plan: StepPlan) -> None:
        for index, (group, parameter) in enumerate(self._grouped()):
            if group["use_muon"] and index not in plan.owned:
                self.state.pop(parameter, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_plan" not in self.__dict__:
            self._forget_plan()
        super().__setstate__(state)


def _local_gradient(parameter: Tensor, local: Tensor, name: str) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    placements = getattr(gradient, "placements", None)
    expected = getattr(parameter, "placements", None)
    if placements is not None:
        if any(placement.is_partial() for placement in placements):
            raise MuonError(
                f"gradient of parameter {name!r} is placed {tuple(placements)}: a Partial gradient "
                "is not summed yet; redistribute it before the step"
            )
        if expected is not None and tuple(placements) != tuple(expected):
            raise MuonError(
                f"gradient of parameter {name!r} is placed {tuple(placements)}, the parameter "
                f"{tuple(expected)}; redistribute the gradient before the step"
            )
    found = local_tensor(gradient)
    if found.layout is not torch.strided:
        raise MuonError(f"gradient of parameter {name!r} is {found.layout}; Muon needs a dense one")
    if found.shape != local.shape:
        raise MuonError(
            f"gradient of parameter {name!r} has local shape {tuple(found.shape)}, the parameter "
            f"{tuple(local.shape)}"
        )
    return found


def _new_adamw_state(local: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(local),
        "exp_avg_sq": torch.zeros_like(local),
    }


def _coordinates(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major position as coordinates."""
    return tuple(
        index // math.prod(sizes[position + 1 :]) % size for position, size in enumerate(sizes)
    )
