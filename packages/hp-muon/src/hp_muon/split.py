"""Which parameters Muon takes: matrices by role, everything else to AdamW.

Decided from module types, names and global shapes, so a sharded model is split exactly as the
unsharded one, and a model under DistributedDataParallel or torch.compile as the bare one. The
count is logged, and no matrix on Muon is an error: a silent fallback to AdamW is how such mistakes
go unnoticed.
"""

from __future__ import annotations

import enum
import fnmatch
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from hp_dtensor import layout_of
from hp_muon.errors import MuonError
from hp_muon.wording import counted
from hp_muon.wrappers import bare, named_modules, named_parameters, top_paths

_logger = logging.getLogger("hp_muon")

HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_projection", "score", "classifier"})
TOP_LEVEL_HEAD_NAMES = frozenset({"head", "output", "decoder", "unembed"})
"""Names that mean a head only where the module is the model's direct child, wrappers aside."""
EXPERT_WORDS = ("expert", "moe", "mlp", "ffn", "feed_forward")
ELEMENTWISE_NAMES = frozenset({"A_log", "D", "dt_bias"})
"""Parameters of two dims that scale elementwise and are no linear maps (state-space models)."""

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class Role(enum.Enum):
    """Why a parameter goes where it goes."""

    MATRIX = "matrix"
    EXPERTS = "expert stack"
    ROUTER = "router"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    VECTOR = "bias or vector"
    ELEMENTWISE = "elementwise"
    CONVOLUTION = "convolution"
    OTHER = "more than two dims, no expert stack"


MUON_ROLES = frozenset({Role.MATRIX, Role.EXPERTS, Role.ROUTER})


@frozen
class Choice:
    """One parameter's role and destination."""

    name: str
    role: Role
    use_muon: bool


