"""The packages install from wheels, each with only what it asks for."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [*sorted((ROOT / "packages").iterdir()), ROOT / "integration"]


def run(*command: str | Path) -> str:
    """Runs a command to its end and returns what it printed; its output is in the failure."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, package)
    return folder


def environment_with_torch(folder: Path) -> Path:
    """A virtual environment with this one's third-party packages and none of ours.

    Third-party packages are linked, not copied: torch alone would be hundreds of megabytes.
    numpy is left out: torch does not require it, so a package that uses it must say so.
    """
    venv.create(folder, with_pip=True)
    [target] = (folder / "lib").glob("python3*/site-packages")
    [source] = (Path(sys.prefix) / "lib").glob("python3*/site-packages")
    for entry in source.iterdir():
        ours = "hp_" in entry.name.replace("-", "_")  # an editable install's .pth included
        if not ours and not entry.name.startswith("numpy") and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def muon_only(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment into which `pip install hp-muon` was run, offline."""
    python = environment_with_torch(tmp_path_factory.mktemp("environment"))
    run(python, "-m", "pip", "install", "--no-index", "--find-links", wheels, "hp-muon")
    return python


def test_every_package_builds_a_wheel_with_its_type_marker(wheels: Path) -> None:
    import zipfile

    names = {path.name.split("-")[0] for path in wheels.glob("*.whl")}
    assert names == {p.name.replace("-", "_") for p in PACKAGES[:-1]} | {"hp_integration"}
    for path in wheels.glob("*.whl"):
        package = path.name.split("-")[0]
        assert f"{package}/py.typed" in zipfile.ZipFile(path).namelist()


def test_installing_hp_muon_pulls_only_platform_and_dtensor_of_ours(muon_only: Path) -> None:
    listed = json.loads(run(muon_only, "-m", "pip", "list", "--format", "json"))
    ours = {entry["name"].replace("_", "-") for entry in listed if entry["name"].startswith("hp")}
    assert ours == {"hp-muon", "hp-dtensor", "hp-platform"}


def test_import_of_hp_muon_loads_no_operator_rules_planner_or_fsdp(muon_only: Path) -> None:
    code = (
        "import json, sys, hp_muon; hp_muon.Muon;"
        "print(json.dumps([m for m in sys.modules if m.startswith('hp_')]))"
    )
    loaded = json.loads(run(muon_only, "-c", code))
    unwanted = ("hp_dtensor.rules", "hp_dtensor.dispatch", "hp_planner", "hp_fsdp")
    assert [module for module in loaded if module.startswith(unwanted)] == []


def test_hp_muon_steps_a_plain_model_in_an_environment_without_the_rest(muon_only: Path) -> None:
    code = (
        "import torch, hp_muon; m = torch.nn.Linear(4, 3);"
        "opt = hp_muon.Muon(hp_muon.split_parameters(m, lr=0.1, adamw_lr=0.01));"
        "before = m.weight.detach().clone(); m(torch.ones(2, 4)).sum().backward(); opt.step();"
        "print(bool((m.weight != before).all()))"
    )
    assert run(muon_only, "-c", code).strip().splitlines()[-1] == "True"


def test_hp_muon_steps_on_two_ranks_in_an_environment_without_the_rest(
    muon_only: Path, tmp_path: Path
) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(
        "import torch, hp_muon\n"
        "from hp_platform.testing import run_ranks\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "def body():\n"
        "    model = torch.nn.Linear(4, 3)\n"
        "    fully_shard(model, mesh=init_device_mesh('cpu', (2,)))\n"
        "    opt = hp_muon.Muon(hp_muon.split_parameters(model, lr=0.1, adamw_lr=0.01))\n"
        "    before = model.weight.full_tensor().clone()\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    opt.step()\n"
        "    return bool((model.weight.full_tensor() != before).all())\n"
        "print(run_ranks(body, 2))\n"
    )
    assert run(muon_only, script).strip().splitlines()[-1] == "[True, True]"


def test_published_metadata_asks_for_a_range_of_torch(wheels: Path) -> None:
    import zipfile

    for path in wheels.glob("*.whl"):
        archive = zipfile.ZipFile(path)
        [metadata] = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        [torch_line] = [line for line in lines if line.startswith("Requires-Dist: torch<")]
        assert ">=" in torch_line, f"{path.name}: {torch_line}"
        assert "==" not in torch_line, f"{path.name}: {torch_line}"
