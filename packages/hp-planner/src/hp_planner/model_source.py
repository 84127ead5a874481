"""MODEL on a command line: what a name stands for, and the model it makes on the meta device.

The one place that turns a model type, a class name, a config file or a Python factory into a
model, and `tp=2,dp_shard=4` into a mesh; `hp-plan` and `hp-train` both use it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

# What models read from a config although its class does not declare it.
UNDECLARED = ("head_dim",)
FACTORY = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


class UsageError(Exception):
    """The command line names something that does not exist or is not well formed. One line."""


def parse_mesh(text: str, known: Sequence[str] = ()) -> dict[str, int]:
    """`tp=2,dp_shard=2` as a mapping, in the order given.

    Args:
        known: the axes that may be named; empty allows any.

    Raises:
        UsageError: an entry is not `name=size`, or an axis is unknown or repeated.
    """
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        name, separator, size = (part.strip() for part in entry.partition("="))
        if known and name not in known:
            raise UsageError(f"--mesh {text}: unknown axis {name!r}, known are {', '.join(known)}")
        if not (name and separator and size.isdecimal() and int(size) > 0):
            raise UsageError(
                f"--mesh {text}: axis {name or entry!r} needs a size of at least 1; expected "
                "name=size entries such as tp=2"
            )
        if name in mesh:
            raise UsageError(f"--mesh {text}: axis {name} is given twice")
        mesh[name] = int(size)
    return mesh


def read_settings(entries: Sequence[str]) -> dict[str, Any]:
    """`name=value` entries; values are JSON where they can be, text otherwise.

    Raises:
        UsageError: an entry is not `name=value`.
    """
    settings: dict[str, Any] = {}
    for entry in entries:
        name, separator, text = entry.partition("=")
        if not (name and separator):
            raise UsageError(f"--set: expected NAME=VALUE, found {entry!r}")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return settings


def build_model(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """A model on the meta device, with random nothing in it.

    Args:
        name: path of a config JSON file, a model type (`qwen3_moe`), the class name of a model or
            config of transformers (`LlamaForCausalLM`), or a Python factory (`package.module:fn`)
            that returns a module, looked for in the current folder first.
        settings: config values that replace the ones found there; a factory's keyword arguments.

    Raises:
        UsageError: there is no such model, file, factory or config value.
    """
    factory = FACTORY.fullmatch(name)
    if factory:
        return _from_factory(name, factory[1], factory[2], settings)
    transformers = _transformers()
    values = config_values(name)
    kind = values.pop("model_type", None) or model_type(name)
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(f"transformers {transformers.__version__} has no model type {kind!r}")
    if transformers.CONFIG_MAPPING[kind] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{kind} is no causal language model of transformers")
    default = transformers.CONFIG_MAPPING[kind]()
    # A config answers to names of other families, too (`attribute_map`).
    unknown = [key for key in settings if not hasattr(default, key) and key not in UNDECLARED]
    if unknown:
        raise UsageError(f"--set: the config of {kind} has no {', '.join(unknown)}")
    try:
        config = transformers.AutoConfig.for_model(kind, **{**values, **settings})
        with torch.device("meta"):
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
            return made
    except Exception as error:
        # transformers reports a bad config by many exception types.
        raise UsageError(f"{kind} cannot be built with these values: {_first(error)}") from error


def _from_factory(name: str, module: str, attribute: str, settings: Mapping[str, Any]) -> nn.Module:
    _search_current_folder()
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name}: cannot be imported: {_first(error)}") from error
    try:
        with torch.device("meta"):
            made = factory(**settings)
    except Exception as error:
        raise UsageError(f"{name}({', '.join(settings)}) failed: {_first(error)}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"{name} returned a {type(made).__name__}, not a torch.nn.Module")
    return made


def _search_current_folder() -> None:
    """Puts the current folder first in `sys.path`, where `python -m` has it and a script has not.

    It stays there, as with `python -m`: a factory's module may import a neighbour when it is used.
    """
    here = os.getcwd()
    if not (sys.flags.safe_path or here in sys.path or "" in sys.path):
        sys.path.insert(0, here)


def config_values(name: str | Path) -> dict[str, Any]:
    """The values of a config JSON file of transformers; none where `name` is no file.

    Raises:
        UsageError: the file cannot be read or is not such a config.
    """
    path = Path(name)
    if not (path.suffix == ".json" or path.is_file()):
        return {}
    values = read_json(path)
    if "model_type" not in values:
        raise UsageError(f"{name} is not a config of transformers: it has no model_type")
    return {key: value for key, value in values.items() if key != "transformers_version"}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def model_type(name: str) -> str:
    """A model type as it is; the type of a model class or config class of transformers.

    Raises:
        UsageError: transformers is missing, or has no model of this name; the nearest are told.
    """
    transformers = _transformers()
    if name in transformers.CONFIG_MAPPING:
        return name
    found = getattr(transformers, name, None) if name.isidentifier() else None
    config_class = getattr(found, "config_class", found)
    kind = getattr(config_class, "model_type", "")
    if isinstance(kind, str) and kind:
        return kind
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    # Several model types can share one class, which is to be told once.
    near = get_close_matches(name, sorted({*classes, *classes.values()}), n=3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise UsageError(
        f"{name!r} is neither a config file nor a model type or class of transformers "
        f"{transformers.__version__}{hint}"
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "building a model needs transformers; install hp-planner[models]"
        ) from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def _first(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
