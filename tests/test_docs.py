"""The documents point at what exists, and every package ships what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = [*sorted((ROOT / "packages").iterdir()), ROOT / "integration"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_in_a_document_exists(document: Path) -> None:
    text = document.read_text()
    named = set(re.findall(r"`([\w./-]+/[\w./-]+\.(?:py|md|toml))`", text))
    linked = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    linked = {target for target in linked if target and "://" not in target}
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    missing += [path for path in sorted(linked) if not (document.parent / path).exists()]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_has_readme_changelog_and_type_marker(package: Path) -> None:
    name = package.name.replace("-", "_")
    module = "hp_integration" if package.name == "integration" else name
    for file in ("README.md", "CHANGELOG.md", "pyproject.toml", f"src/{module}/py.typed"):
        assert (package / file).exists(), f"{package.name} lacks {file}"
    version = re.search(r'^version = "(.+)"$', (package / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert f"## {version[1]}" in (package / "CHANGELOG.md").read_text()


def test_the_dictionary_of_internal_interfaces_names_every_package() -> None:
    text = (ROOT / "docs" / "interfaces.md").read_text()
    for package in PACKAGES[:-1]:
        assert f"## {package.name.replace('-', '_')}" in text
