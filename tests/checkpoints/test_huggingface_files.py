"""Malformed safetensors files and indices, made by hand and by chance."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import checkpoints
from tests.checkpoints.malformed import INDEX, WEIGHTS, change_json, error_of


def split_header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not a safetensors file (0 bytes, expected at least 8)"),
        (b"1234567", "not a safetensors file (7 bytes, expected at least 8)"),
        (b"\x80\x02}q\x00X\x05\x00" * 9, "truncated or not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "safetensors header: holds a JSON list, expected an object"),
        (struct.pack("<Q", 2) + b"{x", "safetensors header: not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "safetensors header: not UTF-8 text (byte 0)"),
        (struct.pack("<Q", 2) + b"{}tail", "4 bytes of data, but the tensors end at byte 0"),
        (b"version https://git-lfs.github.com/spec/v1\n", "truncated or not a safetensors file"),
    ],
)
def test_files_that_are_no_safetensors(single, raw, reason):
    (single / WEIGHTS).write_bytes(raw)
    assert error_of(single).startswith(f"{single}/{WEIGHTS}: {reason}")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (3, "header entry is not an object"),
        ({"dtype": None}, "dtype None is not supported (supported: F32, F16, BF16)"),
        ({"dtype": "F8_E4M3"}, "dtype 'F8_E4M3' is not supported (supported: F32, F16, BF16)"),
        ({"dtype": ["F32"]}, "dtype ['F32'] is not supported (supported: F32, F16, BF16)"),
        ({"shape": "8"}, "shape '8' is not a list of sizes"),
        ({"shape": [-8]}, "shape [-8] is not a list of sizes"),
        ({"shape": [True]}, "shape [True] is not a list of sizes"),
        ({"data_offsets": None}, "data_offsets None are not a pair of ascending offsets"),
        ({"data_offsets": [0]}, "data_offsets [0] are not a pair of ascending offsets"),
        ({"data_offsets": [32, 0]}, "data_offsets [32, 0] are not a pair of ascending offsets"),
        ({"data_offsets": [0, 31]}, "data_offsets span 31 bytes, expected 32 for F32 [8]"),
    ],
)
def test_header_entries_that_make_no_sense(single, entry, reason):
    header, data = split_header(single / WEIGHTS)
    header[NORM] = header[NORM] | entry if isinstance(entry, dict) else entry
    write_header(single / WEIGHTS, header, data)
    assert error_of(single) == f"{single}/{WEIGHTS}: tensor {NORM!r}: {reason}"


def test_offsets_past_the_end_overlapping_or_with_a_gap(single):
    path = single / WEIGHTS
    header, data = split_header(path)
    size = len(data)
    far = header | {NORM: header[NORM] | {"data_offsets": [size, size + 32]}}
    write_header(path, far, data)
    assert f"tensor {NORM!r} starts at" in error_of(single) or "truncated" in error_of(single)
    end = max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)
    last = next(k for k, v in header.items() if v.get("data_offsets", [0, 0])[1] == end)
    write_header(path, header, data[:-1])
    assert error_of(single) == (
        f"{path}: truncated: tensor {last!r} ends at byte {size} of the data, which has {size - 1}"
    )
    write_header(path, header, data + b"x")
    assert error_of(single) == (
        f"{path}: {size + 1} bytes of data, but the tensors end at byte {size}"
    )
    first = header[NORM]["data_offsets"][0]
    shift = -4 if first else 4
    moved = [offset + shift for offset in header[NORM]["data_offsets"]]
    write_header(path, header | {NORM: header[NORM] | {"data_offsets": moved}}, data)
    message = error_of(single)
    assert "overlaps the tensor before it" in message or "leaves a gap before it" in message


def test_header_longer_than_the_limit(single):
    path = single / WEIGHTS
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**27))
        file.truncate(2**27 + 8)
    assert error_of(single) == (
        f"{path}: truncated or not a safetensors file (header of {2**27} bytes, file of "
        f"{2**27 + 8})"
    )


def test_a_tensor_named_twice_in_one_file(single):
    path = single / WEIGHTS
    entry = b'"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    write_header(path, b"{" + entry + b"," + entry + b"}", b"")
    assert error_of(single) == (
        f"{path}: safetensors header: not valid JSON: name 'x' occurs twice"
    )


@pytest.mark.parametrize("weight_map", [None, {}, [], "model"])
def test_index_without_weight_map(sharded, weight_map):
    change_json(sharded / INDEX, weight_map=weight_map)
    assert error_of(sharded) == (
        f"{sharded}/{INDEX}: weight_map is missing, empty or not an object"
    )


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "a\\b.safetensors",
        "..",
        "model.bin",
        "",
        7,
        None,
        "a\0.safetensors",
    ],
)
def test_index_with_shard_names_that_are_no_plain_file(sharded, shard):
    change_json(sharded / INDEX, weight_map={"lm_head.weight": shard})
    assert error_of(sharded) == (
        f"{sharded}/{INDEX}: tensor 'lm_head.weight' has shard name {shard!r}, expected the plain "
        "name of a .safetensors file"
    )


def test_index_that_does_not_fit_the_shards(sharded):
    index = sharded / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    first, other = sorted(set(weight_map.values()))[:2]
    name = next(name for name, shard in weight_map.items() if shard == first)
    change_json(index, weight_map=weight_map | {name: other})
    assert error_of(sharded) == f"{index}: tensor {name!r} is not in its shard {other!r}"
    change_json(index, weight_map=weight_map | {"extra": other})
    assert error_of(sharded) == f"{index}: tensor 'extra' is not in its shard {other!r}"
    change_json(index, weight_map=weight_map)
    tensors = load_file(sharded / other)
    save_file(tensors | {name: load_file(sharded / first)[name]}, sharded / other)
    assert f"tensor {name!r} is in two shards, " in error_of(sharded)
    (sharded / other).unlink()
    assert error_of(sharded, FileNotFoundError) == f"{index}: shard {other!r} does not exist"


def load_or_one_line(directory: Path) -> bool:
    """Return whether the checkpoint loads; any other outcome than one line fails."""
    try:
        checkpoints.load_model(directory)
    except (ValueError, OSError) as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_a_file_cut_anywhere_is_refused(single):
    path = single / WEIGHTS
    whole = path.read_bytes()
    assert load_or_one_line(single)
    for length in {*range(0, 40), *range(40, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert not load_or_one_line(single)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "generation_config.json"])
@FUZZ
@given(data=st.data())
def test_changed_bytes_load_or_give_one_line(sources, name, data, tmp_path_factory):
    directory = fuzzed_copy(sources["single"], tmp_path_factory)
    flip_bytes(directory / name, data)
    load_or_one_line(directory)


@FUZZ
@given(data=st.data())
def test_changed_bytes_of_an_index_load_or_give_one_line(sources, data, tmp_path_factory):
    directory = fuzzed_copy(sources["sharded"], tmp_path_factory)
    flip_bytes(directory / INDEX, data)
    load_or_one_line(directory)


@FUZZ
@given(raw=st.binary(max_size=64), is_framed=st.booleans())
def test_random_bytes_give_one_line(sources, raw, is_framed, tmp_path_factory):
    directory = fuzzed_copy(sources["single"], tmp_path_factory)
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw if is_framed else raw)
    assert not load_or_one_line(directory)


def fuzzed_copy(source: Path, tmp_path_factory) -> Path:
    # One folder for each source: files of another one would be read in place of these.
    directory = tmp_path_factory.getbasetemp() / f"fuzz-{source.name}"
    return Path(shutil.copytree(source, directory, dirs_exist_ok=True))


def flip_bytes(path: Path, data: st.DataObject) -> None:
    raw = bytearray(path.read_bytes())
    # The header lies at the start, and is where changes matter.
    positions = st.integers(0, min(len(raw), 2500) - 1)
    for position in data.draw(st.lists(positions, min_size=1, max_size=4)):
        raw[position] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"{}[],:'))
    path.write_bytes(raw)
