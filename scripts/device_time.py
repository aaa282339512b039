"""Time on the device, read off JAX's own profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Row = dict[str, Any]
# In the names of kernels and operations by which devices talk to each other: NCCL's and XLA's own.
_COLLECTIVE = re.compile(
    r"nccl|nvshmem|collective|all[-_]?reduce|all[-_]?gather|all[-_]?to[-_]?all|reduce[-_]?scatter",
    re.IGNORECASE,
)


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


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel or copy that a GPU ran: its name, its HLO operation, when and how long, where."""

    name: str
    op: str
    start_us: float
    us: float
    device: str = ""

    @property
    def is_collective(self) -> bool:
        """Return whether devices talk to each other in it."""
        return bool(_COLLECTIVE.search(self.name) or _COLLECTIVE.search(self.op))


def events(trace: Path) -> list[Event]:
    """Return everything that GPUs ran during a trace, in the order of their starts."""
    found = []
    for path in trace.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [_event(event, plane.name) for event in line.events]
    return sorted(found, key=lambda event: event.start_us)


def _event(event: Any, device: str) -> Event:
    op = next((str(value) for name, value in event.stats or () if name == "hlo_op"), "")
    return Event(event.name, op, event.start_ns / 1e3, event.duration_ns / 1e3, device)


@contextlib.contextmanager
def trace() -> Iterator[list[Event]]:
    """Yield a list that holds, after the block, what GPUs ran in it."""
    found: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield found
        found += events(Path(folder))


def kernel_table(found: Sequence[Event], num_steps: int) -> tuple[dict[str, float], list[Row]]:
    """Return what a step costs in all, and by kernel, the most expensive first.

    Kernels of one name are one row. Busy time is what at least one kernel runs; a gap is the time
    after a kernel until the next one starts, and belongs to the former. Times are microseconds a
    step, `us_each` and its bounds those of one kernel.
    """
    groups: dict[str, list[tuple[Event, float]]] = {}
    busy, end = 0.0, found[0].start_us
    for event, following in zip(found, [*found[1:], None], strict=True):
        busy += max(event.start_us + event.us - max(event.start_us, end), 0.0)
        end = max(end, event.start_us + event.us)
        gap = max(following.start_us - end, 0.0) if following else 0.0
        groups.setdefault(event.name, []).append((event, gap))
    wall = end - found[0].start_us
    rows: list[Row] = []
    for name, members in groups.items():
        times = [event.us for event, _ in members]
        row: Row = {"kernel": name, "op": members[0][0].op}
        row |= {"count": len(times) / num_steps, "us_per_step": sum(times) / num_steps}
        row |= {"us_each": statistics.median(times), "us_min": min(times), "us_max": max(times)}
        rows.append(row | {"gap_us_per_step": sum(gap for _, gap in members) / num_steps})
    rows.sort(key=lambda row: -row["us_per_step"])
    total = {
        "wall_us": wall,
        "busy_us": busy,
        "gap_us": wall - busy,
        "kernels_per_step": len(found),
    }
    return {name: value / num_steps for name, value in total.items()}, rows


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
    for event in found:
        kernels[event.name] = kernels.get(event.name, 0.0) + event.us / num_calls
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
