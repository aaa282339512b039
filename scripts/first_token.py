"""Time to the first token: prefill and one step, and what the prefill takes to compile."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import device_time
import jax
import numpy as np
from shapes import product_operations
from step_bench import Bench, count
from step_measures import profile_row

from jaxspec import GenerateConfig, NoDraft, Qwen3
from jaxspec.decode import prefill, run_steps_of
from jaxspec.placement import FlatModel
from jaxspec.request import make_request, prefill_chunks
from jaxspec.state import Request, init_state

Row = dict[str, Any]


def compile_prefill(bench: Bench, kernels: str | None) -> Row:
    """Return the seconds to compile the prefill, in chunks as the library chooses them."""
    chunk_size, _ = prefill_chunks(
        GenerateConfig(), capacity=bench.capacity, longest_prompt=bench.length
    )
    state = bench.abstract_state(NoDraft())
    started = time.perf_counter()
    lowered = prefill.lower(
        bench.model,
        state,
        bench.count(0),
        chunk_size=chunk_size,
        kernels=kernels,
    )
    lowered_at = time.perf_counter()
    lowered.compile()
    seconds = (lowered_at - started, time.perf_counter() - lowered_at)
    return {"chunk_size": chunk_size} | dict(
        zip(("lower_seconds", "compile_seconds"), seconds, strict=True)
    )


def _random_prompt(
    model: Qwen3, prompt_tokens: int, kernels: str | None
) -> tuple[jax.Array, Request, int, int]:
    """Return text and request of one random prompt, and its chunks: their size and number."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocab_size, prompt_tokens).tolist()
    config = GenerateConfig(max_new_tokens=256, eos_token_ids=(), kernels=kernels)
    tokens, request = make_request(model.config, [prompt], config, mesh=model.mesh)
    chunk_size, num_chunks = prefill_chunks(
        config, capacity=tokens.shape[1], longest_prompt=prompt_tokens
    )
    return tokens, request, chunk_size, num_chunks


def profile_prefill(model: Qwen3, *, prompt_tokens: int, kernels: str | None) -> Row:
    """Return what the prefill of a random prompt costs the device, and its 40 dearest kernels.

    Raises:
      RuntimeError: the profiler saw no kernel of a GPU.
    """
    tokens, request, chunk_size, num_chunks = _random_prompt(model, prompt_tokens, kernels)
    flat = FlatModel.of(model)
    state = init_state(flat, tokens, request, drafter=NoDraft())
    fill = functools.partial(prefill, chunk_size=chunk_size, kernels=kernels)
    state = jax.block_until_ready(fill(flat, state, count(model.mesh, 0)))
    chunks = count(model.mesh, num_chunks)
    with device_time.trace() as found:
        jax.block_until_ready(fill(flat, state, chunks))
    chunked = {"prompt_tokens": prompt_tokens, "chunk_size": chunk_size}
    return chunked | profile_row(found, 1, model.mesh)


def measure_first_token(
    model: Qwen3, *, prompt_tokens: int, kernels: str | None, product_rate: float, num_runs: int
) -> Row:
    """Time prefill and first step of a random prompt, against the time of the products alone.

    The products are those of the layers for all but the last token, and one row of the head: on a
    mesh one device's part of them.
    """
    tokens, request, chunk_size, num_chunks = _random_prompt(model, prompt_tokens, kernels)
    flat = FlatModel.of(model)
    fill = functools.partial(prefill, chunk_size=chunk_size, kernels=kernels)
    total, filling = [], []
    for _ in range(num_runs + 1):
        state = init_state(flat, tokens, request, drafter=NoDraft())
        chunks, one = count(model.mesh, num_chunks), count(model.mesh, 1)
        state = jax.block_until_ready(state)
        started = time.perf_counter()
        state = fill(flat, state, chunks)
        # As in generation: the loop is queued while the prompt is being cached.
        mark = state.length + 0
        state = run_steps_of(model)(flat, state, request, one, drafter=NoDraft(), kernels=kernels)
        jax.block_until_ready(mark)
        filled = time.perf_counter()
        jax.block_until_ready(state)
        total.append((time.perf_counter() - started) * 1e3)
        filling.append((filled - started) * 1e3)
        del state
    median = statistics.median(total[1:])
    products_ms = product_operations(model, prompt_tokens) / product_rate * 1e3
    return {
        "prompt_tokens": prompt_tokens,
        "capacity": tokens.shape[1],
        "chunk_size": chunk_size,
        "ms": median,
        "ms_min": min(total[1:]),
        "ms_max": max(total[1:]),
        "prefill_ms": statistics.median(filling[1:]),
        "products_ms": products_ms,
        "teraflops": product_rate / 1e12,
        "ratio": median / products_ms,
        "runs": num_runs,
    }
