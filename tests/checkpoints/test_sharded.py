"""Models spread over a mesh: every device has its part, and saving does not show the mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoints
from checkpoints import BUNDLED_MODEL, huggingface
from checkpoints.key_table import get_parameter, iterate_keys
from checkpoints.store import open_tensors
from jaxspec.config import Qwen3Config
from jaxspec.model import Qwen3
from jaxspec.sharding import make_mesh
from tests.checkpoints.converting import write_checkpoint
from tests.helpers import make_tokenizer

# Two kv heads for up to eight devices, and a vocabulary that no number of devices divides.
CONFIG = Qwen3Config(97, 48, 96, 2, 8, 2, 16, 1e-6, 1e4, 256)
# Qwen3-0.6B with every width a sixteenth.
PROPORTIONS = Qwen3Config(9496, 64, 192, 28, 16, 8, 8, 1e-6, 1e6, 40960, tie_word_embeddings=True)
SIZES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (8, 1)]
# Rows of the vocabulary on each of so many devices.
VOCAB_ROWS = {1: 97, 2: 49, 4: 25, 8: 13}
SPECS = {
    "embed_tokens": P("model"),
    "lm_head": P("model"),
    "qkv_proj": P(None, "model"),
    "o_proj": P("model"),
    "gate_up_proj": P(None, None, "model"),
    "down_proj": P("model"),
    "weight": P(),
}
KINDS = ["one_file", "files", "converted"]


@pytest.fixture(scope="module", params=["tied", "untied"])
def stored(request, tmp_path_factory) -> dict[str, Path]:
    """Return directories of the same model: one file, several files, converted."""
    root = tmp_path_factory.mktemp(request.param)
    config = dataclasses.replace(CONFIG, tie_word_embeddings=request.param == "tied")
    paths = {kind: root / kind for kind in KINDS}
    write_checkpoint(paths["one_file"], config)
    write_checkpoint(paths["files"], config, max_shard_bytes=20_000)
    checkpoints.convert(paths["one_file"], paths["converted"])
    return paths


def expected_part(name: str, whole: np.ndarray, config: Qwen3Config, num: int, index: int):
    """Return what device `index` of `num` should hold of a parameter, head by head."""
    if name == "weight":
        return whole
    if name in ("embed_tokens", "lm_head"):
        rows = VOCAB_ROWS[num] if config.vocab_size == 97 else config.vocab_size // num
        padding = np.zeros((rows * num - len(whole), whole.shape[1]), whole.dtype)
        return np.split(np.concatenate([whole, padding]), num)[index]
    if name in ("gate_up_proj", "down_proj"):
        return np.split(whole, num, axis=2 if name == "gate_up_proj" else 0)[index]
    groups, num_heads = config.num_query_groups, config.num_attention_heads // num
    heads: dict[int, list[int]] = {}
    for head in range(index * num_heads, (index + 1) * num_heads):
        heads.setdefault(head // groups, []).append(head % groups)
    if name == "o_proj":
        return np.stack([whole[kv_head, places] for kv_head, places in heads.items()])
    assert name == "qkv_proj"
    parts = [whole[:, kv, [*places, groups, groups + 1]] for kv, places in heads.items()]
    return np.stack(parts, axis=1)


def parameters_of(model: Qwen3) -> dict[str, jax.Array]:
    return {
        key.parameter: get_parameter(model, key.parameter)[...]
        for key in iterate_keys(model.config)
    }


def assert_spread(model: Qwen3, plain: Qwen3, mesh: jax.sharding.Mesh) -> None:
    assert model.mesh is mesh and model.config == plain.config
    spread = parameters_of(model)
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(plain))
    num = mesh.shape["model"]
    for path, value in parameters_of(plain).items():
        name, array = path.split(".")[-1], spread[path]
        assert array.sharding == NamedSharding(mesh, SPECS[name])
        assert len(array.addressable_shards) == mesh.size
        for shard in array.addressable_shards:
            index = int(np.argwhere(mesh.devices == shard.device)[0, 1])
            expected = expected_part(name, np.asarray(value), plain.config, num, index)
            assert shard.data.dtype == value.dtype
            np.testing.assert_array_equal(np.asarray(shard.data), expected)


def saved_bytes(model: Qwen3, directory: Path, **options) -> dict[str, bytes]:
    checkpoints.save(model, directory, **options)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_device_has_its_part(stored, kind, size):
    mesh = make_mesh(*size)
    plain = checkpoints.load_model(stored[kind])
    assert plain.mesh is None
    assert_spread(checkpoints.load_model(stored[kind], mesh=mesh), plain, mesh)


@pytest.mark.parametrize("size", SIZES)
def test_saving_gives_the_same_bytes(stored, tmp_path, size):
    plain = checkpoints.load_model(stored["one_file"])
    spread = checkpoints.load_model(stored["one_file"], mesh=make_mesh(*size))
    for i, options in enumerate(({}, {"max_shard_bytes": 20_000}, {"dtype": "float16"})):
        expected = saved_bytes(plain, tmp_path / f"plain{i}", **options)
        assert saved_bytes(spread, tmp_path / f"spread{i}", **options) == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
def test_parts_are_converted(stored, dtype):
    mesh = make_mesh(2, 4)
    plain = checkpoints.load_model(stored["files"], dtype=dtype)
    assert_spread(checkpoints.load_model(stored["files"], dtype=dtype, mesh=mesh), plain, mesh)


def test_devices_without_a_row_of_the_vocabulary(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=9)
    path = write_checkpoint(tmp_path / "in", config)
    spread = checkpoints.load_model(path, mesh=make_mesh(1, 8))
    rows = np.concatenate([np.asarray(s.data) for s in spread.lm_head[...].addressable_shards])
    whole = np.asarray(checkpoints.load_model(path).lm_head[...])
    np.testing.assert_array_equal(rows, np.concatenate([whole, np.zeros((7, 48), whole.dtype)]))
    expected = saved_bytes(checkpoints.load_model(path), tmp_path / "plain")
    assert saved_bytes(spread, tmp_path / "spread") == expected


def test_load_gives_a_spread_model_and_its_tokenizer(tmp_path):
    path = write_checkpoint(tmp_path / "in", CONFIG)
    make_tokenizer(path)
    mesh = make_mesh(1, 2)
    model, tokenizer = checkpoints.load(path, mesh=mesh, dtype="float32")
    plain, _ = checkpoints.load(path, dtype="float32")
    assert tokenizer("w1 w7")["input_ids"] == [1, 7]
    assert model.config.eos_token_ids == (20,) and model.config.num_valid_tokens == 21
    assert_spread(model, plain, mesh)


def test_the_bundled_model(tmp_path):
    mesh = make_mesh(2, 4)
    (spread, tokenizer), (plain, _) = (
        checkpoints.load(BUNDLED_MODEL, mesh=place) for place in (mesh, None)
    )
    assert tokenizer is not None
    assert_spread(spread, plain, mesh)
    assert saved_bytes(spread, tmp_path / "a") == saved_bytes(plain, tmp_path / "b")


@pytest.mark.parametrize("size", [(1, 2), (1, 8), (2, 4)])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_a_device_holds_its_share_of_the_bytes(tmp_path, num_kv_heads, size):
    config = dataclasses.replace(PROPORTIONS, num_key_value_heads=num_kv_heads)
    path = write_checkpoint(tmp_path / "in", config)
    model = checkpoints.load_model(path, mesh=make_mesh(*size))
    held = dict.fromkeys(jax.devices()[: size[0] * size[1]], 0)
    for array in jax.tree.leaves(nnx.state(model)):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    num, layers, width, head_dim = size[1], 28, 64, 8
    kv_head = layers * 2 * width * head_dim
    norms = layers * (2 * width + 2 * head_dim) + width
    # The vocabulary is a multiple of 8, and stays one on each device.
    padding = (-(-9496 // (8 * num)) * 8 * num - 9496) * width
    total = sum(np.prod(key.shape(config)) for key in iterate_keys(config))
    split = total - norms - num_kv_heads * kv_head + padding
    expected = split // num + norms + max(num_kv_heads // num, 1) * kv_head
    assert set(held.values()) == {2 * expected}
    # Kv heads that several devices hold are no share, but stated above.
    repeated = (max(num_kv_heads // num, 1) - num_kv_heads / num) * kv_head
    assert expected - repeated <= 1.15 * total / num
    assert (repeated > 0) == (num > num_kv_heads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_a_part_is_copied_from_its_own_slices(stored, kind, num_parts, monkeypatch):
    sources = []

    def copy(target, source, real=huggingface.copy):
        assert isinstance(source.base, np.memmap)
        sources.append(source.nbytes)
        real(target, source)

    monkeypatch.setattr(huggingface, "copy", copy)
    config = dataclasses.replace(CONFIG, tie_word_embeddings="tied" in str(stored[kind].parent))
    tensors, key_list = open_tensors(stored[kind]), list(iterate_keys(config))
    spread = checkpoints.load_model(stored[kind], mesh=make_mesh(1, num_parts))
    kv_size = 48 * max(2 // num_parts, 1) * 16
    expected = {
        "embed_tokens": VOCAB_ROWS[num_parts] * 48,
        "layers.1.self_attn.qkv_proj": 48 * (8 // num_parts) * 16 + 2 * kv_size,
        "layers.1.self_attn.o_proj": 48 * (8 // num_parts) * 16,
        "layers.1.mlp.gate_up_proj": 2 * 48 * 96 // num_parts,
        "layers.1.mlp.down_proj": 48 * 96 // num_parts,
        "norm.weight": 48,
    }
    for path, size in expected.items():
        sources.clear()
        keys = [key for key in key_list if key.parameter == path]
        shard = get_parameter(spread, path)[...].addressable_shards[0].data
        part = huggingface.assemble(
            tensors, keys, config, num_parts, shard.shape, np.dtype(shard.dtype), 0
        )
        assert sum(sources) == 2 * size and len(sources) == len(keys)
        np.testing.assert_array_equal(part, np.asarray(shard))


def test_each_part_is_assembled_once(stored, monkeypatch):
    asked = []

    def assemble(tensors, keys, *arguments, real=huggingface.assemble):
        asked.append((keys[0].parameter.split(".")[-1], arguments[-1]))
        return real(tensors, keys, *arguments)

    monkeypatch.setattr(huggingface, "assemble", assemble)
    checkpoints.load_model(stored["one_file"], mesh=make_mesh(2, 4))
    assert [index for name, index in asked if name == "embed_tokens"] == [0, 1, 2, 3]
    assert [index for name, index in asked if name == "down_proj"] == [0, 1, 2, 3] * 2
    assert [index for name, index in asked if name == "weight"] == [0] * 9
