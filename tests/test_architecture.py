"""Imports go one way: scripts -> checkpoints -> jaxspec -> pallas_kernels -> jax."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What each package may import of the project, and modules of jaxspec in the order of their data.
ALLOWED = {
    "scripts": {"checkpoints", "jaxspec", "pallas_kernels"},
    "checkpoints": {"checkpoints", "jaxspec"},
    "jaxspec": {"jaxspec", "pallas_kernels"},
    "pallas_kernels": {"pallas_kernels"},
}
PROJECT = set(ALLOWED)
ORDER = (
    "text",
    "config",
    "layout",
    "sharding",
    "cache",
    "model",
    "placement",
    "drafters",
    "sampling",
    "verify",
    "record",
    "state",
    "commit",
    "decode",
    "request",
    "result",
    "step_costs",
    "generation",
    "stats",
    "runner",
    "evaluation",
    "tuning",
)
SOURCES = [path for name in ALLOWED for path in sorted((ROOT / name).rglob("*.py"))]


def imports_of(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.append(node.module or "")
    return modules


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    for module in imports_of(path):
        top = module.split(".")[0]
        assert top not in PROJECT or top in ALLOWED[package], f"{path} imports {module}"
        if "pallas" in module and "triton" in module:
            assert path.name == "triton.py", f"{path} imports {module}"


def test_jaxspec_data_flows_one_way():
    for name in ORDER:
        path = ROOT / "jaxspec" / f"{name}.py"
        paths = [path] if path.exists() else sorted((ROOT / "jaxspec" / name).glob("*.py"))
        for path in paths:
            for module in imports_of(path):
                parts = module.split(".")
                if parts[0] == "jaxspec" and len(parts) > 1:
                    assert ORDER.index(parts[1]) <= ORDER.index(name), f"{path} imports {module}"


def test_drafters_know_neither_model_nor_cache_nor_verify():
    for path in (ROOT / "jaxspec" / "drafters").glob("*.py"):
        for module in imports_of(path):
            if module.split(".")[0] == "jaxspec":
                assert module.startswith(("jaxspec.drafters", "jaxspec.layout")), (
                    f"{path}: {module}"
                )


def test_every_module_of_jaxspec_has_its_place():
    names = {path.stem for path in (ROOT / "jaxspec").iterdir() if path.suffix in ("", ".py")}
    assert names - {"__init__", "__pycache__"} == set(ORDER)


def test_no_utils_module():
    assert not [path for path in SOURCES if path.stem in ("utils", "util", "misc")]


def test_the_package_list_is_complete():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = ("checkpoints", "jaxspec", "pallas_kernels")
    folders = [path.parent for name in names for path in (ROOT / name).rglob("__init__.py")]
    expected = sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
    assert sorted(project["tool"]["setuptools"]["packages"]) == expected
