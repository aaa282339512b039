"""Hugging Face checkpoint directories <-> `Qwen3`, tensor by tensor and without torch."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from checkpoints.config_files import read_config, write_config
from checkpoints.json_files import write_object
from checkpoints.key_table import EMBEDDING, HEAD, Key, get_parameter, iterate_keys
from checkpoints.safetensors_io import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    open_checkpoint,
    write_file,
)
from jaxspec.config import Qwen3Config
from jaxspec.model import Qwen3

# A transposed copy touches one cache line per element and row; blocks of this many keep them hot.
_COPY_BLOCK = 128


def load_model(
    directory: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike | None = None
) -> Qwen3:
    """Load a Qwen3 from a Hugging Face directory.

    Memory in use beyond the weights themselves stays below one parameter: files are mapped, and
    one fused parameter at a time is assembled on the host.

    Args:
      directory: holds `config.json` and safetensors weights, one file or shards with an index.
      dtype: of the parameters: float32, bfloat16 or float16; None = that of the stored weights
        (float32, which holds them all, where they differ).

    Raises:
      FileNotFoundError: the directory, its configuration or its weights do not exist.
      MemoryError: the devices cannot hold the parameters.
      OSError: a file cannot be read.
      ValueError: a file is malformed, a tensor is missing, unknown or of the wrong shape, or the
        model is not a supported dense Qwen3.
    """
    directory = Path(directory)
    return load_weights(directory, read_config(directory), dtype=dtype)


def load_weights(
    directory: Path, config: Qwen3Config, *, dtype: jax.typing.DTypeLike | None = None
) -> Qwen3:
    """Load the weights of a directory whose configuration has been read; see `load_model`."""
    wanted = None if dtype is None else _checked_dtype(dtype)
    tensors = open_checkpoint(directory)
    _check_tensors(directory, tensors, config)
    if wanted is None:
        stored = {tensor.dtype for tensor in tensors.values()}
        wanted = stored.pop() if len(stored) == 1 else np.dtype(np.float32)
    model = nnx.eval_shape(lambda: Qwen3(config, dtype=wanted, rngs=nnx.Rngs(0)))
    for path, keys in itertools.groupby(iterate_keys(config), key=lambda key: key.parameter):
        parameter = get_parameter(model, path)
        value = _assemble(tensors, list(keys), config, parameter.shape, wanted)
        parameter.set_value(_place(path, value))
    return model


def _checked_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    known = {stored.name: stored for stored in DTYPES.values()}
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in known:
        raise ValueError(f"dtype={name!r} is none of {', '.join(known)}")
    return known[name]


def _check_tensors(directory: Path, tensors: dict[str, StoredTensor], config: Qwen3Config) -> None:
    """Require exactly the tensors of the configuration, and drop those that carry nothing."""
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]
    expected = set()
    for key in iterate_keys(config):
        tensor = tensors.get(key.stored)
        if tensor is None:
            raise ValueError(f"{directory}: tensor {key.stored!r} is missing")
        _check_shape(tensor, key, config)
        expected.add(key.stored)
    if config.tie_word_embeddings and HEAD.stored in tensors:
        head = tensors.pop(HEAD.stored)
        _check_shape(head, HEAD, config)
        _check_tied(tensors[EMBEDDING.stored], head)
    for name, tensor in tensors.items():
        if name not in expected:
            raise ValueError(f"{tensor.path}: tensor {name!r} is no part of a dense Qwen3 model")


def _check_shape(tensor: StoredTensor, key: Key, config: Qwen3Config) -> None:
    expected = key.shape(config)
    if tensor.shape != expected:
        raise ValueError(
            f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected "
            f"{list(expected)}"
        )


def _check_tied(embedding: StoredTensor, head: StoredTensor) -> None:
    """Require that a head stored beside the embedding it is tied to is a copy of it."""
    rows = range(0, head.shape[0], 4096)
    left, right = embedding.read(), head.read()
    is_equal = left.dtype == right.dtype and all(
        np.array_equal(
            left[row : row + 4096].view(np.uint8), right[row : row + 4096].view(np.uint8)
        )
        for row in rows
    )
    if not is_equal:
        raise ValueError(
            f"{head.path}: tie_word_embeddings is true, but tensors {embedding.name!r} and "
            f"{head.name!r} differ"
        )


def _assemble(
    tensors: Mapping[str, StoredTensor],
    keys: list[Key],
    config: Qwen3Config,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """Return one parameter, its parts copied from the mapped tensors and converted."""
    value = np.empty(shape, dtype)
    for key in keys:
        stored = tensors[key.stored]
        target = key.view(value, config)
        _copy(target, stored.read().reshape(target.shape))
        if dtype == np.float16 and stored.dtype != dtype and not np.isfinite(target).all():
            raise ValueError(f"{stored.path}: tensor {key.stored!r} does not fit float16")
    return value


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy with conversion; a transposed copy goes in blocks along first and last axis."""
    with np.errstate(over="ignore"):
        if target.flags.c_contiguous and source.flags.c_contiguous:
            target[...] = source
            return
        for row in range(0, target.shape[0], _COPY_BLOCK):
            rows = slice(row, row + _COPY_BLOCK)
            for column in range(0, target.shape[-1], _COPY_BLOCK):
                columns = slice(column, column + _COPY_BLOCK)
                target[rows, ..., columns] = source[rows, ..., columns]


