"""Element types that weights may have, and copies that convert and transpose in little memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.safetensors_io import DTYPES

# A transposed copy touches one cache line per element and row; blocks of this many keep them hot.
_COPY_BLOCK = 128
_STRAIGHT_BLOCK_BYTES = 2**22


def checked_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Return the dtype if weights may have it.

    Raises:
      ValueError: it is none of float32, float16 and bfloat16.
    """
    known = {stored.name: stored for stored in DTYPES.values()}
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in known:
        raise ValueError(f"dtype={name!r} is none of {', '.join(known)}")
    return known[name]


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array in whole pages of its own.

    JAX's CPU device takes such an array over without a copy, because it is aligned; and where it
    is freed, its memory goes back at once. What `np.empty` returns is neither: freed arrays between
    kept ones leave holes, which added up to 80 MB for 26 layers of 30 MB.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy with conversion and, where the layouts differ, transposition.

    Raises:
      OverflowError: a value that is converted to float16 does not fit it.
    """
    is_narrowed = target.dtype == np.float16 and source.dtype != target.dtype
    with np.errstate(over="ignore"):
        for block in _blocks(target, source):
            target[block] = source[block]
            if is_narrowed and not np.isfinite(target[block]).all():
                raise OverflowError("does not fit float16")


def _blocks(target: np.ndarray, source: np.ndarray) -> Iterator[tuple]:
    """Yield indices that cover the arrays: rows, or blocks of rows and columns to transpose."""
    if not target.size:
        return
    if target.flags.c_contiguous and source.flags.c_contiguous:
        step = max(1, _STRAIGHT_BLOCK_BYTES * target.shape[0] // target.nbytes)
        for row in range(0, target.shape[0], step):
            yield (slice(row, row + step),)
        return
    for row in range(0, target.shape[0], _COPY_BLOCK):
        for column in range(0, target.shape[-1], _COPY_BLOCK):
            yield (slice(row, row + _COPY_BLOCK), ..., slice(column, column + _COPY_BLOCK))
