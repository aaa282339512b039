"""Malformed checkpoints: one line that names file, tensor and values, and never another error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from tests.checkpoints.malformed import INDEX, WEIGHTS, change_json, error_of
from tests.helpers import make_tokenizer


def change_tensors(directory: Path, **changes: Any) -> None:
    """Replace tensors of the one-file checkpoint; None removes one."""
    tensors = load_file(directory / WEIGHTS) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / WEIGHTS)


def test_missing_directory(tmp_path):
    path = tmp_path / "absent"
    assert error_of(path, FileNotFoundError) == f"{path}: no such directory"


def test_a_file_in_place_of_the_directory(single):
    path = single / WEIGHTS
    assert error_of(path, NotADirectoryError) == f"{path}: not a directory"


def test_no_config(single):
    (single / "config.json").unlink()
    assert error_of(single, FileNotFoundError) == (
        f"{single}/config.json: no such file (a Hugging Face checkpoint has one)"
    )


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            b"{",
            "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1)",
        ),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"\xff{}", "not UTF-8 text (byte 0)"),
        (b'{"a": 1, "a": 2}', "not valid JSON: name 'a' occurs twice"),
        (b"[" * 200_000, "not valid JSON: nested too deeply"),
    ],
    ids=["empty", "cut", "list", "binary", "repeated", "deep"],
)
def test_json_that_is_no_object(single, name, text, reason):
    (single / name).write_bytes(text)
    assert error_of(single) == f"{single}/{name}: {reason}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"hidden_size": "8"}, "hidden_size='8' is not a positive integer"),
        ({"hidden_size": -8}, "hidden_size=-8 is not a positive integer"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000 is above 2147483647"),
        ({"model_type": "qwen2"}, "model_type='qwen2', expected 'qwen3'"),
        (
            {"model_type": "qwen3_moe"},
            "model_type='qwen3_moe': mixture-of-experts Qwen3 is not supported (dense only)",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config (quant_method='gptq') is not supported",
        ),
    ],
)
def test_config_faults_name_the_file(single, changes, reason):
    change_json(single / "config.json", **changes)
    assert error_of(single) == f"{single}/config.json: {reason}"


def test_generation_config_faults_name_that_file(single):
    change_json(single / "generation_config.json", eos_token_id=[3, 99])
    assert error_of(single) == (
        f"{single}/generation_config.json: eos_token_id=99 is outside vocab_size=13"
    )


def test_no_weights(single):
    (single / WEIGHTS).unlink()
    assert error_of(single, FileNotFoundError) == (
        f"{single}: no weights ({WEIGHTS} or {INDEX} expected)"
    )
    (single / "pytorch_model.bin").write_bytes(b"x")
    assert error_of(single, FileNotFoundError) == (
        f"{single}: holds pytorch_model.bin weights only; safetensors weights are needed"
    )


def test_wrong_shape(single):
    change_tensors(single, **{"model.layers.0.mlp.up_proj.weight": np.ones((8, 6), np.float32)})
    assert error_of(single) == (
        f"{single}/{WEIGHTS}: tensor 'model.layers.0.mlp.up_proj.weight' has shape [8, 6], "
        "expected [6, 8]"
    )


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_missing_tensor(single, name):
    change_tensors(single, **{name: None})
    assert error_of(single) == f"{single}: tensor {name!r} is missing"


@pytest.mark.parametrize("num_layers", [2, 2**31 - 1])
def test_fewer_layers_than_the_configuration_says(single, num_layers):
    change_json(single / "config.json", num_hidden_layers=num_layers, layer_types=None)
    assert error_of(single) == (
        f"{single}: tensor 'model.layers.1.input_layernorm.weight' is missing"
    )


def test_unknown_tensor(single):
    change_tensors(single, **{"model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float32)})
    assert error_of(single) == (
        f"{single}/{WEIGHTS}: tensor 'model.layers.0.self_attn.q_proj.bias' is no part of a dense "
        "Qwen3 model"
    )


def test_unsupported_dtype(single):
    change_tensors(single, **{"model.norm.weight": np.ones(8, np.int8)})
    assert error_of(single) == (
        f"{single}/{WEIGHTS}: tensor 'model.norm.weight': dtype 'I8' is not supported "
        "(supported: F32, F16, BF16)"
    )


def test_a_weight_that_does_not_fit_float16(single, tmp_path):
    change_tensors(single, **{"model.norm.weight": np.full(8, 1e5, np.float32)})
    with pytest.raises(ValueError) as raised:
        checkpoints.load(single, dtype="float16")
    assert str(raised.value) == (
        f"{single}/{WEIGHTS}: tensor 'model.norm.weight' does not fit float16"
    )
    with pytest.raises(ValueError, match="^tensor 'model.norm.weight' does not fit float16$"):
        checkpoints.save(checkpoints.load_model(single), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64", "nonsense", np.int32])
def test_dtypes_that_no_model_has(single, dtype):
    for call in (checkpoints.load, checkpoints.load_model):
        with pytest.raises(ValueError) as raised:
            call(single, dtype=dtype)
        name = dtype if isinstance(dtype, str) else "int32"
        assert str(raised.value) == f"dtype={name!r} is none of float32, float16, bfloat16"


def test_arguments_that_are_refused(single, tmp_path):
    model = checkpoints.load_model(single)
    with pytest.raises(ValueError, match="^max_shard_bytes=0 is not at least 1$"):
        checkpoints.save(model, tmp_path / "out", max_shard_bytes=0)


def test_out_of_device_memory_says_what_to_do(single, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(jax, "device_put", fail)
    assert error_of(single, MemoryError) == (
        "out of device memory at parameter 'embed_tokens' (416 bytes): load in a smaller dtype, or "
        "give JAX more memory with XLA_PYTHON_CLIENT_MEM_FRACTION (default 0.75) or "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_unreadable_files(single, name, monkeypatch):
    if os.geteuid() == 0:  # Root reads everything, so let the opening fail.
        real_open = Path.open

        def refuse(path, *args, **kwargs):
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return real_open(path, *args, **kwargs)

        def read_bytes(path):
            with path.open("rb") as file:
                return file.read()

        monkeypatch.setattr(Path, "open", refuse)
        monkeypatch.setattr(Path, "read_bytes", read_bytes)
    else:
        (single / name).chmod(0)
    message = error_of(single, PermissionError)
    assert message == f"[Errno 13] Permission denied: '{single}/{name}'"


def test_broken_tokenizers(single):
    make_tokenizer(single, num_words=5)
    path = single / "tokenizer.json"
    good = path.read_text()
    path.write_text(good[: len(good) // 2])
    assert error_of(single).startswith(f"{path}: not valid JSON: ")
    path.write_text("{}")
    assert error_of(single).startswith(f"{single}: cannot load the tokenizer: ")
    path.unlink()
    assert error_of(single, FileNotFoundError) == (
        f"{single}: has tokenizer_config.json but neither tokenizer.json nor vocab.json with "
        "merges.txt"
    )


def test_a_tokenizer_whose_eos_has_no_embedding(single):
    make_tokenizer(single, num_words=13)
    assert error_of(single) == f"{single}: tokenizer: eos_token_id=13 is outside vocab_size=13"


def test_a_tokenizer_without_tokens(single):
    make_tokenizer(single, num_words=0, eos_token=None)
    assert error_of(single) == f"{single}: tokenizer: the tokenizer has no tokens"


def test_no_model_is_saved_in_an_unsupported_dtype(single, tmp_path):
    model = checkpoints.load_model(single)
    with pytest.raises(ValueError, match="^dtype='float8_e5m2' is none of "):
        checkpoints.save(model, tmp_path / "out", dtype="float8_e5m2")
    assert not (tmp_path / "out").exists()
