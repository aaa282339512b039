"""Converted checkpoints: every byte both ways, in little memory, and readable by Orbax itself."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints.store import open_tensors
from jaxspec.config import Qwen3Config
from tests.checkpoints.converting import contents, write_checkpoint
from tests.helpers import load_with_transformers, make_hf_checkpoint, make_tokenizer

ROOT = Path(__file__).parents[2]


def assert_same_model(first, second) -> None:
    assert first.config == second.config
    pairs = zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True)
    for left, right in pairs:
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_there_and_back_every_byte_is_equal(tmp_path, dtype):
    source = write_checkpoint(tmp_path / "source", dtype=jnp.dtype(dtype), max_shard_bytes=20_000)
    converted, back = tmp_path / "converted", tmp_path / "back"
    written = checkpoints.convert(source, converted)
    assert written.dtypes == (dtype,)
    assert written.num_tensors == len(contents(source))
    checkpoints.convert(converted, back, to="hf", max_shard_bytes=20_000)
    assert contents(source) == contents(converted) == contents(back)
    # The same order, the same shards: even the files are equal.
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            assert (back / path.name).read_bytes() == path.read_bytes()
    assert len(list(back.glob("*.safetensors"))) > 1
    assert_same_model(checkpoints.load_model(converted), checkpoints.load_model(source))


def test_tensors_of_different_dtypes_keep_theirs(tmp_path):
    dtypes = {"lm_head": np.float16, "up_proj": np.float32}
    source = write_checkpoint(tmp_path / "source", **dtypes)
    written = checkpoints.convert(source, tmp_path / "converted")
    assert written.dtypes == ("bfloat16", "float16", "float32")
    checkpoints.convert(tmp_path / "converted", tmp_path / "back", to="hf")
    assert contents(source) == contents(tmp_path / "converted") == contents(tmp_path / "back")
    assert contents(source)["lm_head.weight"][0] == "float16"


def test_special_values_keep_their_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "source", dtype=np.float32)
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = np.zeros(64, np.float32)
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.tile(odd, 4)
    save_file(tensors, path)
    checkpoints.convert(source, tmp_path / "converted")
    assert contents(tmp_path / "converted") == contents(source)


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_converts_as_loading_does(tmp_path, to, dtype):
    source = write_checkpoint(tmp_path / "source", dtype=np.float32, max_shard_bytes=20_000)
    written = checkpoints.convert(source, tmp_path / "out", to=to, dtype=dtype)
    assert written.dtypes == (dtype,)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == dtype
    assert_same_model(
        checkpoints.load_model(tmp_path / "out"), checkpoints.load_model(source, dtype=dtype)
    )


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype", None])
def test_dtype_keeps_the_spelling_of_the_configuration(tmp_path, spelling):
    source = write_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"], config["dtype"]
    named = config | ({spelling: "bfloat16"} if spelling else {})
    (source / "config.json").write_text(json.dumps(named))
    checkpoints.convert(source, tmp_path / "out", dtype="float16")
    expected = config | {spelling or "torch_dtype": "float16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


def test_a_repeated_tied_head_is_dropped_and_does_not_come_back(tmp_path):
    make_hf_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path)
    checkpoints.convert(tmp_path / "source", tmp_path / "converted")
    checkpoints.convert(tmp_path / "converted", tmp_path / "back", to="hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() == open_tensors(tmp_path / "converted").keys()
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    theirs = load_with_transformers(tmp_path / "back")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_every_other_file_keeps_its_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "source", max_shard_bytes=20_000)
    make_tokenizer(source)
    (source / "config.json").write_text((source / "config.json").read_text() + "\n \n")
    (source / "additional_chat_templates").mkdir()
    texts = ("LICENSE", "README.md", "merges.txt", "vocab.json", "added_tokens.json",
             "chat_template.jinja", "additional_chat_templates/tools.jinja")  # fmt: skip
    for name in texts:
        (source / name).write_text('{"a": 1}\n')
    (source / "training_state.bin").write_bytes(b"0" * 100)
    checkpoints.convert(source, tmp_path / "converted")
    checkpoints.convert(tmp_path / "converted", tmp_path / "back", to="hf")
    is_weights = {"model.safetensors", "model.safetensors.index.json", "training_state.bin"}
    expected = {
        str(path.relative_to(source)): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and path.name not in is_weights and path.suffix != ".safetensors"
    }
    assert {*texts, "tokenizer.json", "generation_config.json"} <= expected.keys()
    for name, raw in expected.items():
        assert (tmp_path / "converted" / name).read_bytes() == raw
        assert (tmp_path / "back" / name).read_bytes() == raw
    assert {path.name for path in (tmp_path / "converted").iterdir()} == {
        *(name.split("/")[0] for name in expected), "jaxspec.json", "weights",
    }  # fmt: skip


def test_a_converted_directory_loads_with_its_tokenizer(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    make_tokenizer(source)
    checkpoints.convert(source, tmp_path / "converted")
    (ours, tokenizer), (theirs, _) = (
        checkpoints.load(path, dtype="float32") for path in (tmp_path / "converted", source)
    )
    assert tokenizer("w1 w7")["input_ids"] == [1, 7]
    assert ours.config.eos_token_ids == (20,) and ours.config.num_valid_tokens == 21
    assert_same_model(ours, theirs)


def test_converting_a_converted_directory_again(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    checkpoints.convert(source, tmp_path / "first")
    checkpoints.convert(tmp_path / "first", tmp_path / "second")
    assert contents(tmp_path / "second") == contents(source)


def test_orbax_itself_restores_the_weights(tmp_path):
    import orbax.checkpoint as ocp

    source = write_checkpoint(tmp_path / "source", up_proj=np.float32)
    checkpoints.convert(source, tmp_path / "converted")
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "converted" / "weights")
    assert contents(source) == {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in restored.items()
    }


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_progress_counts_every_byte(tmp_path, to):
    seen = []
    written = checkpoints.convert(
        write_checkpoint(tmp_path / "source"),
        tmp_path / "out",
        to=to,
        on_progress=lambda *now: seen.append(now),
    )
    done, totals = zip(*seen, strict=True)
    assert set(totals) == {written.num_bytes} and done[-1] == written.num_bytes
    assert list(done) == sorted(set(done)) and len(done) == written.num_tensors + 1


def test_nothing_is_logged(tmp_path, capfd, caplog):
    checkpoints.convert(write_checkpoint(tmp_path / "source"), tmp_path / "converted")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2GiB", 2**31), ("12", 12), (" 3KB", 3000)]
    + [("9007199254740993", 2**53 + 1), ("9" * 30, 10**30 - 1)],
)
def test_sizes(text, size):
    assert checkpoints.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5X", "-1GB", "5 GB 6", "5G B", "١GB", "9" * 400])
def test_texts_that_are_no_size(text):
    with pytest.raises(ValueError) as raised:
        checkpoints.parse_size(text)
    assert str(raised.value) == f"{text!r} is no size such as 5GB, 300MB or 1000000"


MEASURE = """
    import sys, threading, time
    import jax
    from flax import nnx
    import checkpoints, checkpoints.store_writer

    def anonymous():
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def watch():
        global peak
        while True:
            peak = max(peak, anonymous())
            time.sleep(0.001)

    def above(action):
        global peak
        start = peak = anonymous()
        result = action()
        weights = 0
        if result is not None:
            weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(result)))
        print(peak - start - weights)

    peak = 0
    jax.block_until_ready(jax.device_put(1.0))
    threading.Thread(target=watch, daemon=True).start()
    source, converted, back = sys.argv[1:]
    above(lambda: checkpoints.convert(source, converted) and None)
    above(lambda: checkpoints.convert(converted, back, to="hf", dtype="float16") and None)
    above(lambda: checkpoints.load_model(converted))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_gigabyte_is_converted_and_loaded_in_little_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 5e9:
        pytest.skip("needs 5 GB of disk")
    config = Qwen3Config(
        64000, 1024, 3072, 26, 16, 8, 128, 1e-6, 1e4, 256, tie_word_embeddings=False
    )
    source = write_checkpoint(tmp_path / "source", config, max_shard_bytes=135_000_000)
    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    assert len(shards) >= 8 and sum(shards) >= 1e9
    places = [str(tmp_path / name) for name in ("source", "converted", "back")]
    try:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURE), *places],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    assert result.returncode == 0, result.stderr
    ratios = [int(line) / max(shards) for line in result.stdout.split()]
    print("bytes above the weights / largest shard:", ", ".join(f"{x:.2f}" for x in ratios))
    assert len(ratios) == 3 and max(ratios) <= 1.3
