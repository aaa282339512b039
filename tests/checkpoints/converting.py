"""What the tests of converted checkpoints share: cheap random checkpoints, and their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.config_files import write_config
from checkpoints.key_table import iterate_keys
from checkpoints.safetensors_io import TensorToWrite
from checkpoints.shards import write_weights
from checkpoints.store import open_tensors
from jaxspec.config import Qwen3Config

SMALL = Qwen3Config(97, 64, 96, 2, 4, 2, 16, 1e-6, 1e4, 256, tie_word_embeddings=False)


def write_checkpoint(
    path: Path,
    config: Qwen3Config = SMALL,
    *,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    max_shard_bytes: int = 10**9,
    **dtypes: Any,
) -> Path:
    """Write a random Hugging Face checkpoint without a model and without randomness per weight.

    Args:
      path: directory to create.
      config: the model's shape.
      seed: of the values, which repeat.
      dtype: of the tensors.
      max_shard_bytes: of one file.
      **dtypes: dtypes of single tensors, by the last part but one of their names.
    """
    values = np.random.default_rng(seed).standard_normal(2**18, np.float32)

    def tensor(name: str, shape: tuple[int, ...]) -> TensorToWrite:
        kind = np.dtype(dtypes.get(name.split(".")[-2], dtype))
        return TensorToWrite(name, shape, kind, lambda: np.resize(values.astype(kind), shape))

    path.mkdir(parents=True)
    write_config(config, path, dtype_name=np.dtype(dtype).name)
    tensors = [tensor(key.stored, key.shape(config)) for key in iterate_keys(config)]
    write_weights(path, tensors, max_shard_bytes)
    return path


def contents(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every stored tensor."""
    return {
        name: (tensor.dtype.name, tensor.shape, tensor.read().tobytes())
        for name, tensor in open_tensors(directory).items()
    }
