"""`scripts/benchmark.py step` on a mesh of devices, in this process, with a tiny model."""

from __future__ import annotations

import benchmark_step
import device_time
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import throughput
from device_time import Event
from jax.sharding import NamedSharding
from step_bench import Bench

import checkpoints
from jaxspec import PromptLookup
from jaxspec.placement import spread
from jaxspec.sharding import make_mesh
from tests.jaxspec.models import random_model
from tests.scripts.step_rows import of

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="fewer than four devices")
CONFIG = shapes.config_of("tiny")


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)])
def test_a_random_model_is_made_on_its_shards(sizes):
    mesh = make_mesh(*sizes)
    whole = shapes.random_model(CONFIG, jnp.float32)
    model, expected = shapes.random_model(CONFIG, jnp.float32, mesh=mesh), spread(whole, mesh)
    assert model.config == CONFIG and model.mesh == mesh
    leaves = list(zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True))
    for leaf, other in leaves:
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (other.shape, other.dtype, other.sharding)
    device = mesh.devices[-1, -1]
    own = {
        name: sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for name, tree in (("all", model), ("embedding", model.embed_tokens))
    }
    assert shapes.weight_bytes(model) == own["all"] - own["embedding"]
    attention = model.layers[0].self_attn
    for leaf in (model.embed_tokens[...], attention.qkv_proj[...]):
        # In place: without other devices, and with no more memory than the part.
        program = shapes._random_program(leaf.sharding)
        compiled = program.lower(
            jax.random.key(0), shape=leaf.shape, dtype=leaf.dtype, std=1.0
        ).compile()
        part = leaf.addressable_shards[0].data.nbytes
        assert compiled.memory_analysis().output_size_in_bytes == part
        assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce"))


