"""Writes safetensors weights: one file, or shards with their index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoints.json_files import write_object
from checkpoints.safetensors_io import INDEX_FILE, SINGLE_FILE, TensorToWrite, write_file


def write_weights(
    directory: Path,
    tensors: Sequence[TensorToWrite],
    max_shard_bytes: int,
    on_written: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the tensors in their order, under the names that transformers gives its files.

    Args:
      directory: where to write.
      tensors: what to write.
      max_shard_bytes: most bytes of tensors in one file; a single tensor may exceed it.
      on_written: called with the bytes of each tensor that has been written.

    Raises:
      OSError: a file cannot be written.
      ValueError: a tensor cannot be produced.
    """
    shards = split(tensors, max_shard_bytes)
    count = len(shards)
    names = [SINGLE_FILE]
    if count > 1:
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, on_written)
    if count > 1:
        files = zip(names, shards, strict=True)
        weight_map = {tensor.name: name for name, shard in files for tensor in shard}
        metadata = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
        write_object(directory / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def split(tensors: Sequence[TensorToWrite], max_bytes: int) -> list[list[TensorToWrite]]:
    """Group tensors, in order, so that each group's bytes sum to at most `max_bytes`."""
    groups: list[list[TensorToWrite]] = [[]]
    total = 0
    for tensor in tensors:
        if groups[-1] and total + tensor.num_bytes > max_bytes:
            groups.append([])
            total = 0
        groups[-1].append(tensor)
        total += tensor.num_bytes
    return groups
