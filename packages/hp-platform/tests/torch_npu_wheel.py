"""What a torch_npu wheel offers, read from its files; nothing of it is installed or run.

As a program, downloads the wheels of the given versions and writes what the contract test
compares with, one JSON file a version, beside this file:

    python packages/hp-platform/tests/torch_npu_wheel.py 2.13.0 2.14.0
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "hp-platform-wheels"
HEADER = "torch_npu/include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
KEY = re.compile(rb"\x00((?:hccl|qos)_[a-z_]+|group_name)(?=\x00)")


def download(version: str) -> Path:
    """The wheel's path; downloaded once, never installed.

    Raises:
        ConnectionError: the package index cannot be reached or does not have it.
    """
    found = sorted(CACHE.glob(f"torch_npu-{version}-*.whl"))
    if found:
        return found[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet",
        "--no-deps", "--only-binary", ":all:", "--python-version", "311",
        "--platform", "manylinux_2_28_x86_64", "--dest", str(CACHE), f"torch_npu=={version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = sorted(CACHE.glob(f"torch_npu-{version}-*.whl"))
    if done.returncode or not found:
        raise ConnectionError(done.stderr.strip().splitlines()[-1:] or "no wheel")
    return found[0]


class Wheel:
    """The sources and symbols of one wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())
        self.version = path.name.split("-")[1]

    def text(self, name: str) -> str:
        return self._zip.read(name).decode("utf-8")

    def tree(self, module: str) -> tuple[ast.Module, str]:
        """The parsed source of a module, and the package that its relative imports start from."""
        path = module.replace(".", "/")
        if f"{path}/__init__.py" in self._names:
            return ast.parse(self.text(f"{path}/__init__.py")), module
        return ast.parse(self.text(f"{path}.py")), module.rpartition(".")[0]

    def find(self, module: str, name: str) -> ast.AST | None:
        """The definition that `module.name` leads to, through imports and stars."""
        tree, package = self.tree(module)
        for node in tree.body:
            defines = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
            if defines:
                return node
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            target = f"{package}.{node.module}" if node.level else node.module
            if not target.startswith("torch_npu"):
                continue
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    found = self.find(target, name if alias.name == "*" else alias.name)
                    if found is not None:
                        return found
        return None

    def public(self, module: str) -> list[str]:
        """The module's `__all__`."""
        for node in self.tree(module)[0].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return ast.literal_eval(node.value)
        return []

    def calls(self, module: str) -> list[str]:
        """Every call in the module's source, as text."""
        return [
            ast.unparse(node)
            for node in ast.walk(self.tree(module)[0])
            if isinstance(node, ast.Call)
        ]

    def extract(self) -> dict:
        """All that the contract needs, as plain data."""
        npu = "torch_npu.npu"
        functions, classes = {}, {}
        for name in self.public(npu):
            found = self.find(npu, name)
            if isinstance(found, ast.FunctionDef):
                functions[name] = parameters(found)
            elif isinstance(found, ast.ClassDef):
                classes[name] = {
                    node.name: parameters(node, skip=1)
                    for node in found.body
                    if isinstance(node, ast.FunctionDef)
                    and (not node.name.startswith("_") or node.name == "__new__")
                }
        header = self.text(HEADER)
        options = header[header.index("struct Options") :]
        options = options[: options.index("\n  };")]
        metadata = self.text(next(n for n in self._names if n.endswith(".dist-info/METADATA")))
        return {
            "version": self.version,
            "requires": sorted(re.findall(r"(?m)^Requires-Dist: (torch\b.*)$", metadata)),
            "functions": functions,
            "classes": classes,
            "backend registrations": [
                call for call in self.calls("torch_npu._init.registry.backend")
                if "privateuse1" in call or "_register_device_module" in call
            ],
            "group registrations": [
                call for call in self.calls("torch_npu._init.registry.distributed")
                if "register_backend" in call
            ],
            "options class": sorted(
                {
                    text
                    for call in self.calls("torch_npu._init.registry.distributed")
                    for text in re.findall(r"torch_npu\._C\._distributed_c10d\.\w+\.Options", call)
                }
            ),
            "options fields": sorted(re.findall(r"(\w+);", options)),
            "configuration keys": sorted(
                {key.decode() for key in KEY.findall(self._zip.read(LIBRARY))}
            ),
            "group methods": sorted(
                set(re.findall(r"intrusive_ptr<c10d::Work> (\w+)\(", header))
            ),
            "replaced": self._replaced(),
        }  # fmt: skip

    def _replaced(self) -> dict[str, list]:
        """Functions of torch.distributed that torch_npu puts its own in place of."""
        found = {}
        tree, _ = self.tree("torch_npu._init.patches.distributed_patches")
        for node in ast.walk(tree):
            pair = isinstance(node, ast.Tuple) and len(node.elts) == 2
            if not pair or not all(isinstance(e, ast.Constant) for e in node.elts):
                continue
            target, source = (e.value for e in node.elts)
            if target.startswith("distributed.") and target.count(".") == 1:
                module, _, name = f"torch_npu.{source}".rpartition(".")
                definition = self.find(module, name)
                if isinstance(definition, ast.FunctionDef):
                    found[target.removeprefix("distributed.")] = parameters(definition)
        return found


def parameters(function: ast.FunctionDef, skip: int = 0) -> list[list]:
    """Name, kind and whether there is a default, of every parameter."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    first_default = len(positional) - len(spec.defaults)
    found = [
        [arg.arg, "positional", index >= first_default] for index, arg in enumerate(positional)
    ][skip:]
    if spec.vararg:
        found.append([spec.vararg.arg, "star", True])
    for arg, default in zip(spec.kwonlyargs, spec.kw_defaults):
        found.append([arg.arg, "keyword", default is not None])
    if spec.kwarg:
        found.append([spec.kwarg.arg, "double star", True])
    return found


def recorded(version: str) -> dict:
    """What has been written for the version."""
    return json.loads((Path(__file__).parent / f"torch_npu-{version}.json").read_text())


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        target = Path(__file__).parent / f"torch_npu-{wanted}.json"
        data = Wheel(download(wanted)).extract()
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
        target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(target)
