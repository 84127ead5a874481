"""A model's modules and parameters under the names they have without wrappers.

DistributedDataParallel, torch.compile and activation checkpointing put a module around another and
a part into every name below: `module.head`, `_orig_mod.head`, `head._checkpoint_wrapped_module`.
FSDP2 and hp_fsdp change a module's class only and put nothing in.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_PRIVATE_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that this one is put around, None where it is no wrapper."""
    children = dict(module.named_children())
    if len(children) != 1 or _holds_parameters(module):
        return None
    [(name, child)] = children.items()
    parallel = isinstance(module, DistributedDataParallel | DataParallel)
    return child if name in _PRIVATE_NAMES or (parallel and name == "module") else None


def bare(module: nn.Module) -> nn.Module:
    """What is inside all wrappers."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def named_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Every module once, in PyTorch's order: name without wrappers, PyTorch's name, module.

    A wrapper has the name of what it wraps.
    """
    yield from _below("", "", model, set())


def _below(
    path: str, torch_path: str, module: nn.Module, seen: set[nn.Module]
) -> Iterator[tuple[str, str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, torch_path, module
    inner = wrapped(module)
    for name, child in module.named_children():
        below = path if child is inner else _join(path, name)
        yield from _below(below, _join(torch_path, name), child, seen)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Every parameter once, in PyTorch's order: name without wrappers, PyTorch's name, itself."""
    seen: set[Tensor] = set()
    for path, torch_path, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield _join(path, name), _join(torch_path, name), parameter


def top_paths(model: nn.Module) -> set[str]:
    """Names of the modules whose children are a model's own: the model and those around it.

    A user's module that only adds a loss or a metric is around a model too: all parameters are in
    one child.
    """
    path, found = "", {""}
    while True:
        model = bare(model)
        holders = [(n, c) for n, c in model.named_children() if any(True for _ in c.parameters())]
        if len(holders) != 1 or _holds_parameters(model) or isinstance(model, _CONTAINERS):
            return found
        [(name, model)] = holders
        path = _join(path, name)
        found.add(path)


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
