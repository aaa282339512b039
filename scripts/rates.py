"""What one device can do at best: bytes copied, bytes read, products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Calls that are timed together, so that the host's part of one is hidden behind another.
NUM_QUEUED = 5


def median_seconds(function: Callable[[], Any], num_runs: int) -> float:
    """Return the median wall time of a call whose result is waited for, after one untimed call."""
    jax.block_until_ready(function())
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_copy_rate(num_bytes: int, num_runs: int = 9) -> float:
    """Return bytes per second, read and written, of a copy on the device."""
    copy = jax.jit(jnp.copy)
    array = jnp.ones((num_bytes // 4,), jnp.float32)
    seconds = median_seconds(lambda: [copy(array) for _ in range(NUM_QUEUED)], num_runs)
    return 2 * array.nbytes * NUM_QUEUED / seconds


def measure_read_rate(num_bytes: int, num_runs: int = 9) -> float:
    """Return bytes per second read by a sum over an array, the fastest of a few forms of it."""
    array = jnp.ones((num_bytes // 4 // 2**16, 2**16), jnp.float32)

    def seconds(width: int) -> float:
        total = jax.jit(lambda x: jnp.sum(x.reshape(-1, width), axis=1))
        return median_seconds(lambda: [total(array) for _ in range(NUM_QUEUED)], num_runs)

    best = min(seconds(width) for width in (2**10, 2**12, 2**14, 2**16))
    return NUM_QUEUED * array.nbytes / best


def measure_product_rate(size: int, dtype: jax.typing.DTypeLike, num_calls: int = 64) -> float:
    """Return operations per second of a square product, two for each multiply and add.

    A GPU at its power limit slows down within milliseconds: the calls of 8192 take together as long
    as the prefill of a long prompt.
    """
    product = jax.jit(jnp.matmul)
    array = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    seconds = median_seconds(lambda: [product(array, array) for _ in range(num_calls)], 5)
    return 2 * size**3 * num_calls / seconds
