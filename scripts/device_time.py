"""Time on the device, read off JAX's own profiler."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """What one call costs the device.

    Attributes:
      busy_us: microseconds in kernels and copies.
      num_launches: kernels and copies that it launches.
      kernels: microseconds by kernel name.
    """

    busy_us: float
    num_launches: float
    kernels: dict[str, float]

    def total_us(self, gap_us: float) -> float:
        """Return microseconds with a gap of `gap_us` after every kernel."""
        return self.busy_us + self.num_launches * gap_us


def events(trace: Path) -> list[tuple[str, float]]:
    """Return (name, microseconds) of everything that GPUs ran during a trace."""
    found = []
    for path in trace.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [(event.name, event.duration_ns / 1e3) for event in line.events]
    return found


def device_time(function: Callable[..., Any], *args: Any, num_calls: int = 20) -> DeviceTime:
    """Return what one call of a compiled function costs the device, on average.

    The inputs stay in the cache where they fit: what a kernel reads has just been written in
    decoding too. Without a GPU there are no events, and the host's clock is read instead.
    """
    jax.block_until_ready(function(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            begin = time.perf_counter()
            for _ in range(num_calls):
                result = function(*args)
            jax.block_until_ready(result)
            seconds = time.perf_counter() - begin
        found = events(Path(folder))
    if not found:
        return DeviceTime(seconds / num_calls * 1e6, 1.0, {})
    kernels: dict[str, float] = {}
    for name, us in found:
        kernels[name] = kernels.get(name, 0.0) + us / num_calls
    return DeviceTime(sum(kernels.values()), len(found) / num_calls, kernels)


def launch_gap(num_launches: int = 200, num_runs: int = 9) -> float:
    """Return microseconds from the end of one small kernel to the end of its successor's start.

    Measured as wall time less busy time of a chain of dependent small reductions in one program.
    """

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(num_launches):
            x = x - jnp.max(x, axis=0, keepdims=True) * 0.5
        return x

    x = jnp.arange(64.0 * 64).reshape(64, 64)
    cost = device_time(chain, x)
    seconds = []
    for _ in range(num_runs):
        begin = time.perf_counter()
        jax.block_until_ready(chain(x))
        seconds.append(time.perf_counter() - begin)
    wall_us = statistics.median(seconds) * 1e6
    return max(wall_us - cost.busy_us, 0.0) / max(cost.num_launches, 1.0)
