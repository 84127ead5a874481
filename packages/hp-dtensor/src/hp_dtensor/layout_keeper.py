"""What must survive when parameters are replaced: their layouts, and who settles their gradients.

`to_empty`, `Module.to` between devices, `load_state_dict(assign=True)` and `copy.deepcopy` put new
objects in the place of parameters. PyTorch copies no attribute and no hook to them, so a model
would go on with parameters whose gradients stay this rank's summands and which optimizers take for
whole tensors. The keeper of a parallelized module gives the new ones what the old ones had.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.utils.hooks import RemovableHandle

from hp_dtensor.end_of_backward import EndOfBackward, SettledGradient
from hp_dtensor.errors import PlanError
from hp_dtensor.layout import Layout, attach_layout, layout_of
from hp_dtensor.settlement import needs_settlement

__all__ = ["LayoutKeeper"]


@define(eq=False)
class LayoutKeeper:
    """Layouts by parameter name, given again to whatever takes a parameter's place.

    Attributes:
        layouts: of every planned parameter, on the whole mesh.
        tied: groups of names that are one parameter.
        dtype: in which summands are summed; None for each gradient's own.
    """

    layouts: Mapping[str, Layout]
    tied: Sequence[Sequence[str]] = ()
    dtype: torch.dtype | None = None
    _settlement: EndOfBackward | None = field(default=None, init=False)

    def watch(self, module: nn.Module) -> None:
        """Attaches layouts and settlement, and follows replacements from now on."""
        self.restore(module)
        module.register_load_state_dict_post_hook(_AfterLoad(self))
        vars(module)["_apply"] = _Applying(self, weakref.ref(module))
        vars(module)["__deepcopy__"] = _Copying(self, weakref.ref(module))
        guard = _LayoutsKept(tuple(self.layouts))
        guard.handle = module.register_forward_pre_hook(guard)

    def restore(self, module: nn.Module) -> None:
        """Gives layouts to the parameters that have none.

        Raises:
            PlanError: one has another shape than its layout gives this rank.
        """
        self._tie(module)
        changed = self._settlement is None
        for name, layout in self.layouts.items():
            parameter = module.get_parameter(name)
            if layout_of(parameter) is not None:
                continue
            try:
                attach_layout(parameter, layout)
            except ValueError as error:
                raise PlanError(
                    f"parameter {name} was replaced by one of shape {tuple(parameter.shape)}, "
                    f"which is not this rank's part of {layout}: {error}; load local parts, or "
                    "load the whole state before parallelize"
                ) from error
            changed = True
        if changed:
            self._settle(module)

    def _tie(self, module: nn.Module) -> None:
        """`to_empty` makes one new parameter for each name."""
        for first, *others in self.tied:
            parameter = module.get_parameter(first)
            for name in others:
                if module.get_parameter(name) is not parameter:
                    path, _, leaf = name.rpartition(".")
                    setattr(module.get_submodule(path), leaf, parameter)

    def _settle(self, module: nn.Module) -> None:
        if self._settlement is not None:
            self._settlement.remove()
        summed = [
            SettledGradient(module.get_parameter(name), layout, name)
            for name, layout in self.layouts.items()
            if needs_settlement(layout) and layout_of(module.get_parameter(name)) == layout
        ]
        self._settlement = EndOfBackward(summed, self.dtype)
        self._settlement.install()


class _AfterLoad:
    """Post-hook of `load_state_dict`, which may assign new parameters."""

    def __init__(self, keeper: LayoutKeeper) -> None:
        self.keeper = keeper

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.keeper.restore(module)

    def __deepcopy__(self, memo: object) -> _AfterLoad:
        return self  # the copy's keeper puts its own in this one's place


class _Applying:
    """`Module._apply`, through which `to`, `to_empty`, `half` and the like replace parameters."""

    def __init__(self, keeper: LayoutKeeper, module: weakref.ref[nn.Module]) -> None:
        self.keeper, self.module = keeper, module

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        module = _alive(self.module)
        result = type(module)._apply(module, fn, recurse)
        self.keeper.restore(module)
        return result


class _Copying:
    """`copy.deepcopy` of a parallelized module: the copy has a keeper of its own."""

    def __init__(self, keeper: LayoutKeeper, module: weakref.ref[nn.Module]) -> None:
        self.keeper, self.module = keeper, module

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        module = _alive(self.module)
        own = getattr(type(module), "__deepcopy__", None)
        if own is not None:
            return own(module, memo)
        held = {name: vars(module).pop(name) for name in ("_apply", "__deepcopy__")}
        try:
            made: nn.Module = copy.deepcopy(module, memo)
        finally:
            vars(module).update(held)
        for hooks in (made._load_state_dict_post_hooks, made._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _AfterLoad | _LayoutsKept):
                    del hooks[key]
        LayoutKeeper(self.keeper.layouts, self.keeper.tied, self.keeper.dtype).watch(made)
        return made


def _alive(module: weakref.ref[nn.Module]) -> nn.Module:
    found = module()
    assert found is not None, "called on a module that is gone"
    return found


class _LayoutsKept:
    """First forward only: every planned parameter still knows its layout.

    A submodule's `to_empty` and `load_state_dict(assign=True)` pass the keeper by.
    """

    handle: RemovableHandle

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.handle.remove()
        lost = [name for name in self.names if layout_of(module.get_parameter(name)) is None]
        if lost:
            raise PlanError(
                f"parameters {lost} have lost their layouts since parallelize: to_empty or "
                "load_state_dict(assign=True) of a submodule replaced them. Call it on the module "
                "that was parallelized"
            )

    def __deepcopy__(self, memo: object) -> _LayoutsKept:
        return self  # the copy's keeper puts its own in this one's place