def split_parameters(
    model: nn.Module,
    *,
    lr: float = 2e-2,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    adamw_weight_decay: float | None = None,
    router: str = "muon",
    muon: Sequence[str] = (),
    adamw: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: named matrices, then named others with `use_muon=False`.

    Matrices of linear layers, stacks of expert matrices [experts, rows, cols] and, unless
    `router="adamw"`, routers go to Muon. Embeddings, output heads (tied ones too), norms, biases,
    vectors, convolutions and elementwise parameters go to AdamW. Shapes are global ones. Names are
    those of the bare model: what DistributedDataParallel, torch.compile and activation
    checkpointing put into them is left out.

    Args:
        lr, weight_decay: of the Muon group.
        adamw_lr, adamw_weight_decay: of the AdamW group; the decay is Muon's when omitted.
        router: "muon" or "adamw".
        muon, adamw: glob patterns of parameter names that override the roles; names with the
            wrappers' parts match too.

    Raises:
        MuonError: a pattern matches nothing or both lists match a parameter, a parameter without
            matrices is forced onto Muon, or nothing is left for Muon.
    """
    if router not in ("muon", "adamw"):
        raise MuonError(f"router must be 'muon' or 'adamw', found {router!r}")
    parameters = {name: parameter for name, _, parameter in named_parameters(model)}
    choices = choose(model, router=router, muon=muon, adamw=adamw)
    on_muon = [choice.name for choice in choices if choice.use_muon]
    others = [choice.name for choice in choices if not choice.use_muon]
    if not on_muon:
        raise MuonError(
            f"{type(bare(model)).__name__} has {counted(len(choices), 'parameter')} and none is a "
            f"matrix for Muon; roles: {_counts(choices)}. Use torch.optim.AdamW, or name matrices "
            "in muon=[...]"
        )
    _logger.info(
        "Muon steps %s, AdamW %d: %s",
        counted(len(on_muon), "parameter"),
        len(others),
        _counts(choices),
    )
    groups: list[dict[str, Any]] = [
        {
            "params": [(name, parameters[name]) for name in on_muon],
            "lr": lr,
            "weight_decay": weight_decay,
            "use_muon": True,
        }
    ]
    if others:
        decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        groups.append(
            {
                "params": [(name, parameters[name]) for name in others],
                "lr": adamw_lr,
                "weight_decay": decay,
                "use_muon": False,
            }
        )
    return groups


def choose(
    model: nn.Module, *, router: str = "muon", muon: Sequence[str] = (), adamw: Sequence[str] = ()
) -> list[Choice]:
    """The role and destination of every parameter, in the model's order."""
    roles = dict(_roles(model))
    known = list(named_parameters(model))
    shapes = {name: global_shape(p) for name, _, p in known}
    names = {name: {name, torch_name} for name, torch_name, _ in known}
    forced = {True: _matching(muon, names, "muon"), False: _matching(adamw, names, "adamw")}
    both = sorted(forced[True] & forced[False])
    if both:
        raise MuonError(f"parameters {both} are named in both muon and adamw; keep one")
    choices = []
    for name, role in roles.items():
        use_muon = role in MUON_ROLES and not (role is Role.ROUTER and router == "adamw")
        if name in forced[True]:
            if len(shapes[name]) < 2:
                raise MuonError(
                    f"parameter {name!r} of shape {shapes[name]} is named in muon but holds no "
                    "matrix"
                )
            use_muon = True
        if name in forced[False]:
            use_muon = False
        choices.append(Choice(name, role, use_muon))
    return choices


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, of which this rank may hold a part."""
    layout = layout_of(parameter)
    return tuple(parameter.shape) if layout is None else layout.shape


def _roles(model: nn.Module) -> Iterator[tuple[str, Role]]:
    by_module = {id(p): r for m in model.modules() for p, r in _by_module_type(m)}
    heads = _head_parameters(model)
    for name, _, parameter in named_parameters(model):
        known = by_module.get(id(parameter))
        if known is None and id(parameter) in heads:
            known = Role.HEAD
        yield name, known or _by_name_and_shape(name, global_shape(parameter))


def _by_module_type(module: nn.Module) -> Iterator[tuple[Tensor, Role]]:
    """Roles that a module's type decides, for its own parameters.

    A head tied to an embedding is met in both modules; only the embedding's type says anything.
    """
    kind = type(module).__name__.lower()
    role = None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        role = Role.EMBEDDING
    elif isinstance(module, _CONVOLUTIONS):
        role = Role.CONVOLUTION
    elif "norm" in kind and not any(True for _ in module.children()):
        role = Role.NORM
    if role is not None:
        for parameter in module.parameters(recurse=False):
            one_dim = role is Role.CONVOLUTION and len(global_shape(parameter)) < 2
            yield parameter, Role.VECTOR if one_dim else role


def _head_parameters(model: nn.Module) -> set[int]:
    """Weights of output heads: what a module says, and modules that are named as heads are."""
    heads: set[int] = set()
    tops = top_paths(model)
    for path, _, module in named_modules(model):
        heads |= {id(p) for head in _output_embeddings(module) for p in _own_weights(head)}
        above, _, name = path.rpartition(".")
        named = name in HEAD_NAMES or (name in TOP_LEVEL_HEAD_NAMES and above in tops)
        if named and not any(True for _ in module.children()):
            heads |= {id(p) for p in _own_weights(module)}
    return heads


def _output_embeddings(module: nn.Module) -> list[nn.Module]:
    """The heads that a module of transformers' interface names, without wrappers."""
    getter = getattr(module, "get_output_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except NotImplementedError:  # how a model says that it does not know
        return []
    if not isinstance(found, nn.Module):
        return []
    inner = bare(found)
    return [bare(m) for m in inner] if isinstance(inner, nn.ModuleList) else [inner]


def _own_weights(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters(recurse=False) if len(global_shape(p)) >= 2]


def _by_name_and_shape(name: str, shape: tuple[int, ...]) -> Role:
    path = name.lower().split(".")
    if len(shape) < 2:
        return Role.NORM if any("norm" in part for part in path[-2:]) else Role.VECTOR
    if name.rsplit(".", 1)[-1] in ELEMENTWISE_NAMES:
        return Role.ELEMENTWISE
    if len(shape) == 2:
        if "bias" in path[-1] and any("expert" in part for part in path):
            return Role.VECTOR
        return Role.ROUTER if _is_router(path) else Role.MATRIX
    stacked = any(word in part for part in path for word in EXPERT_WORDS)
    if len(shape) == 3 and stacked and 1 not in shape[1:]:
        return Role.EXPERTS
    return Role.OTHER


def _is_router(path: Sequence[str]) -> bool:
    """`...mlp.gate.weight` and `...router.weight`; not gate_proj nor shared_expert_gate."""
    return path[-1] == "weight" and any(part in ("gate", "router") for part in path[-3:-1])


def _matching(patterns: Sequence[str], names: Mapping[str, set[str]], argument: str) -> set[str]:
    """The parameters, by name without wrappers, of which any of the names matches."""
    found = set()
    for pattern in patterns:
        matched = {name for name, known in names.items() if fnmatch.filter(known, pattern)}
        if not matched:
            raise MuonError(f"{argument}: pattern {pattern!r} matches no parameter of the model")
        found |= matched
    return found


def _counts(choices: Sequence[Choice]) -> str:
    counts = Counter((choice.use_muon, choice.role.value) for choice in choices)
    parts = [
        f"{'Muon' if use_muon else 'AdamW'} {number} {role}"
        for (use_muon, role), number in sorted(counts.items(), key=lambda item: (-item[0][0], item))
    ]
    return ", ".join(parts)
