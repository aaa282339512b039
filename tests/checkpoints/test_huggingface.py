"""Weights in and out: bit for bit, in every layout on disk, without torch and in little memory."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import checkpoints
from checkpoints import shards
from checkpoints.key_table import get_parameter, iterate_keys
from checkpoints.safetensors_io import open_checkpoint
from jaxspec.config import Qwen3Config, YarnScaling
from jaxspec.model import Qwen3
from tests.helpers import YARN, load_with_transformers, make_hf_checkpoint, make_tokenizer

ROOT = Path(__file__).parents[2]


def assert_same_weights(first: Qwen3, second: Qwen3) -> None:
    pairs = zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True)
    for left, right in pairs:
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """Return the directory of a tiny float32 checkpoint with a tokenizer."""
    path = tmp_path_factory.mktemp("stored")
    make_hf_checkpoint(path)
    make_tokenizer(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_every_stored_bit_arrives(tmp_path, dtype, max_shard_size):
    import torch

    theirs = make_hf_checkpoint(tmp_path, dtype=dtype, max_shard_size=max_shard_size)
    model = checkpoints.load_model(tmp_path)
    assert model.dtype == jnp.dtype(dtype)
    expected = {name: value.detach() for name, value in theirs.state_dict().items()}
    for key in iterate_keys(model.config):
        parameter = np.asarray(get_parameter(model, key.parameter)[...])
        ours = key.view(parameter, model.config).reshape(key.shape(model.config))
        wide = torch.from_numpy(np.ascontiguousarray(ours.astype(np.float32)))
        assert torch.equal(wide, expected.pop(key.stored))
    assert not expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", jnp.bfloat16, np.float32])
def test_converts_as_jax_does(stored, dtype):
    exact = checkpoints.load_model(stored)
    converted = checkpoints.load_model(stored, dtype=dtype)
    expected = jax.tree.map(lambda x: x.astype(dtype), nnx.state(exact))
    for left, right in zip(
        jax.tree.leaves(nnx.state(converted)), jax.tree.leaves(expected), strict=True
    ):
        assert left.dtype == right.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_mixed_dtypes_load_as_the_one_that_holds_all(tmp_path):
    from safetensors.numpy import load_file, save_file

    make_hf_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoints.load_model(tmp_path).dtype == jnp.float32


SAVED = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "eos_token_ids": ()},
    "one_kv_head": {"num_key_value_heads": 1},
    "yarn": {"rope_scaling": YarnScaling(4.0, 64, attention_factor=1.25, truncate=False)},
}


@pytest.mark.parametrize("overrides", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000, 1])
def test_save_and_load_give_the_same_model(tmp_path, overrides, max_shard_bytes):
    fields = {"num_key_value_heads": 2, "eos_token_ids": (5, 3)} | overrides
    config = Qwen3Config(
        97,
        48,
        96,
        2,
        4,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=256,
        **fields,
    )
    model = Qwen3(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    checkpoints.save(model, tmp_path / "a" / "b", max_shard_bytes=max_shard_bytes)
    loaded = checkpoints.load_model(tmp_path / "a" / "b")
    assert loaded.config == config
    assert_same_weights(loaded, model)
    num_files = len(list((tmp_path / "a" / "b").glob("*.safetensors")))
    assert (num_files == 1) == (max_shard_bytes == 10**9)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_transformers_loads_what_is_saved(tmp_path, rope):
    import torch

    overrides = {"rope": YARN} if rope == "yarn" else {}
    theirs = make_hf_checkpoint(tmp_path / "in", eos_token_id=[5, 3], **overrides)
    checkpoints.save(checkpoints.load_model(tmp_path / "in"), tmp_path / "out", dtype="float32")
    again = load_with_transformers(tmp_path / "out")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, again(tokens).logits)
    assert again.generation_config.eos_token_id == [5, 3]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    assert (config["rope_scaling"] is None) == (rope == "default")


def test_save_to_another_dtype_rounds_once(tmp_path, stored):
    model = checkpoints.load_model(stored)
    checkpoints.save(model, tmp_path / "out", dtype="bfloat16")
    assert_same_weights(
        checkpoints.load_model(tmp_path / "out"), checkpoints.load_model(stored, dtype="bfloat16")
    )


def test_save_leaves_nothing_behind_when_it_fails(tmp_path, stored, monkeypatch):
    model = checkpoints.load_model(stored)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(shards, "write_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_save_takes_an_empty_directory_and_no_other(tmp_path, stored):
    model = checkpoints.load_model(stored)
    target = tmp_path / "out"
    target.mkdir()
    checkpoints.save(model, target)
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    with pytest.raises(FileExistsError, match="^.*out: exists and is not an empty directory$"):
        checkpoints.save(model, target)
    with pytest.raises(FileExistsError, match="config.json: exists and is not an empty directory"):
        checkpoints.save(model, target / "config.json")


def test_a_head_stored_beside_a_tied_embedding_must_equal_it(tmp_path):
    from safetensors.numpy import load_file, save_file

    make_hf_checkpoint(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    plain = checkpoints.load_model(tmp_path)
    assert plain.lm_head is None
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, path)
    assert_same_weights(checkpoints.load_model(tmp_path), plain)
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, path)
    with pytest.raises(ValueError) as raised:
        checkpoints.load_model(tmp_path)
    assert str(raised.value) == (
        f"{path}: tie_word_embeddings is true, but tensors 'model.embed_tokens.weight' and "
        "'lm_head.weight' differ"
    )


def test_rotary_buffers_of_old_files_are_ignored(tmp_path):
    from safetensors.numpy import load_file, save_file

    make_hf_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(load_file(path) | buffer, path)
    assert checkpoints.load_model(tmp_path).dtype == jnp.float32


def test_load_fills_in_what_the_tokenizer_knows(tmp_path):
    make_hf_checkpoint(tmp_path, eos_token_id=3)
    make_tokenizer(tmp_path, num_words=20)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    model, tokenizer = checkpoints.load(tmp_path)
    assert tokenizer("w1 w7")["input_ids"] == [1, 7]
    assert model.config.eos_token_ids == (5, 3, 20)
    assert model.config.num_valid_tokens == len(tokenizer) == 21


def test_load_without_tokenizer_files_gives_none(tmp_path):
    make_hf_checkpoint(tmp_path)
    model, tokenizer = checkpoints.load(str(tmp_path))
    assert tokenizer is None
    assert model.config.num_valid_tokens is None
    assert model.config.eos_token_ids == (3,)


def test_a_tokenizer_larger_than_the_embedding_is_cut(tmp_path):
    make_hf_checkpoint(tmp_path)
    tokenizer = make_tokenizer(tmp_path, num_words=90)
    tokenizer.add_tokens([f"x{i}" for i in range(50)])
    tokenizer.save_pretrained(tmp_path)
    model, _ = checkpoints.load(tmp_path)
    assert model.config.num_valid_tokens == 97


def test_weights_need_no_torch(stored):
    code = """
        import sys
        import checkpoints
        model = checkpoints.load_model(sys.argv[1], dtype="bfloat16")
        print(model.dtype, "torch" in sys.modules, "transformers" in sys.modules)
    """
    assert run_python(code, str(stored)).split() == ["bfloat16", "False", "False"]


def test_model_and_tokenizer_load_where_there_is_no_torch(stored):
    code = """
        import sys
        sys.modules["torch"] = None
        import checkpoints
        model, tokenizer = checkpoints.load(sys.argv[1])
        print(tokenizer("w4")["input_ids"][0], model.config.num_valid_tokens)
    """
    assert run_python(code, str(stored)).split() == ["4", "21"]


def test_the_checkpoint_is_closed_after_loading(stored):
    checkpoints.load_model(stored)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(stored) not in maps.read_text()


def test_keys_cover_every_parameter_and_every_stored_tensor(stored):
    model = checkpoints.load_model(stored)
    names = [key.stored for key in iterate_keys(model.config)]
    assert sorted(names) == sorted(open_checkpoint(stored))
    reached = {id(get_parameter(model, key.parameter)) for key in iterate_keys(model.config)}
    assert len(reached) == len(jax.tree.leaves(nnx.state(model)))