def test_the_loop_on_a_mesh_gives_the_texts_of_one_device():
    model = random_model(2, vocab_size=97)
    texts, places = [], []
    for mesh in (None, make_mesh(2, 2)):
        placed = model if mesh is None else spread(model, mesh)
        bench = Bench(placed, batch_size=3, capacity=128, length=40)
        program = bench.compile(PromptLookup(3), "xla")
        state = bench.start(program)
        for _ in range(2):
            state, _ = bench.run(program, state, 4)
        steps, gained = bench.progress(state)
        texts.append((np.asarray(state.tokens)[:3], np.asarray(state.length)[:3], steps, gained))
        places.append(jax.tree.map(lambda leaf: leaf.sharding, bench.request))
    for one, other in zip(*texts, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.asarray(state.tokens).shape[0] == 4 and int(state.length[3]) == 1
    assert all(isinstance(place, NamedSharding) for place in jax.tree.leaves(places[1]))


@pytest.mark.parametrize(
    "flags, mesh, num_texts, kv_heads",
    [
        (("--mesh", "data=2,model=2", "--batch", 3), {"data": 2, "model": 2}, 2, 1),
        (("--tp", 4), {"data": 1, "model": 4}, 1, 1),
        (("--dp", 2), {"data": 2, "model": 1}, 1, 2),
    ],
)
def test_steps_have_the_bytes_of_one_device(run_step, flags, mesh, num_texts, kv_heads):
    code, rows, out, err = run_step(*flags, "--kernels", "xla")
    assert (code, err) == (0, "")
    assert all(row["mesh"] == mesh for row in rows)
    (row,) = of(rows, "step")
    assert row["mean_accepted_length"] == 1 and row["steps"] == 4
    assert row["kv_bytes"] == 2 * 2 * kv_heads * 16 * 40 * 4 * num_texts
    # Head, norms, layers with their kv heads.
    shards = mesh["model"]
    rows_of_head = 320 // shards
    groups = 2 // max(shards // 2, 1)
    heads = kv_heads * 48 * 16 * ((groups + 2) + groups)
    norms = 2 * 48 + 2 * 16
    layer = heads + 3 * 48 * 96 // shards + norms
    assert row["weight_bytes"] == 4 * (rows_of_head * 48 + 48 + 2 * layer)
    assert row["gb_per_second"] == pytest.approx(row["weight_bytes"] / row["ms"] / 1e6, 1e-3)
    assert "of copy" in out


def test_everything_else_on_a_mesh(run_step, monkeypatch):
    settings = ({"temperature": 0.6, "top_k": 20},)
    monkeypatch.setattr(benchmark_step, "SAMPLING_SETTINGS", settings)
    flags = ("--no-step", "--sampling", "--auto", "--ttft", "--prompt-tokens", 150, "--compile")
    code, rows, out, err = run_step(*flags, "--tp", 2)
    assert (code, err) == (0, "")
    assert [row["rows"] for row in of(rows, "auto")] == [1, 4, 8]
    assert len(of(rows, "sampling")) == 1
    assert [row["program"] for row in of(rows, "compile")] == ["run_steps", "prefill"]
    (first,) = of(rows, "ttft")
    operations = 2 * (46080 // 2 * 149 + 48 * 160)
    assert first["products_ms"] == pytest.approx(operations / first["teraflops"] / 1e9, 1e-3)


def test_throughput_and_load(run_step, tmp_path):
    checkpoints.save(random_model(3, vocab_size=320, num_hidden_layers=1), tmp_path / "random")
    found = {}
    for flags in ((), ("--mesh", "data=2,model=2")):
        code, rows, out, err = run_step(
            "--no-step", "--throughput", 5, "--load", tmp_path / "random", *flags
        )
        assert (code, err) == (0, "")
        texts = of(rows, "throughput")
        assert [(row["drafter"], row["batch"]) for row in texts] == [
            ("none", 5), ("promptlookup", 5)
        ]  # fmt: skip
        for row in texts:
            assert row["num_tokens"] == 20 and row["seconds_min"] <= row["seconds"]
            assert row["tokens_per_second"] == pytest.approx(20 / row["seconds"], 1e-3)
            assert row["decode_seconds"] < row["seconds"] and row["mean_accepted_length"] >= 1
        assert rows[0]["measure"] == "load" and rows[0]["model"] == "random"
        found[bool(flags)] = rows[0]
        assert "tokens/s" in out and "peak of a device" in out
    if jax.default_backend() == "cpu":
        assert found[False]["share"] == 1 and 0.5 < found[True]["share"] < 0.6
    assert found[False]["model_bytes"] == found[True]["model_bytes"]


def test_the_peak_of_memory_where_the_platform_counts_it(monkeypatch, tmp_path):
    model = random_model(3, vocab_size=320, num_hidden_layers=1)
    checkpoints.save(model, tmp_path / "random")
    kind = type(jax.devices()[0])
    monkeypatch.setattr(kind, "memory_stats", lambda self: {"peak_bytes_in_use": 10 + self.id})
    row = throughput.measure_load(tmp_path / "random", jnp.float32, make_mesh(1, 2))
    assert row["peak_bytes_per_device"] == 11
    assert row["model_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def test_time_in_collectives(run_step, monkeypatch):
    found = []
    for device, wait in (("/device:GPU:0", 4.0), ("/device:GPU:1", 1.0)):
        for step in range(4):
            start = 20.0 * step
            found.append(Event("gemm", "dot", start, 6.0, device))
            found.append(Event("ncclDevKernel_AllReduce", "", start + 6, 2 + wait, device))
            found.append(Event("fusion", "all-gather-start.1", start + 14, 1.0, device))
    found.sort(key=lambda event: event.start_us)
    monkeypatch.setattr(device_time, "events", lambda folder: found)
    code, rows, out, err = run_step("--no-step", "--profile", "--tp", 2)
    assert (code, err) == (0, "")
    (profile,) = of(rows, "profile")
    # Those of the first device, and of the one that waits least.
    assert (profile["collective_us"], profile["collective_us_min"]) == (7, 4)
    assert profile["kernels_per_step"] == 3 and profile["busy_us"] == 13
    assert "collectives us" in out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--tp", "2", "--overhead"], "--overhead is of one device: leave out --mesh, --tp and"),
        (["--dp", "2", "--peers"], "--peers is of one device: leave out --mesh, --tp and --dp"),
        (["--mesh", "model=2,x=1"], "--mesh 'model=2,x=1': expected data=N,model=M, got 'x=1'"),
        (
            ["--tp", 3],
            "--shape tiny: num_attention_heads=4 is not a multiple of the mesh's",
        ),
        (["--part-of", "2", "--tp", "2"], "--part-of is of one device: leave out --mesh, --tp and"),
        (["--part-of", "3"], "num_attention_heads=4 is not a multiple of the mesh's model=3"),
        (["--throughput", "0"], "0 is not in the range x>=1"),
        (["--load", "nowhere"], "'nowhere' does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run_step, args, message):
    code, rows, out, err = run_step(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err
