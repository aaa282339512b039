"""Converted checkpoints: weights in an Orbax checkpoint, beside the Hugging Face config files.

    jaxspec.json       marks the directory and tells its format's version
    config.json ...    configuration and tokenizer files, as Hugging Face names them
    weights/           Orbax PyTree checkpoint {Hugging Face key: array}, written by `store_writer`

Each array is one uncompressed zarr chunk, so a tensor is one file of plain bytes. Reading maps it:
no copy, and a device that holds a slice of a tensor touches that slice's pages only. Orbax itself
reads the folder too (`orbax.checkpoint.PyTreeCheckpointer().restore`), but whole tensors, copied.

Source: the zarr v2 specification, https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html; the
dtype name "bfloat16" is TensorStore's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.json_files import read_object, write_object
from checkpoints.safetensors_io import DTYPES, StoredTensor, are_counts, open_checkpoint

MARKER_FILE = "jaxspec.json"
WEIGHTS_FOLDER = "weights"
FORMAT_VERSION = 1
_ARRAY_FILE = ".zarray"
_ZARR_DTYPES: Mapping[str, np.dtype] = {
    "<f4": DTYPES["F32"],
    "<f2": DTYPES["F16"],
    "bfloat16": DTYPES["BF16"],
}


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint directory, converted or from Hugging Face.

    Raises:
      FileNotFoundError: the weights, or a part of them, do not exist.
      OSError: a file cannot be read.
      ValueError: a file is malformed; one line names it.
    """
    if is_converted(directory):
        return open_store(directory)
    return open_checkpoint(directory)


def is_converted(directory: Path) -> bool:
    """Return whether the directory holds a converted checkpoint."""
    return (directory / MARKER_FILE).exists()


def write_marker(directory: Path) -> None:
    """Mark a directory as a converted checkpoint.

    Raises:
      OSError: the file cannot be written.
    """
    write_object(directory / MARKER_FILE, {"format_version": FORMAT_VERSION})


def open_store(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a converted checkpoint, after checking every array's file.

    Raises:
      FileNotFoundError: the weights' folder or a file of an array does not exist.
      OSError: a file cannot be read.
      ValueError: the marker or an array's description is malformed, the format is newer than this
        code, or a file has the wrong length.
    """
    _check_marker(directory / MARKER_FILE)
    folder = directory / WEIGHTS_FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such directory (the converted weights)")
    arrays = sorted(path for path in folder.iterdir() if path.is_dir())
    return {path.name: _open_array(path) for path in arrays}


def _check_marker(path: Path) -> None:
    version = read_object(path).get("format_version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{path}: format_version={version!r} is not a positive integer")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version={version} is newer than {FORMAT_VERSION}, the newest that "
            "this jaxspec reads: update jaxspec"
        )


def _open_array(path: Path) -> StoredTensor:
    """Check one array's description and the length of its only chunk."""
    description = path / _ARRAY_FILE
    if not description.exists():
        raise FileNotFoundError(f"{description}: no such file (it describes tensor {path.name!r})")
    array = read_object(description)
    shape = array.get("shape")
    where = f"{description}: tensor {path.name!r}"
    if not are_counts(shape) or not shape:
        raise ValueError(f"{where}: shape {shape!r} is not a list of sizes")
    code: Any = array.get("dtype")
    if not isinstance(code, str) or code not in _ZARR_DTYPES:
        raise ValueError(
            f"{where}: dtype {code!r} is not supported (supported: {', '.join(_ZARR_DTYPES)})"
        )
    plain = {"zarr_format": 2, "chunks": shape, "compressor": None, "filters": None, "order": "C"}
    for field, expected in plain.items():
        if array.get(field) != expected:
            raise ValueError(f"{where}: {field} is {array.get(field)!r}, expected {expected!r}")
    dtype = _ZARR_DTYPES[code]
    chunk = path / ".".join("0" * len(shape))
    _check_length(chunk, path.name, math.prod(shape) * dtype.itemsize, f"{dtype.name} {shape}")
    return StoredTensor(path.name, chunk, dtype, tuple(shape), 0)


def _check_length(chunk: Path, name: str, expected: int, kind: str) -> None:
    if not chunk.exists():
        raise FileNotFoundError(f"{chunk}: no such file (it holds tensor {name!r})")
    size = chunk.stat().st_size
    if size != expected:
        raise ValueError(
            f"{chunk}: tensor {name!r} has {size} bytes, expected {expected} for {kind}"
        )
