"""Safetensors files as memory maps, without torch and with bfloat16.

Format: 8 bytes little-endian header length, a JSON header `name -> {dtype, shape, data_offsets}`,
then the tensors' bytes without gaps. Source: https://github.com/safetensors/safetensors#format.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.json_files import parse_object, read_object

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies; its bytes are read only by `read`.

    Attributes:
      name: key of the tensor.
      path: file that holds it.
      dtype: element type.
      shape: as stored.
      offset: first byte in the file.
      reads_ahead: whether reading a byte may bring in what follows it; not where only parts of
        the tensor are wanted.
    """

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    reads_ahead: bool = True

    def read(self) -> np.ndarray:
        """Return the tensor as a read-only memory map.

        Raises:
          OSError: the file cannot be opened.
        """
        offset, shape = self.offset, self.shape
        tensor = np.memmap(self.path, self.dtype, mode="r", offset=offset, shape=shape)
        if not self.reads_ahead and hasattr(mmap, "MADV_RANDOM"):
            pages: Any = tensor
            pages._mmap.madvise(mmap.MADV_RANDOM)
        return tensor


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """One tensor that a writer asks for when its turn comes, so that one at a time is in memory.

    Attributes:
      name: Hugging Face key.
      shape: as stored.
      dtype: element type that is written.
      produce: returns the tensor, C-contiguous, in that dtype and shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    produce: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are written."""
        return self.size * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file, after checking header and length.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is truncated, foreign or inconsistent.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path}: not a safetensors file ({size} bytes, expected at least 8)")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: truncated or not a safetensors file (header of {length} bytes, file of "
                f"{size})"
            )
        header = parse_object(file.read(length), f"{path}: safetensors header")
    header.pop("__metadata__", None)
    start = 8 + length
    spans = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_spans(path, spans, size - start)
    return {
        name: StoredTensor(name, path, dtype, shape, start + begin)
        for name, (dtype, shape, begin, _) in spans.items()
    }


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Check one header entry; return dtype, shape, first byte and byte after the last."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: header entry is not an object")
    code: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(
            f"{where}: dtype {code!r} is not supported (supported: {', '.join(DTYPES)})"
        )
    if not are_counts(shape):
        raise ValueError(f"{where}: shape {shape!r} is not a list of sizes")
    if not are_counts(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"{where}: data_offsets {span!r} are not a pair of ascending offsets")
    num_bytes = math.prod(shape) * DTYPES[code].itemsize
    if span[1] - span[0] != num_bytes:
        raise ValueError(
            f"{where}: data_offsets span {span[1] - span[0]} bytes, expected {num_bytes} for "
            f"{code} {shape}"
        )
    return DTYPES[code], tuple(shape), span[0], span[1]


def are_counts(value: Any) -> bool:
    """Return whether a JSON value is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_spans(path: Path, spans: Mapping[str, tuple], num_bytes: int) -> None:
    """Require that the tensors cover the data part exactly, without gap or overlap."""
    end = 0
    for name, (_, _, begin, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if stop > num_bytes:
            raise ValueError(
                f"{path}: truncated: tensor {name!r} ends at byte {stop} of the data, "
                f"which has {num_bytes}"
            )
        if begin != end:
            kind = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise ValueError(f"{path}: tensor {name!r} starts at byte {begin} and {kind} ({end})")
        end = stop
    if end != num_bytes:
        raise ValueError(f"{path}: {num_bytes} bytes of data, but the tensors end at byte {end}")


def open_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint directory: one file, or the shards of its index.

    Raises:
      FileNotFoundError: there are no safetensors weights, or a shard is missing.
      OSError: a file cannot be read.
      ValueError: a file or the index is malformed, or a tensor is stored twice.
    """
    if (directory / SINGLE_FILE).exists():
        return read_header(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).exists():
        return _open_shards(directory / INDEX_FILE)
    if any(directory.glob("pytorch_model*.bin*")):
        raise FileNotFoundError(
            f"{directory}: holds pytorch_model.bin weights only; safetensors weights are needed"
        )
    raise FileNotFoundError(f"{directory}: no weights ({SINGLE_FILE} or {INDEX_FILE} expected)")


def _open_shards(index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: weight_map is missing, empty or not an object")
    tensors: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(_shard_name(index_path, *item) for item in weight_map.items()):
        path = index_path.parent / shard
        if not path.exists():
            raise FileNotFoundError(f"{index_path}: shard {shard!r} does not exist")
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ValueError(
                    f"{index_path}: tensor {name!r} is in two shards, {tensors[name].path.name!r} "
                    f"and {shard!r}"
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ValueError(f"{index_path}: tensor {name!r} is not in its shard {shard!r}")
    return tensors


def _shard_name(index_path: Path, name: str, shard: Any) -> str:
    # A name with a directory part could point outside the checkpoint.
    is_plain = isinstance(shard, str) and not set(shard) & set("/\\\0")
    if not is_plain or not shard.endswith(".safetensors"):
        raise ValueError(
            f"{index_path}: tensor {name!r} has shard name {shard!r}, expected the plain name of a "
            ".safetensors file"
        )
    return shard


def write_file(
    path: Path, tensors: Sequence[TensorToWrite], on_written: Callable[[int], None]
) -> None:
    """Write one safetensors file, one tensor in memory at a time.

    Args:
      path: file to create.
      tensors: what to write, in file order.
      on_written: called with the bytes of each tensor that has been written.

    Raises:
      OSError: the file cannot be written.
      ValueError: a tensor cannot be produced.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # Old transformers releases refuse files without this entry.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor.produce().view(np.uint8).data)
            on_written(tensor.num_bytes)
