"""Conversion of whole checkpoints: Hugging Face directories <-> Orbax, tensor by tensor."""

from __future__ import annotations

import dataclasses
import fractions
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from checkpoints.arrays import checked_dtype, copy, empty
from checkpoints.config_files import CONFIG_FILE, read_config
from checkpoints.directories import written_beside
from checkpoints.hub import find_directory
from checkpoints.huggingface import check_tensors
from checkpoints.json_files import read_object, write_object
from checkpoints.key_table import iterate_keys
from checkpoints.safetensors_io import INDEX_FILE, StoredTensor, TensorToWrite
from checkpoints.shards import write_weights
from checkpoints.store import MARKER_FILE, WEIGHTS_FOLDER, open_tensors, write_marker
from checkpoints.tokenizer import check_files

Format = Literal["orbax", "hf"]
# Everything about a model but its weights: configuration, tokenizer, chat templates, terms of use.
_COPIED = (
    "*.json",
    "*.txt",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
    "README.md",
)
_NOT_COPIED = {INDEX_FILE, MARKER_FILE}
# All that a checkpoint has at its top: ours, those of `save_pretrained`, downloads from the hub.
_FILES = (*(name for name in _COPIED if "/" not in name), "*.safetensors", ".gitattributes")
_FOLDERS = {"additional_chat_templates", ".cache"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion wrote.

    Attributes:
      directory: where.
      num_tensors: how many tensors.
      num_bytes: of all tensors.
      dtypes: names of their element types, sorted.
    """

    directory: Path
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Format = "orbax",
    dtype: jax.typing.DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Convert a checkpoint of either format to either format.

    Without `dtype`, every tensor keeps its bytes and dtype, and every other file its bytes; with
    it, `config.json` names the new dtype. A head that repeats the embedding it is tied to is
    dropped. Beyond the mapped files, one tensor at a time is in memory, and that only if its dtype
    changes. The destination appears complete or not at all.

    With `overwrite`, a kill leaves the old checkpoint or the new one, with one exception: where
    the file system cannot exchange two directories in one step (some network file systems), a kill
    between two renames leaves the old one beside its place, under a hidden name. The next
    conversion to that place on the same host puts it back; loading names it.

    Args:
      source: Hugging Face directory, converted directory or hub id.
      destination: directory to write; parent directories are created.
      to: "orbax" or "hf".
      dtype: of the written weights: float32, bfloat16 or float16; None = as stored.
      max_shard_bytes: "hf": most bytes of tensors in one file; a single tensor may exceed it.
      overwrite: replace a checkpoint at the destination, once the new one is complete; nothing
        but a checkpoint is replaced.
      on_progress: called with the bytes written so far and those of all tensors.

    Raises:
      FileExistsError: the destination exists and may not be replaced: without `overwrite`, or
        because it is no checkpoint or holds something else besides.
      FileNotFoundError: the source or a file it needs does not exist.
      OSError: a file cannot be read or written.
      ValueError: an argument is out of range, source and destination overlap, the source is
        malformed or not supported, or a weight does not fit float16.
    """
    if to not in ("orbax", "hf"):
        raise ValueError(f"to={to!r} is none of orbax, hf")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is not at least 1")
    if os.fspath(destination) == "":
        raise ValueError("the destination is empty: expected a directory")
    wanted = None if dtype is None else checked_dtype(dtype)
    origin, target = find_directory(source).resolve(), Path(destination).resolve()
    _check_places(origin, target, overwrite)
    tensors = _tensors(origin, wanted)
    total = sum(tensor.num_bytes for tensor in tensors)
    with written_beside(target, overwrite=overwrite) as temporary:
        _require_space(target, total)
        on_progress(0, total)
        _copy_files(origin, temporary, wanted)
        report = _Progress(total, on_progress)
        if to == "hf":
            write_weights(temporary, tensors, max_shard_bytes, report)
        else:
            _write_orbax(temporary, target, tensors, report)
    dtypes = sorted({tensor.dtype.name for tensor in tensors})
    return Conversion(target, len(tensors), total, tuple(dtypes))


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "5GB", "300 MiB" or "1000000".

    Raises:
      ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)\s*([A-Z]*)", text.strip().upper(), re.ASCII)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 5GB, 300MB or 1000000")
    return int(fractions.Fraction(match[1]) * _UNITS[match[2]])


