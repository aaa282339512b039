"""Hugging Face checkpoint directories <-> `Qwen3`, tensor by tensor and without torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from checkpoints.arrays import checked_dtype, copy, empty
from checkpoints.config_files import CONFIG_FILE, read_config, write_config
from checkpoints.directories import written_beside
from checkpoints.key_table import EMBEDDING, HEAD, Key, get_parameter, iterate_keys
from checkpoints.safetensors_io import StoredTensor, TensorToWrite
from checkpoints.shards import write_weights
from checkpoints.store import open_tensors
from jaxspec.config import Qwen3Config
from jaxspec.model import Qwen3
from jaxspec.sharding import (
    check_mesh,
    from_parts,
    model_size,
    shard_config,
    shard_ranges,
    spans_processes,
)


def load_model(
    directory: str | os.PathLike[str],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Qwen3:
    """Load a Qwen3 from a Hugging Face or converted directory.

    Memory in use beyond the weights themselves stays below one parameter: files are mapped, and
    one fused parameter at a time is assembled on the host, each device's part by itself. A process
    copies only what its own devices hold.

    Args:
      directory: holds `config.json` and either safetensors weights, one file or shards with an
        index, or what `convert` makes of them.
      dtype: of the parameters: float32, bfloat16 or float16; None = that of the stored weights
        (float32, which holds them all, where they differ).
      mesh: devices to spread the parameters over, with axes `data` and `model`; None = all on the
        default device.

    Raises:
      FileNotFoundError: the directory, its configuration or its weights do not exist.
      MemoryError: the devices cannot hold the parameters.
      OSError: a file cannot be read.
      ValueError: a file is malformed, a tensor is missing, unknown or of the wrong shape, the
        model is not a supported dense Qwen3, or it cannot be spread over the mesh.
    """
    directory = Path(directory)
    return load_weights(directory, read_config(directory), dtype=dtype, mesh=mesh)


def load_weights(
    directory: Path,
    config: Qwen3Config,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Qwen3:
    """Load the weights of a directory whose configuration has been read; see `load_model`."""
    wanted = None if dtype is None else checked_dtype(dtype)
    if mesh is not None:
        check_mesh(mesh)
    try:
        shape = shard_config(config, model_size(mesh))
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG_FILE}: {error}") from None
    tensors = open_tensors(directory)
    check_tensors(directory, tensors, config)
    if spans_processes(mesh):
        # Other processes read the rest.
        tensors = {
            name: dataclasses.replace(tensor, reads_ahead=False) for name, tensor in tensors.items()
        }
    if wanted is None:
        stored = {tensor.dtype for tensor in tensors.values()}
        wanted = stored.pop() if len(stored) == 1 else np.dtype(np.float32)
    # Until its values come, a model of one device's parts.
    model = nnx.eval_shape(lambda: Qwen3(shape, dtype=wanted, rngs=nnx.Rngs(0)))
    for path, keys in itertools.groupby(iterate_keys(config), key=lambda key: key.parameter):
        parameter = get_parameter(model, path)
        part = functools.partial(
            assemble, tensors, list(keys), config, model_size(mesh), parameter.shape, wanted
        )
        num_bytes = math.prod(parameter.shape) * wanted.itemsize
        parameter.set_value(_place(path, part, num_bytes, mesh))
    model.config, model.mesh = config, mesh
    return model


def check_tensors(directory: Path, tensors: dict[str, StoredTensor], config: Qwen3Config) -> None:
    """Require exactly the tensors of the configuration, and drop those that carry nothing.

    Raises:
      ValueError: a tensor is missing, unknown, of the wrong shape, or a head differs from the
        embedding that it is tied to.
    """
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


def assemble(
    tensors: Mapping[str, StoredTensor],
    keys: Sequence[Key],
    config: Qwen3Config,
    num_parts: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: int,
) -> np.ndarray:
    """Return one device's part of one parameter, copied from the mapped tensors and converted.

    Args:
      tensors: of the checkpoint.
      keys: of the parameter.
      config: the whole model.
      num_parts: parts that the model is split into.
      shape: of the part; rows past the end of the vocabulary are zeros.
      dtype: of the part.
      index: which part it is.

    Raises:
      ValueError: a weight does not fit float16.
    """
    value = empty(shape, dtype)
    part_config = shard_config(config, num_parts)
    ranges = shard_ranges(config, num_parts, index)
    for key in keys:
        stored = tensors[key.stored]
        source = key.stored_part(stored.read(), config, ranges)
        target = _first_of(key.view(value, part_config), source.shape)
        try:
            copy(target, source)
        except OverflowError as error:
            raise ValueError(f"{stored.path}: tensor {key.stored!r} {error}") from None
    return value


def _first_of(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a view of an array without its padding."""
    return array[tuple(slice(size) for size in shape)]


