"""`Muon`: a torch.optim.Optimizer over parameters of any layout, with AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hp_muon.adamw import new_adamw_state, step_adamw
from hp_muon.channels import Channels
from hp_muon.coefficients import coefficient_set
from hp_muon.errors import MuonError
from hp_muon.finite import check_gradients
from hp_muon.gradients import local_gradient
from hp_muon.newton_schulz import DEFAULT_EPS, newton_schulz
from hp_muon.plan_builder import Costs, build_plan
from hp_muon.rules import MomentumRule, Scale, accumulate, update_scale
from hp_muon.saved import MOMENTUM, ROWS, Archive, check_rows, localise, match
from hp_muon.settings import (
    Views,
    check_group,
    check_settings,
    check_views_are_used,
    kinds_of,
)
from hp_muon.slots import Slot, slots
from hp_muon.step import Hyperparameters, StepRun, Workspace, muon_step
from hp_muon.step_plan import MAX_BATCH_ELEMENTS, Batch, Entry, Orthogonalization, StepPlan
from hp_platform import Topology

PostUpdate = Callable[[str, Tensor], None]


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
        gram: whether to iterate in Gram space; where that is less work, when omitted.
        scale: "match_rms_adamw" (0.2 sqrt(max(rows, cols))), "spectral" or "jordan"
            (sqrt(max(1, rows / cols))), "none", or a function of rows and cols; these are the
            logical matrix's.
        normuon_beta2: decay of NorMuon's second moment of rows, which brings the rows of an
            update to a common size; None for plain Muon.
        views: logical matrices by parameter name (glob patterns allowed); others are their last
            two dims, leading dims being a batch.
        betas, eps: of AdamW.
        deduplicate_replicas: whether ranks of one host that hold the same shard share the work
            and the momentum.
        topology: hosts of the ranks; discovered when omitted.
        momentum_rule: replaces the momentum, see `hp_muon.rules.MomentumRule`.
        orthogonalize: replaces Newton-Schulz: [n, rows, cols] in ns_dtype -> the same shape.
        post_update: called with the name and the parameter of every Muon parameter at the end of
            each step, on every rank that holds a part of it; see `QKClip`.
        check_finite: whether gradients of Muon parameters that are not finite raise, before
            anything is changed, and updates that are not finite at the end of the step. On an
            accelerator the host then waits for the gradients and for the step's last exchange.
        costs: cost of one matrix by (rows, cols), in any unit, for the balance of the work; the
            same on every rank. Floating-point operations when omitted.
        max_batch_elements: cap on what is gathered at a time, over the shard-group size.

    Calls that communicate, and which all ranks of the parameters' meshes must make together:
    `step` (unless no matrix is cut and no replica shared), `state_dict` (with replica owners or
    NorMuon), and the first of `step`, `state_dict`, `load_state_dict` after construction or after
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
        scale: Scale = "match_rms_adamw",
        normuon_beta2: float | None = None,
        views: Views | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_eps: float = DEFAULT_EPS,
        gram: bool | None = None,
        deduplicate_replicas: bool = True,
        topology: Topology | None = None,
        momentum_rule: MomentumRule | None = None,
        orthogonalize: Callable[[Tensor], Tensor] | None = None,
        post_update: PostUpdate | None = None,
        check_finite: bool = True,
        costs: Costs | None = None,
        max_batch_elements: int = MAX_BATCH_ELEMENTS,
    ) -> None:
        self._settings: dict[str, Any] = {
            "views": dict(views or {}),
            "ns_dtype": ns_dtype,
            "ns_eps": ns_eps,
            "gram": gram,
            "deduplicate_replicas": deduplicate_replicas,
            "topology": topology,
            "scale": scale if callable(scale) else None,
            "momentum_rule": momentum_rule,
            "orthogonalize": orthogonalize,
            "post_update": post_update,
            "check_finite": check_finite,
            "costs": None if costs is None else dict(costs),
            "max_batch_elements": max_batch_elements,
        }
        check_settings(self._settings)
        self._forget_plan()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "coefficients": coefficients,
            # A function stays out of the groups, which are saved with the state.
            "scale": "custom" if callable(scale) else scale,
            "normuon_beta2": normuon_beta2,
            "betas": betas,
            "eps": eps,
            "use_muon": True,
        }
        super().__init__(params, defaults)
        names = [slot.name for slot in self._slots()]
        check_views_are_used(self._settings["views"], names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; the plan is built anew at the next step, keeping all momentum.

        Raises:
            MuonError: a setting or parameter cannot be used.
        """
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            check_group(number, self.param_groups[number], self.defaults, self._settings)
        except MuonError:
            self.param_groups.pop()
            raise
        self._signature = None

    # -- plan --------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """The static plan of a step; built on first use, by all ranks together."""
        signature = tuple(
            (
                len(group["params"]),
                group["use_muon"],
                group["ns_steps"],
                str(group["coefficients"]),
                group["normuon_beta2"],
            )
            for group in self.param_groups
        )
        if self._plan is None or signature != self._signature:
            self._build_plan()
            self._signature = signature
        assert self._plan is not None
        return self._plan

    def _build_plan(self) -> None:
        archive = self._archive() if self._plan is not None else None
        momenta, rows = (archive.momenta(), archive.rows()) if archive is not None else ({}, {})
        entries = [entry for slot in self._slots() if slot.on_muon for entry in self._entries(slot)]
        topology = self._settings["topology"]
        if topology is None and dist.is_initialized() and any(e.layout for e in entries):
            topology = Topology.discover()
        plan = build_plan(
            entries,
            topology=topology,
            deduplicate=self._settings["deduplicate_replicas"],
            costs=self._settings["costs"],
            max_batch_elements=self._settings["max_batch_elements"],
        )
        channels = Channels(plan, topology)
        channels.agree(plan)
        self._plan, self._channels, self._workspace = plan, channels, Workspace()
        if archive is not None:
            self._archive().keep(momenta, rows)

    def _entries(self, slot: Slot) -> list[Entry]:
        coefficients = slot.group["coefficients"]
        coefficient_set(coefficients).steps(slot.group["ns_steps"])  # may have been changed
        how = Orthogonalization(
            steps=slot.group["ns_steps"],
            coefficients=coefficients
            if isinstance(coefficients, str)
            else tuple(tuple(triple) for triple in coefficients),
            eps=self._settings["ns_eps"],
            dtype=self._settings["ns_dtype"],
            gram=self._settings["gram"],
            normuon_beta2=slot.group["normuon_beta2"],
        )
        local = slot.local
        return [
            Entry(
                index=slot.index,
                kind=kind,
                name=slot.name,
                layout=slot.layout,
                view=view,
                dtype=local.dtype,
                device=local.device,
                orthogonalization=how,
            )
            for kind, view in enumerate(
                kinds_of(slot.name, slot.parameter, self._settings["views"])
            )
        ]

    def _forget_plan(self) -> None:
        self._plan = None
        self._channels = None
        self._workspace = Workspace()
        self._signature = None

    def _slots(self) -> list[Slot]:
        return list(slots(self.param_groups))

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
            MuonError: a gradient is Partial, sparse, placed unlike its parameter, or not finite
                on any rank that this one exchanges with; before anything is changed. Or an update
                is not finite: after the exchanges of the step, on every rank that shares the
                matrix; its parameter is spoilt then. Gradients too are found only then where the
                parameters are cut along several meshes, none of which has all their ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self.plan
        found = self._slots()
        run = self._run(plan, found)
        self._check_finite(run, found)
        muon_step(plan, run)
        self._step_adamw(run, found)
        hook: PostUpdate | None = self._settings["post_update"]
        if hook is not None:
            for slot in found:
                if slot.on_muon:
                    hook(slot.name, slot.parameter)
        return loss

    def _run(self, plan: StepPlan, found: Sequence[Slot]) -> StepRun:
        live = {id(group): self._hyperparameters(group) for group in self.param_groups}
        locals = {slot.index: slot.local for slot in found}
        gradients = {
            slot.index: local_gradient(slot.parameter, locals[slot.index], slot.name)
            for slot in found
        }
        momenta: dict[int, Tensor] = {}
        row_moments: dict[int, dict[int, Tensor]] = {}
        for slot in found:
            if slot.index not in plan.owned:
                continue
            state = self.state[slot.parameter]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(locals[slot.index], dtype=torch.float32)
            momenta[slot.index] = state[MOMENTUM]
            if slot.group["normuon_beta2"] is not None:
                row_moments[slot.index] = state.setdefault(ROWS, {})
        assert self._channels is not None
        return StepRun(
            locals=locals,
            gradients=gradients,
            momenta=momenta,
            row_moments=row_moments,
            hyperparameters={slot.index: live[id(slot.group)] for slot in found},
            channels=self._channels.compiled,
            workspace=self._workspace,
            orthogonalize=self._orthogonalize,
            momentum_rule=self._settings["momentum_rule"] or accumulate,
            check_finite=self._settings["check_finite"],
        )

    def _check_finite(self, run: StepRun, found: Sequence[Slot]) -> None:
        assert self._channels is not None
        axes = self._channels.agreement
        if run.check_finite and axes is not None:
            names = {slot.index: slot.name for slot in found if slot.on_muon}
            check_gradients(names, run.gradients, axes)

    def _hyperparameters(self, group: Mapping[str, Any]) -> Hyperparameters:
        scale = group["scale"]
        if group["use_muon"] and not callable(scale) and scale != "custom":
            update_scale(scale, 1, 1)  # it may have been changed since the group was made
        return Hyperparameters(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            weight_decay=float(group["weight_decay"]),
            scale=self._settings["scale"] if scale == "custom" else scale,
        )

    def _orthogonalize(self, matrices: Tensor, batch: Batch, out: Tensor) -> None:
        custom: Callable[[Tensor], Tensor] | None = self._settings["orthogonalize"]
        how = batch.orthogonalization
        if custom is None:
            newton_schulz(
                matrices,
                steps=how.steps,
                coefficients=how.coefficients,
                eps=how.eps,
                dtype=how.dtype,
                gram=how.gram,
                out=out,
            )
            return
        result = custom(matrices)
        if result.shape != matrices.shape:
            raise MuonError(
                f"orthogonalize returned shape {tuple(result.shape)} for matrices of shape "
                f"{tuple(matrices.shape)}; it must keep the shape"
            )
        out.copy_(result)
        # As Newton-Schulz does it: a matrix that is not finite anywhere is so in every entry.
        out.masked_fill_(~out.isfinite().all(-1).all(-1)[:, None, None], torch.nan)

    def _step_adamw(self, run: StepRun, found: Sequence[Slot]) -> None:
        for group in self.param_groups:
            if group["use_muon"]:
                continue
            mine = [slot for slot in found if slot.group is group]
            stepped = [
                (run.locals[slot.index], gradient, self._adamw_state(slot))
                for slot in mine
                if (gradient := run.gradients[slot.index]) is not None
            ]
            if stepped:
                step_adamw(group, *zip(*stepped))

    def _adamw_state(self, slot: Slot) -> dict[str, Tensor]:
        state = self.state[slot.parameter]
        if "step" not in state:
            state.update(new_adamw_state(slot.local))
        return state

    # -- state -------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state in canonical form: every tensor with its parameter's layout, on every rank.

        Parameters that were never stepped have zeros, so that a fresh optimizer's state_dict is
        a target for torch.distributed.checkpoint.load. Collective where replicas share momentum,
        and with NorMuon.
        """
        mine = self.state
        self.state = self._archive().canonical()
        try:
            return super().state_dict()
        finally:
            self.state = mine

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
        saved_ids = match(saved_groups, self.param_groups)
        loaded: defaultdict[Tensor, Any] = defaultdict(dict)
        rows: dict[int, Tensor] = {}
        for slot in self._slots():
            saved = state_dict["state"].get(saved_ids[slot.parameter], {})
            loaded[slot.parameter] = localise(saved, slot)
            if ROWS in loaded[slot.parameter]:
                rows[slot.index] = loaded[slot.parameter].pop(ROWS)
        groups = [
            {**current, **dict(saved), "params": current["params"]}
            | ({"param_names": current["param_names"]} if "param_names" in current else {})
            for current, saved in zip(self.param_groups, saved_groups)
        ]
        self.__setstate__({"state": loaded, "param_groups": groups})
        _ = self.plan  # built here, by all ranks together, if not yet
        archive = self._archive()
        check_rows(rows, archive)
        archive.keep({}, rows)
        for slot in archive.slots:
            if not self.state[slot.parameter]:
                del self.state[slot.parameter]
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _archive(self) -> Archive:
        """What saves and loads this rank's state; the plan in use, else a new one."""
        plan = self._plan if self._plan is not None else self.plan
        assert self._channels is not None
        return Archive(plan, self._channels, self._slots(), self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_plan" not in self.__dict__:
            self._forget_plan()
        super().__setstate__(state)