class _Progress:
    """Adds up the bytes of written tensors."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None]) -> None:
        self._total, self._on_progress, self._done = total, on_progress, 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._on_progress(self._done, self._total)


def _check_places(origin: Path, target: Path, overwrite: bool) -> None:
    """Refuse a destination whose replacement would destroy the source or what is no checkpoint."""
    if origin == target:
        raise ValueError(f"{target}: source and destination are the same directory")
    if origin in target.parents:
        raise ValueError(f"{target}: the destination lies inside the source {origin}")
    if target in origin.parents:
        raise ValueError(f"{target}: the source {origin} lies inside the destination")
    if overwrite and target.is_dir() and any(target.iterdir()):
        reason = _why_no_checkpoint(target)
        if reason is not None:
            raise FileExistsError(
                f"{target}: {reason}, so it is no checkpoint and is not overwritten"
            )


def _why_no_checkpoint(target: Path) -> str | None:
    """Return why a directory may hold what a conversion could not give back, or None."""
    path = target / CONFIG_FILE
    if not path.exists():
        return f"has no {CONFIG_FILE}"
    try:
        is_model = "model_type" in read_object(path)
    except (ValueError, OSError):
        is_model = False
    if not is_model:
        return f"its {CONFIG_FILE} names no model_type"
    is_converted = (target / MARKER_FILE).exists()
    if not is_converted and not any(target.glob("*.safetensors")):
        return "has no weights"
    folders = _FOLDERS | ({WEIGHTS_FOLDER} if is_converted else set())
    for entry in sorted(target.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            is_known = entry.name in folders
        else:
            is_known = any(entry.match(pattern) for pattern in _FILES)
        if not is_known:
            return f"holds {entry.name!r}"
    return None


def _tensors(origin: Path, wanted: np.dtype | None) -> list[TensorToWrite]:
    """Check the whole source and return what is to be written of it, in file order."""
    config = read_config(origin)
    check_files(origin)
    stored = open_tensors(origin)
    check_tensors(origin, stored, config)
    return [_to_write(stored[key.stored], wanted) for key in iterate_keys(config)]


def _to_write(tensor: StoredTensor, wanted: np.dtype | None) -> TensorToWrite:
    dtype = tensor.dtype if wanted is None else wanted

    def produce() -> np.ndarray:
        stored = tensor.read()
        if stored.dtype == dtype:
            return stored
        value = empty(tensor.shape, dtype)
        try:
            copy(value, stored)
        except OverflowError as error:
            raise ValueError(f"{tensor.path}: tensor {tensor.name!r} {error}") from None
        return value

    return TensorToWrite(tensor.name, tensor.shape, dtype, produce)


def _require_space(target: Path, num_bytes: int) -> None:
    """Refuse at once what would fail after minutes."""
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise OSError(f"{target}: needs {num_bytes} bytes, but {free} are free on its disk")


def _copy_files(origin: Path, temporary: Path, wanted: np.dtype | None) -> None:
    for path in sorted({path for pattern in _COPIED for path in origin.glob(pattern)}):
        if path.name in _NOT_COPIED or not path.is_file():
            continue
        copied = temporary / path.relative_to(origin)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copied)
    if wanted is None:
        return
    path = temporary / CONFIG_FILE
    config = read_object(path)
    # transformers v4 reads the first spelling, v5 the second.
    fields = {"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}
    renamed = config | dict.fromkeys(sorted(fields), wanted.name)
    if renamed != config:
        write_object(path, renamed)


def _write_orbax(
    temporary: Path,
    target: Path,
    tensors: Sequence[TensorToWrite],
    on_written: Callable[[int], None],
) -> None:
    # Imported here because Orbax takes long and only writing needs it.
    from checkpoints.store_writer import write_store

    write_store(temporary / WEIGHTS_FOLDER, tensors, on_written)
    write_marker(temporary)
    try:
        names = set(open_tensors(temporary))
    except (ValueError, OSError):
        names = set()
    if names != {tensor.name for tensor in tensors}:
        raise OSError(
            f"{target}: this release of Orbax did not write one plain array for each tensor"
        )
