"""The kernel benchmark runs anywhere in its smoke mode."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

testing = pytest.importorskip("click.testing")
SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Load the script as a module."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # JAX read its own already
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_smoke(command, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["kernels", "--smoke", "--sweep", "--out", str(out)]
    result = testing.CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["op"] for row in rows} == {
        "device_copy",
        "launch_gap",
        "smallest_launch",
        "find_ngram",
        "argmax",
        "argmax_partial",
        "verify_greedy",
        "rms_linear",
        "rms_swiglu",
        "linear_residual",
        "block_attention",
        "write_rows",
        "insert_ngrams",
        "lookup_ngrams",
        "top_threshold",
    }
    assert all(row["jax"] == jax.__version__ for row in rows)
    assert "xla/kernel" in result.output


def test_without_a_gpu_the_full_run_is_refused(command, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    result = testing.CliRunner().invoke(command, ["kernels"])
    assert result.exit_code == 2
    assert "kernels need a GPU, not 'cpu'" in result.output
