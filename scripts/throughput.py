"""Many texts at once, and a stored model: what a second of the devices gives."""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import checkpoints
from jaxspec import Drafter, GenerateConfig, Qwen3, generate

Row = dict[str, Any]


def measure_throughput(
    model: Qwen3,
    drafter: Drafter,
    *,
    num_prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    kernels: str | None,
    num_runs: int,
) -> Row:
    """Time random prompts that are decoded at once, as `generate` does it.

    Args:
      model: the target model.
      drafter: how drafts are made.
      num_prompts: texts.
      prompt_tokens: of each prompt.
      new_tokens: of each text.
      kernels: implementation of the kernels.
      num_runs: timed calls, after one that compiles; figures are medians.

    Returns:
      Seconds of a call in all and without the prefill, and new tokens of all texts per second of
      each.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (num_prompts, prompt_tokens)).tolist()
    config = GenerateConfig(max_new_tokens=new_tokens, eos_token_ids=(), kernels=kernels)
    generation = generate(model, prompts, config, drafter)
    total, decoding = [], []
    for _ in range(num_runs):
        generation = generate(model, prompts, config, drafter)
        total.append(generation.prefill_seconds + generation.decode_seconds)
        decoding.append(generation.decode_seconds)
    num_tokens = sum(map(len, generation.token_ids))
    seconds, decode_seconds = statistics.median(total), statistics.median(decoding)
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "seconds_min": min(total),
        "seconds_max": max(total),
        "decode_seconds": decode_seconds,
        "tokens_per_second": num_tokens / seconds,
        "decode_tokens_per_second": num_tokens / decode_seconds,
        "mean_accepted_length": num_tokens / int(np.sum(generation.num_steps)),
        "runs": num_runs,
    }


def measure_load(
    path: str | os.PathLike[str], dtype: jax.typing.DTypeLike, mesh: Mesh | None
) -> Row:
    """Load the weights of a directory and return the time and the memory that it takes.

    To be called before anything else is on the devices: the peak is that of the process so far.

    Returns:
      The seconds; the most bytes that any device held at once, where the platform counts them,
      and else the bytes of its arrays; these as a share of the bytes of the whole model.
    """
    started = time.perf_counter()
    model = jax.block_until_ready(checkpoints.load_model(path, mesh=mesh, dtype=dtype))
    seconds = time.perf_counter() - started
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(model):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use", num_bytes)
        for device, num_bytes in held.items()
    ]
    whole = nnx.eval_shape(lambda: Qwen3(model.config, dtype=dtype, rngs=nnx.Rngs(0)))
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(whole)]
    num_bytes = sum(sizes) * model.dtype.itemsize
    return {
        "seconds": seconds,
        "model_bytes": num_bytes,
        "peak_bytes_per_device": max(peaks),
        "share": max(peaks) / num_bytes,
    }
