"""The package stays small: three dependencies, and Triton only where a kernel lives."""

import ast
from pathlib import Path

import pytest

import pallas_kernels

PACKAGE = Path(pallas_kernels.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {"jax", "numpy", "jaxtyping", "pallas_kernels"}
STANDARD = {"collections", "dataclasses", "functools", "importlib", "typing"}


def imported_modules(path):
    """List the dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path):
    modules = list(imported_modules(path))
    assert {name.split(".")[0] for name in modules} <= ALLOWED | STANDARD
    if path.name != "triton.py":
        assert not [name for name in modules if "pallas" in name.removeprefix("pallas_kernels")]


def test_public_names():
    names = [
        "PreNorm",
        "argmax",
        "argmax_partial",
        "argmax_reduce",
        "block_attention",
        "find_ngram",
        "insert_ngrams",
        "linear_residual",
        "lookup_ngrams",
        "pre_norm",
        "rms_linear",
        "rms_swiglu",
        "top_threshold",
        "verify_greedy",
        "write_rows",
    ]
    assert pallas_kernels.__all__ == names
