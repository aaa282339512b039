"""`scripts/benchmark.py step` as its users call it, in this process, with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import benchmark_step
import device_time
import jax
import jax.numpy as jnp
import peers
import pytest
import shapes
import step_measures
from device_time import Event
from step_bench import Bench

from jaxspec import NoDraft, PromptLookup
from tests.scripts.step_rows import of

COMMON = {
    "measure", "shape", "batch", "capacity", "length", "dtype", "weight_bytes", "kv_bytes", "rows",
    "kernels", "drafter", "mesh", "part_of", "device", "jax", "command",
}  # fmt: skip
TIMES = {"ms", "ms_min", "ms_max", "steps", "runs", "mean_accepted_length"}


@pytest.fixture(scope="module")
def model():
    return shapes.random_model(shapes.config_of("tiny"), jnp.float32)


def test_steps_by_width_and_kernels(run_step, tmp_path):
    file = tmp_path / "rows.jsonl"
    code, rows, out, err = run_step("--rows", "1,3", "--kernels", "xla", "--out", file)
    assert (code, err) == (0, "")
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["measure"] for row in rows[:3]] == ["copy_rate", "read_rate", "model"]
    steps = of(rows, "step")
    assert [(row["rows"], row["kernels"]) for row in steps] == [
        (1, "xla"), (3, "xla")
    ]  # fmt: skip
    rates = {row["measure"]: row["gb_per_second"] for row in rows[:2]}
    for row in steps:
        assert set(row) == COMMON | TIMES | {
            "call_ms", "ms_less_call", "lower_seconds", "compile_seconds", "gb_per_second",
            "gb_per_second_with_kv", "share_of_copy", "share_of_copy_with_kv", "share_of_read",
            "share_of_read_with_kv",
        }  # fmt: skip
        assert row["steps"] == 4 and row["runs"] == 2 and row["mean_accepted_length"] == 1
        assert row["mesh"] is None
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["gb_per_second"] == pytest.approx(row["weight_bytes"] / row["ms"] / 1e6, 1e-3)
        share = row["gb_per_second"] / rates["copy_rate"]
        assert row["share_of_copy"] == pytest.approx(share, 1e-3)
        assert row["kv_bytes"] == 2 * 2 * 2 * 16 * 40 * 4
    assert "of copy" in out and "failed" not in out


def test_everything_else(run_step):
    flags = ("--no-step", "--overhead", "--ttft", "--prompt-tokens", 150, "--batch", 2)
    code, rows, out, err = run_step(*flags, "--time-limit", 1000)
    assert (code, err) == (0, "")
    overhead = of(rows, "overhead")
    assert [(row["drafter"], row["rows"]) for row in overhead] == [
        ("promptlookup", 8), ("lookahead", 56)
    ]  # fmt: skip
    for row in overhead:
        assert set(row) == COMMON | TIMES | {
            "forward_ms", "forward_ms_min", "forward_ms_max", "overhead_us", "overhead_us_min",
            "overhead_us_max",
        }  # fmt: skip
        expected = (row["ms"] - row["forward_ms"]) * 1e3
        assert row["overhead_us"] == pytest.approx(expected, rel=1e-3, abs=0.1)
    (first,) = of(rows, "ttft")
    assert first["prompt_tokens"] == 150 and first["capacity"] == 512 and first["chunk_size"] > 0
    # 46080 weights in the layers' products, 48 x 320 in the head.
    operations = 2 * (46080 * 149 + 48 * 320)
    assert first["products_ms"] == pytest.approx(operations / first["teraflops"] / 1e9, 1e-3)
    assert first["ratio"] == pytest.approx(first["ms"] / first["products_ms"], 1e-3)
    assert not of(rows, "step") and "overhead us" in out


def test_what_sampling_adds_and_what_auto_chooses_among(run_step, monkeypatch):
    settings = ({"temperature": 0.6, "top_k": 20}, {"num_logprobs": 5})
    monkeypatch.setattr(benchmark_step, "SAMPLING_SETTINGS", settings)
    code, rows, out, err = run_step("--no-step", "--sampling", "--auto")
    assert (code, err) == (0, "")
    added, arms = of(rows, "sampling"), of(rows, "auto")
    assert [(row["settings"], row["rows"]) for row in added] == [
        ("temperature 0.6 top_k 20", 8), ("num_logprobs 5", 8)
    ]  # fmt: skip
    assert [row["rows"] for row in arms] == [1, 4, 8]
    for row in added + arms:
        assert row["ratio"] == pytest.approx(row["ms"] / row["plain_ms"], 1e-3)
        assert row["added_us_min"] <= row["added_us"] <= row["added_us_max"]
    assert "added us" in out


def test_cold_compilation_and_the_profile(run_step, monkeypatch):
    found = [Event("gemm", "dot", 10.0 * i, 6.0) for i in range(8)]
    found += [Event("copy", "", 10.0 * i + 5, 2.0) for i in range(8)]
    found.sort(key=lambda event: event.start_us)
    monkeypatch.setattr(device_time, "events", lambda folder: found)
    code, rows, out, err = run_step("--no-step", "--compile", "--profile")
    assert (code, err) == (0, "")
    compiled = of(rows, "compile")
    assert [row["program"] for row in compiled] == ["run_steps", "prefill"]
    assert all(row["compile_seconds"] > 0 and row["lower_seconds"] > 0 for row in compiled)
    (profile,) = of(rows, "profile")
    # Four steps of two kernels each; copies overlap by 1 us, and 3 us pass before the next kernel.
    assert profile["wall_us"] == 77 / 4 and profile["busy_us"] == 56 / 4
    assert profile["gap_us"] == 21 / 4 and profile["kernels_per_step"] == 4
    gemm, copy = profile["kernel_rows"]
    assert (gemm["kernel"], gemm["op"], gemm["count"]) == ("gemm", "dot", 2)
    assert (gemm["us_each"], gemm["us_per_step"], gemm["gap_us_per_step"]) == (6, 12, 0)
    assert (copy["us_each"], copy["us_per_step"], copy["gap_us_per_step"]) == (2, 4, 21 / 4)
    assert "us a step" in out


def test_a_measurement_that_fails_leaves_the_others(run_step, monkeypatch):
    monkeypatch.setattr(device_time, "events", lambda folder: [])
    code, rows, out, err = run_step("--profile", "--kernels", "triton,xla")
    assert code == 1
    errors = [row for row in rows if "error" in row]
    if jax.default_backend() == "cpu":
        assert [(row["measure"], row["kernels"]) for row in errors] == [
            ("compile", "triton"), ("profile", "xla")
        ]  # fmt: skip
    assert errors[-1]["error"] == "RuntimeError: the profiler saw no kernel of a GPU"
    assert err.count("\n") == len(errors) and out.count("failed:") == len(errors)
    assert of(rows, "step")[-1]["kernels"] == "xla"


def test_a_time_limit_stops_with_what_there_is(run_step):
    code, rows, out, err = run_step("--time-limit", 1e-9)
    assert (code, rows, err) == (0, [], "")
    assert "PARTIAL: the time limit left 3 measurements out" in out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--shape", "9b"], "'9b' is not one of '0.6b', '1.7b'"),
        (["--rows", "1,x"], "'--rows': expected integers of at least 1 with commas between, got "
                            "'x' in '1,x'"),
        (["--rows", "0"], "got '0' in '0'"),
        (["--kernels", "cuda"], "expected some of default, triton, interpret, xla with commas "
                                "between, got 'cuda'"),
        (["--length", "126"], "--length 126 and --steps 4: expected at most --capacity 128 "
                              "together, got 130"),
        (["--out", "missing/rows.jsonl"], "expected a file in a folder to write to, got 'missing"),
        (["--steps", "0"], "0 is not in the range x>=1"),
        (["--time-limit", "0"], "0.0 is not in the range x>0"),
        (["--dtype", "int8"], "'int8' is not one of"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(run_step, args, message):
    code, rows, out, err = run_step(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_peers_without_torch(run_step, monkeypatch):
    monkeypatch.setattr(benchmark_step.importlib.util, "find_spec", lambda name: None)
    code, _, out, err = run_step("--peers")
    assert (code, out) == (2, "")
    assert err == "error: --peers needs torch, which is not installed\n"


def test_rows_of_peers(run_step, monkeypatch):
    row = {"peer": "generate", "ms": 2.0, "ms_min": 1.0, "ms_max": 3.0, "gb_per_second": 1.0}
    bad = {"peer": "lookup", "error": "no"}
    monkeypatch.setattr(benchmark_step.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(peers, "run_apart", lambda label, limit: iter([row, bad]))
    # JAX must hear of it before it starts, which making a mesh does.
    name, make_mesh, seen = "XLA_PYTHON_CLIENT_PREALLOCATE", benchmark_step.meshes.make_mesh, []
    monkeypatch.setenv(name, "true")
    monkeypatch.delenv(name)
    monkeypatch.setattr(
        benchmark_step.meshes,
        "make_mesh",
        lambda flags: seen.append(os.environ.get(name)) or make_mesh(flags),
    )
    code, rows, out, err = run_step("--peers", "--no-step")
    assert seen == ["false"]
    assert code == 1 and err == "peer tiny lookup: no\n"
    assert [entry["peer"] for entry in of(rows, "peer")] == ["generate", "lookup"]
    assert "generate" in out and "failed: peer tiny lookup: no" in out


def test_a_process_of_peers_is_stopped(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sleep")
    monkeypatch.setattr(peers, "__file__", "30")
    monkeypatch.setattr(peers.json, "dumps", lambda label: "30")
    assert list(peers.run_apart({}, 0.05)) == [{"peer": "process", "error": "time limit"}]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_peers(run_step, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    code, rows, _, _ = run_step("--peers", "--no-step")
    found = of(rows, "peer")
    assert code == 0 and len(found) == 5
    assert [row.get("rows") for row in found] == [None, 1, None, None, 8]
    assert all(row["ms"] > 0 and row["weight_bytes"] == 246976 for row in found[1:])


def test_the_published_sizes():
    # Bytes of weights in bfloat16, from the parameter counts of the released files.
    published = {
        "0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360,
        "14b": 14_768_307_200, "32b": 32_762_123_264,
    }  # fmt: skip
    for shape, count in published.items():
        c = shapes.config_of(shape)
        width, heads = c.hidden_size, c.num_attention_heads + c.num_key_value_heads
        layer = 2 * width * heads * c.head_dim + 3 * width * c.intermediate_size
        layer += 2 * width + 2 * c.head_dim
        tables = c.vocab_size * width * (1 if c.tie_word_embeddings else 2)
        assert c.num_hidden_layers * layer + tables + width == count


def test_the_bytes_of_a_model(model):
    config = shapes.config_of("tiny")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert shapes.weight_bytes(model) == 4 * (parameters - 320 * 48)
    # 46080 weights in the layers' products, 48 x 320 in the head.
    assert shapes.product_operations(model, 150) == 2 * (46080 * 149 + 48 * 320)
    assert shapes.key_value_bytes(config, 40, 2) == 2 * 2 * 2 * 16 * 40 * 2


def test_the_forward_stays_in_the_loop(model):
    bench = Bench(model, batch_size=1, capacity=128, length=40)
    layout = PromptLookup(7).layout
    state = bench.start(bench.compile(NoDraft(), "xla"))
    arguments = (model, state.cache, jnp.zeros((1, 8), jnp.int32), jnp.full((1,), 39, jnp.int32))
    lowered = step_measures.forward_loop.lower(
        *arguments, jnp.float32(1), jnp.int32(4), layout=layout, kernels="xla"
    )
    text = lowered.compile().as_text()
    entry = text[text.index("\nENTRY") :]
    # No product in the entry: they are in what the loop calls.
    assert " while(" in entry and " dot(" not in entry and "gemm" not in entry
    result = step_measures.forward_loop(
        *arguments, jnp.float32(1), jnp.int32(3), layout=layout, kernels="xla"
    )
    block, cached = arguments[2], arguments[3] + 2
    expected = step_measures.call_model(model, block, cached, state.cache, layout, "xla")
    assert jnp.allclose(result, expected, atol=1e-5)


def test_one_devices_part_of_a_model(run_step):
    """A part has its heads, columns and ids, and reads that many bytes."""
    code, rows, out, err = run_step("--rows", "1", "--part-of", "1,4")
    assert (code, err) == (0, "")
    whole, part = of(rows, "step")
    assert (whole["part_of"], part["part_of"]) == (1, 4)
    # Two kv heads on four devices: each is held by two.
    layer = 48 * (1 + 2) * 16 + 16 * 48 + 3 * 48 * 24 + 2 * 48 + 2 * 16
    assert part["weight_bytes"] == 4 * (2 * layer + 80 * 48 + 48)
    assert part["kv_bytes"] * 2 == whole["kv_bytes"]
    assert "part of" in out
