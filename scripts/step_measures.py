"""What a decode step costs: the product's loop, the forward alone, every kernel."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import device_time
import jax
import jax.numpy as jnp
from device_time import Event
from jax.sharding import Mesh
from step_bench import Bench, Program

from jaxspec import Qwen3
from jaxspec.cache import KVCache
from jaxspec.decode import LOOP_OPTIONS
from jaxspec.layout import BlockLayout
from jaxspec.placement import FlatModel, whole_model

Row = dict[str, Any]


def measure_step(bench: Bench, program: Program, *, num_steps: int, num_runs: int) -> Row:
    """Time a step of the loop: the wall time of a call over its steps, median of several calls.

    `call_ms` is the time of a call of no steps: dispatch, of which a step's time holds its share,
    and `ms_less_call` the step without it.
    """
    state = bench.start(program)
    state, _ = bench.run(program, state, num_steps)
    times, idle, lengths = [], [], []
    for _ in range(num_runs):
        state, seconds = bench.run(program, state, num_steps)
        taken, mean_accepted_length = bench.progress(state)
        times.append(seconds / taken * 1e3)
        lengths.append(mean_accepted_length)
        state, seconds = bench.run(program, state, 0)
        idle.append(seconds * 1e3)
    bench.keep(state)
    median, call_ms = statistics.median(times), statistics.median(idle)
    return {
        "ms": median,
        "ms_min": min(times),
        "ms_max": max(times),
        "call_ms": call_ms,
        "ms_less_call": median - call_ms / taken,
        "mean_accepted_length": statistics.mean(lengths),
        "steps": taken,
        "runs": num_runs,
        "lower_seconds": program.lower_seconds,
        "compile_seconds": program.compile_seconds,
    }


def call_model(
    model: Qwen3,
    block_tokens: jax.Array,
    num_cached: jax.Array,
    cache: KVCache,
    layout: BlockLayout,
    kernels: str | None,
) -> jax.Array:
    """Return the logits of a block."""
    return model(block_tokens, num_cached, cache, layout, kernels)[0]


@functools.partial(jax.jit, static_argnames=("layout", "kernels"), compiler_options=LOOP_OPTIONS)
def forward_loop(
    model: FlatModel,
    cache: KVCache,
    block_tokens: jax.Array,
    num_cached: jax.Array,
    growth: jax.Array,
    num_steps: jax.Array,
    *,
    layout: BlockLayout,
    kernels: str | None,
) -> jax.Array:
    """Run the forward alone, over and over, and return the last logits.

    The logits are carried whole, so that they are computed whole, and one bit of them (never set)
    moves the next block, so that no part of the forward can leave the loop. The cache is only read.
    """

    whole = whole_model(model)

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step, logits = carry
        bit = (logits[:, 0, 0] > 1e30).astype(jnp.int32)
        moved = (step.astype(jnp.float32) * growth).astype(jnp.int32)
        logits = call_model(
            whole, block_tokens + bit[:, None], num_cached + moved + bit, cache, layout, kernels
        )
        return step + 1, logits

    batch_size = block_tokens.shape[0]
    shape = (batch_size, len(layout.logit_rows), whole.config.vocab_size)
    carry = (jnp.int32(0), jnp.zeros(shape, jnp.float32))
    return jax.lax.while_loop(lambda carry: carry[0] < num_steps, body, carry)[1]


def measure_overhead(bench: Bench, program: Program, *, num_steps: int, num_runs: int) -> Row:
    """Time the loop, the same forward alone, and what is between them, in turns.

    The text of the forward grows as fast as the loop's, so that both see as much of the cache. On
    one device: the forward alone is not spread over a mesh.
    """
    state = bench.start(program)
    state, _ = bench.run(program, state, num_steps)
    _, growth = bench.progress(state)
    layout = program.drafter.layout
    block_tokens = jnp.asarray(bench.text[:, : layout.num_rows])
    num_cached = jnp.full((bench.batch_size,), bench.length - 1, jnp.int32)
    rest = (block_tokens, num_cached, jnp.float32(growth), jnp.int32(num_steps))
    forward = functools.partial(forward_loop, layout=layout, kernels=program.kernels)
    jax.block_until_ready(forward(bench.flat, state.cache, *rest))
    loop, alone = [], []
    for _ in range(num_runs):
        state, seconds = bench.run(program, state, num_steps)
        taken, _ = bench.progress(state)
        loop.append(seconds / taken * 1e3)
        started = time.perf_counter()
        jax.block_until_ready(forward(bench.flat, state.cache, *rest))
        alone.append((time.perf_counter() - started) / num_steps * 1e3)
    bench.keep(state)
    differences = [(a - b) * 1e3 for a, b in zip(loop, alone, strict=True)]
    return {
        "ms": statistics.median(loop),
        "ms_min": min(loop),
        "ms_max": max(loop),
        "forward_ms": statistics.median(alone),
        "forward_ms_min": min(alone),
        "forward_ms_max": max(alone),
        "overhead_us": (statistics.median(loop) - statistics.median(alone)) * 1e3,
        "overhead_us_min": min(differences),
        "overhead_us_max": max(differences),
        "mean_accepted_length": growth,
        "steps": taken,
        "runs": num_runs,
    }


def profile_step(bench: Bench, program: Program, *, num_steps: int) -> Row:
    """Return what a step costs the device in all, and its 40 dearest kernels, under the profiler.

    Every step is a call of its own, so that wall time and gaps hold a launch of the loop.

    Raises:
      RuntimeError: the profiler saw no kernel of a GPU.
    """
    state = bench.start(program)
    state, _ = bench.run(program, state, num_steps)
    state, one = bench.rewind(state), bench.count(1)
    with device_time.trace() as found:
        # A step a call: of a loop that is one CUDA graph the profiler sees only the first step.
        for _ in range(num_steps):
            state = program.run(bench.flat, state, program.request, one)
        jax.block_until_ready(state)
    taken, _ = bench.progress(state)
    bench.keep(state)
    return profile_row(found, taken, bench.mesh) | {"steps": taken}


def profile_row(found: Sequence[Event], num_steps: int, mesh: Mesh | None) -> Row:
    """Return what a step costs the device in all, and its 40 dearest kernels.

    On a mesh the device is the first that the profiler names, and `collective_us` its time in
    collectives a step, in which it also waits for the others; `collective_us_min` is that of the
    device that waits least.

    Raises:
      RuntimeError: the profiler saw no kernel of a GPU.
    """
    if not found:
        raise RuntimeError("the profiler saw no kernel of a GPU")
    devices = sorted({event.device for event in found})
    of_first = [event for event in found if event.device == devices[0]]
    total, kernels = device_time.kernel_table(of_first, num_steps)
    row: Row = total | {"num_names": len(kernels), "kernel_rows": kernels[:40]}
    if mesh is not None:
        times = [
            sum(event.us for event in found if event.device == device and event.is_collective)
            for device in devices
        ]
        row |= {"collective_us": times[0] / num_steps, "collective_us_min": min(times) / num_steps}
    return row


def measure_added(
    bench: Bench, program: Program, plain: Program, *, num_steps: int, num_runs: int
) -> Row:
    """Time a loop and another one in turns, and what a step of the first takes longer."""
    times: dict[str, list[float]] = {"ms": [], "plain_ms": []}
    for run in range(-1, num_runs):
        for name, each in (("ms", program), ("plain_ms", plain)):
            # Their states differ; the cache goes from one to the other.
            state = bench.start(each)
            state, seconds = bench.run(each, state, num_steps)
            if run >= 0:
                times[name].append(seconds / bench.progress(state)[0] * 1e3)
            bench.keep(state)
    row: Row = {name: statistics.median(column) for name, column in times.items()}
    differences = [(a - b) * 1e3 for a, b in zip(*times.values(), strict=True)]
    return row | {
        "ms_min": min(times["ms"]),
        "ms_max": max(times["ms"]),
        "added_us": statistics.median(differences),
        "added_us_min": min(differences),
        "added_us_max": max(differences),
        "ratio": row["ms"] / row["plain_ms"],
        "steps": num_steps,
        "runs": num_runs,
    }
