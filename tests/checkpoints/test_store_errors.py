"""Malformed converted checkpoints and refused conversions: one line that names file and values."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from checkpoints import conversion, store
from tests.checkpoints.converting import contents, write_checkpoint
from tests.checkpoints.malformed import change_json, error_of
from tests.helpers import make_tokenizer

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    """Return a checkpoint in both formats, which no test changes."""
    root = tmp_path_factory.mktemp("sound")
    write_checkpoint(root / "hf")
    make_tokenizer(root / "hf")
    checkpoints.convert(root / "hf", root / "orbax")
    return {"hf": root / "hf", "orbax": root / "orbax"}


@pytest.fixture
def converted(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound["orbax"], tmp_path / "model"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "holds a JSON list, expected an object"),
        ("{}", "format_version=None is not a positive integer"),
        ('{"format_version": "1"}', "format_version='1' is not a positive integer"),
        ('{"format_version": 0}', "format_version=0 is not a positive integer"),
        ('{"format_version": true}', "format_version=True is not a positive integer"),
        (
            '{"format_version": 2}',
            "format_version=2 is newer than 1, the newest that this jaxspec reads: update jaxspec",
        ),
    ],
)
def test_markers(converted, text, reason):
    (converted / "jaxspec.json").write_text(text)
    assert error_of(converted) == f"{converted}/jaxspec.json: {reason}"


def test_no_weights(converted):
    shutil.rmtree(converted / "weights")
    message = f"{converted}/weights: no such directory (the converted weights)"
    assert error_of(converted, FileNotFoundError) == message
    (converted / "jaxspec.json").unlink()
    assert error_of(converted, FileNotFoundError) == (
        f"{converted}: no weights (model.safetensors or model.safetensors.index.json expected)"
    )


def test_no_config(converted):
    (converted / "config.json").unlink()
    assert error_of(converted, FileNotFoundError) == (
        f"{converted}/config.json: no such file (a Hugging Face checkpoint has one)"
    )


def test_missing_and_unknown_tensors(converted):
    array = converted / "weights" / NORM
    bias = converted / "weights" / "model.layers.0.self_attn.q_proj.bias"
    array.rename(bias)
    assert error_of(converted) == f"{converted}: tensor {NORM!r} is missing"
    shutil.copytree(bias, array)
    assert error_of(converted) == (
        f"{bias}/0: tensor {bias.name!r} is no part of a dense Qwen3 model"
    )


def test_missing_files_of_an_array(converted):
    array = converted / "weights" / NORM
    (array / "0").rename(array / "1")
    assert error_of(converted, FileNotFoundError) == (
        f"{array}/0: no such file (it holds tensor {NORM!r})"
    )
    (array / ".zarray").unlink()
    assert error_of(converted, FileNotFoundError) == (
        f"{array}/.zarray: no such file (it describes tensor {NORM!r})"
    )


@pytest.mark.parametrize("num_bytes", [0, 127, 129])
def test_truncated_and_overlong_arrays(converted, num_bytes):
    path = converted / "weights" / NORM / "0"
    path.write_bytes(bytes(num_bytes))
    assert error_of(converted) == (
        f"{path}: tensor {NORM!r} has {num_bytes} bytes, expected 128 for bfloat16 [64]"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": None}, "shape None is not a list of sizes"),
        ({"shape": [-64]}, "shape [-64] is not a list of sizes"),
        ({"shape": []}, "shape [] is not a list of sizes"),
        ({"dtype": "<i4"}, "dtype '<i4' is not supported (supported: <f4, <f2, bfloat16)"),
        ({"dtype": ["a"]}, "dtype ['a'] is not supported (supported: <f4, <f2, bfloat16)"),
        ({"chunks": [32]}, "chunks is [32], expected [64]"),
        ({"zarr_format": 3}, "zarr_format is 3, expected 2"),
        ({"order": "F"}, "order is 'F', expected 'C'"),
        ({"filters": [{"id": "delta"}]}, "filters is [{'id': 'delta'}], expected None"),
        ({"compressor": {"id": "zstd"}}, "compressor is {'id': 'zstd'}, expected None"),
    ],
)
def test_descriptions_of_arrays(converted, changes, reason):
    path = converted / "weights" / NORM / ".zarray"
    change_json(path, **changes)
    assert error_of(converted) == f"{path}: tensor {NORM!r}: {reason}"


def test_a_description_that_is_no_json(converted):
    path = converted / "weights" / NORM / ".zarray"
    path.write_text("{")
    assert error_of(converted).startswith(f"{path}: not valid JSON: ")


def test_a_configuration_that_does_not_fit_the_arrays(converted):
    change_json(converted / "config.json", intermediate_size=100)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert error_of(converted) == (
        f"{converted}/weights/{name}/0.0: tensor {name!r} has shape [96, 64], expected [100, 64]"
    )


def test_broken_tokenizers(converted):
    path = converted / "tokenizer.json"
    good = path.read_text()
    path.write_text("{}")
    assert error_of(converted).startswith(f"{converted}: cannot load the tokenizer: ")
    path.write_text(good[: len(good) // 2])
    assert error_of(converted).startswith(f"{path}: not valid JSON: ")
    path.unlink()
    assert error_of(converted, FileNotFoundError) == (
        f"{converted}: has tokenizer_config.json but neither tokenizer.json nor vocab.json with "
        "merges.txt"
    )


def refusal(kind: type[Exception], source: Path, destination: Path, **options) -> str:
    """Convert, and return the one line of the error."""
    with pytest.raises(kind) as raised:
        checkpoints.convert(source, destination, **options)
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    return message


def test_arguments_that_are_refused(sound, tmp_path):
    source, out = sound["hf"], tmp_path / "out"
    assert refusal(ValueError, source, out, to="gguf") == "to='gguf' is none of orbax, hf"
    assert refusal(ValueError, source, out, max_shard_bytes=0) == (
        "max_shard_bytes=0 is not at least 1"
    )
    assert refusal(ValueError, source, out, dtype="int8") == (
        "dtype='int8' is none of float32, float16, bfloat16"
    )
    assert list(tmp_path.iterdir()) == []


def test_sources_that_are_refused(sound, tmp_path):
    out = tmp_path / "out"
    missing = tmp_path / "missing"
    assert refusal(FileNotFoundError, missing, out) == f"{missing}: no such directory"
    copy = Path(shutil.copytree(sound["hf"], tmp_path / "copy"))
    (copy / "tokenizer.json").write_text("[]")
    assert refusal(ValueError, copy, out) == (
        f"{copy}/tokenizer.json: holds a JSON list, expected an object"
    )
    change_json(copy / "config.json", hidden_size=-1)
    assert refusal(ValueError, copy, out) == (
        f"{copy}/config.json: hidden_size=-1 is not a positive integer"
    )
    assert not out.exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_places_that_overlap(sound, tmp_path, overwrite):
    source = Path(shutil.copytree(sound["hf"], tmp_path / "a" / "source"))
    link = tmp_path / "link"
    link.symlink_to(source)
    for same in (source, link, source / "." / ".." / "source"):
        assert refusal(ValueError, source, same, overwrite=overwrite) == (
            f"{source}: source and destination are the same directory"
        )
    inside = source / "out"
    assert refusal(ValueError, source, inside, overwrite=overwrite) == (
        f"{inside}: the destination lies inside the source {source}"
    )
    assert refusal(ValueError, source, source.parent, overwrite=overwrite) == (
        f"{source.parent}: the source {source} lies inside the destination"
    )
    assert (source / "config.json").exists() and not inside.exists()


def test_destinations_that_are_taken(sound, tmp_path):
    source, out = sound["hf"], tmp_path / "out"
    out.mkdir()
    (out / "novel.txt").write_text("Call me Ishmael.")
    assert refusal(FileExistsError, source, out) == f"{out}: exists and is not an empty directory"
    assert refusal(FileExistsError, source, out, overwrite=True) == (
        f"{out}: has no config.json, so it is no checkpoint and is not overwritten"
    )
    file = out / "novel.txt"
    assert refusal(FileExistsError, source, file) == (
        f"{file}: exists and is not an empty directory"
    )
    assert refusal(NotADirectoryError, source, file, overwrite=True) == f"{file}: not a directory"
    assert refusal(FileExistsError, source, file / "below") == (f"[Errno 17] File exists: '{file}'")
    assert [path.name for path in out.iterdir()] == ["novel.txt"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("thesis/chapter.tex", "Call me Ishmael.", "holds 'thesis'"),
        ("optimizer.pt", "", "holds 'optimizer.pt'"),
        ("weights/theirs", "", "holds 'weights'"),
        ("config.json", '{"port": 8080}', "its config.json names no model_type"),
        ("config.json", "port = 8080", "its config.json names no model_type"),
        ("model.safetensors", None, "has no weights"),
    ],
)
def test_a_destination_with_more_than_a_checkpoint(tmp_path, name, content, reason):
    """What a conversion could not give back is not replaced."""
    source, out = write_checkpoint(tmp_path / "source", seed=1), write_checkpoint(tmp_path / "out")
    path = out / name
    path.parent.mkdir(exist_ok=True)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    before = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert refusal(FileExistsError, source, out, overwrite=True) == (
        f"{out}: {reason}, so it is no checkpoint and is not overwritten"
    )
    assert before == {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_an_empty_destination_is_not_the_current_directory(sound, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(ValueError, sound["hf"], "") == (
        "the destination is empty: expected a directory"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_download_or_a_conversion_with_all_its_files_is_overwritten(tmp_path, to):
    source, out = write_checkpoint(tmp_path / "source", seed=1), tmp_path / "out"
    checkpoints.convert(write_checkpoint(tmp_path / "older"), out, to=to)
    for name in ("LICENSE", "merges.txt", ".gitattributes", ".cache/huggingface/a.lock"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    checkpoints.convert(source, out, to=to, overwrite=True)
    assert contents(out) == contents(source)


def test_a_parent_that_cannot_be_written(sound, tmp_path, monkeypatch):
    real_mkdir = Path.mkdir

    def mkdir(path, *args, **kwargs):
        if path.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real_mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    out = tmp_path / "out"
    assert refusal(PermissionError, sound["hf"], out) == (f"[Errno 13] Permission denied: '{out}'")


def test_a_disk_with_too_little_room(sound, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    out = tmp_path / "out"
    num_bytes = sum(tensor.read().nbytes for tensor in store.open_tensors(sound["hf"]).values())
    assert refusal(OSError, sound["hf"], out) == (
        f"{out}: needs {num_bytes} bytes, but 1000 are free on its disk"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_weight_that_does_not_fit_float16(tmp_path, to):
    from safetensors.numpy import load_file, save_file

    path = write_checkpoint(tmp_path / "source", dtype=np.float32) / "model.safetensors"
    save_file(load_file(path) | {NORM: np.full(64, 1e5, np.float32)}, path)
    out = tmp_path / "out"
    assert refusal(ValueError, path.parent, out, to=to, dtype="float16") == (
        f"{path}: tensor {NORM!r} does not fit float16"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_another_layout_of_orbax_does_not_go_unnoticed(sound, tmp_path, monkeypatch):
    def without_one(*arguments):
        shutil.copytree(sound["orbax"] / "weights", arguments[0])
        shutil.rmtree(arguments[0] / NORM)
        (arguments[0] / "manifest.ocdbt").touch()

    monkeypatch.setattr("checkpoints.store_writer.write_store", without_one)
    out = tmp_path / "out"
    assert refusal(OSError, sound["hf"], out) == (
        f"{out}: this release of Orbax did not write one plain array for each tensor"
    )
    assert conversion.open_tensors(sound["orbax"])
    assert list(tmp_path.iterdir()) == []


def test_the_marker_is_what_the_documentation_says(sound):
    marker = json.loads((sound["orbax"] / "jaxspec.json").read_text())
    assert marker == {"format_version": store.FORMAT_VERSION}