def _place(
    path: str, part: Callable[[int], np.ndarray], num_bytes: int, mesh: Mesh | None
) -> jax.Array:
    """Move one parameter to the devices and wait, so that its host copies can be freed.

    Args:
      path: of the parameter.
      part: returns the host's copy of one part of it, which must have no other name: that would
        keep it while the next parameter is assembled.
      num_bytes: of a part.
      mesh: the devices, None = the default one.

    Raises:
      MemoryError: a device cannot hold its part.
    """
    try:
        if mesh is None:
            value = jax.device_put(part(0))
        else:
            value = from_parts(mesh, path.split(".")[-1], part)
        return jax.block_until_ready(value)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"out of device memory at parameter {path!r} ({num_bytes} bytes): load in a smaller "
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

    The directory appears complete or not at all: everything is written beside it first. It does
    not show whether the model was spread over a mesh.

    Args:
      model: the model; a tied head is not stored.
      directory: must not exist or be empty; parent directories are created.
      dtype: of the stored weights: float32, bfloat16 or float16; None = that of the model.
      max_shard_bytes: most bytes of tensors in one file; a single tensor may exceed it.

    Raises:
      FileExistsError: the directory exists and is not empty.
      OSError: a file cannot be written.
      ValueError: `dtype` or `max_shard_bytes` is out of range, a weight does not fit float16, or
        the model is spread over devices of several processes.
    """
    directory = Path(directory)
    stored_dtype = checked_dtype(model.dtype if dtype is None else dtype)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is not at least 1")
    if model.mesh is not None and not model.embed_tokens[...].is_fully_addressable:
        raise ValueError(
            "the model is spread over devices of several processes: load it in one to save it"
        )
    tensors = [_to_write(model, key, stored_dtype) for key in iterate_keys(model.config)]
    with written_beside(directory) as temporary:
        write_config(model.config, temporary, dtype_name=stored_dtype.name)
        write_weights(temporary, tensors, max_shard_bytes)


def _to_write(model: Qwen3, key: Key, dtype: np.dtype) -> TensorToWrite:
    config, num_parts = model.config, model_size(model.mesh)
    shape = key.shape(config)
    part_config = shard_config(config, num_parts)

    def produce() -> np.ndarray:
        parameter = get_parameter(model, key.parameter)[...]
        value = empty(shape, dtype)
        for index in range(num_parts):
            target = key.stored_part(value, config, shard_ranges(config, num_parts, index))
            source = key.view(_host_part(parameter, model.mesh, index), part_config)
            try:
                copy(target, _first_of(source, target.shape))
            except OverflowError as error:
                raise ValueError(f"tensor {key.stored!r} {error}") from None
        return value

    return TensorToWrite(key.stored, shape, dtype, produce)


def _host_part(parameter: jax.Array, mesh: Mesh | None, index: int) -> np.ndarray:
    """Return the host's copy of what the devices of one place of a model hold of a parameter."""
    if mesh is None:
        return np.asarray(parameter)
    device = mesh.devices[0, index]
    shards = parameter.addressable_shards
    return np.asarray(next(shard.data for shard in shards if shard.device == device))