def _place(path: str, value: np.ndarray, sharding: Sharding | None = None) -> jax.Array:
    """Move one parameter to the devices and wait, so that its host copy can be freed."""
    try:
        return jax.block_until_ready(jax.device_put(value, sharding))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"out of device memory at parameter {path!r} ({value.nbytes} bytes): load in a smaller "
            "dtype, or give JAX more memory with XLA_PYTHON_CLIENT_MEM_FRACTION (default 0.75) or "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false"
        ) from None


def save(
    model: Qwen3,
    directory: str | os.PathLike[str],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Save a model as a Hugging Face directory that transformers v4.51 and later load.

    The directory appears complete or not at all: everything is written beside it first.

    Args:
      model: the model; a tied head is not stored.
      directory: must not exist or be empty; parent directories are created.
      dtype: of the stored weights: float32, bfloat16 or float16; None = that of the model.
      max_shard_bytes: most bytes of tensors in one file; a single tensor may exceed it.

    Raises:
      FileExistsError: the directory exists and is not empty.
      OSError: a file cannot be written.
      ValueError: `dtype` or `max_shard_bytes` is out of range, or a weight does not fit float16.
    """
    directory = Path(directory)
    stored_dtype = _checked_dtype(model.dtype if dtype is None else dtype)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is not at least 1")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: exists and is not an empty directory")
    with _written_beside(directory) as temporary:
        write_config(model.config, temporary, dtype_name=stored_dtype.name)
        _write_weights(model, temporary, stored_dtype, max_shard_bytes)


@contextlib.contextmanager
def _written_beside(directory: Path) -> Iterator[Path]:
    """Yield a new directory that takes the place of `directory` if the body succeeds."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    outer = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        # `mkdtemp` makes private directories; this one gets the permissions of any other.
        inner = outer / directory.name
        inner.mkdir()
        yield inner
        inner.rename(directory)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _write_weights(model: Qwen3, directory: Path, dtype: np.dtype, max_shard_bytes: int) -> None:
    config = model.config
    keys = {key.stored: key for key in iterate_keys(config)}

    def produce(name: str) -> np.ndarray:
        key = keys[name]
        source = key.view(np.asarray(get_parameter(model, key.parameter)[...]), config)
        value = np.empty(source.shape, dtype)
        _copy(value, source)
        if dtype == np.float16 and source.dtype != dtype and not np.isfinite(value).all():
            raise ValueError(f"tensor {name!r} does not fit float16")
        return value

    sizes = {name: math.prod(key.shape(config)) * dtype.itemsize for name, key in keys.items()}
    shards = _split(sizes, max_shard_bytes)
    file_names = [SINGLE_FILE]
    if len(shards) > 1:
        count = len(shards)
        file_names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file_name, names in zip(file_names, shards, strict=True):
        entries = [(name, keys[name].shape(config)) for name in names]
        write_file(directory / file_name, entries, dtype, produce)
    if len(shards) > 1:
        weight_map = {
            name: file_name
            for file_name, names in zip(file_names, shards, strict=True)
            for name in names
        }
        metadata = {"total_size": sum(sizes.values())}
        write_object(directory / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def _split(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Group names, in order, so that each group's sizes sum to at most `max_bytes`."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > max_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups
