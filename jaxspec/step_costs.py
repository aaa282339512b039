"""What a step of each arm of `Auto` costs, measured once for every shape of a call."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode import Request, init_state, run_steps
from jaxspec.drafters import Auto
from jaxspec.model import FlatModel
from jaxspec.sampling import SamplingMode
from pallas_kernels.dispatch import Implementation

_NUM_STEPS, _NUM_RUNS = 8, 3
_known: dict[Any, tuple[float, ...]] = {}


def step_costs(
    model: FlatModel,
    tokens: jax.Array,
    request: Request,
    drafter: Auto,
    *,
    kernels: Implementation | None,
    mode: SamplingMode,
    num_logprobs: int | None,
) -> tuple[float, ...]:
    """Return the time of a step of each of the drafter's arms, relative to plain decoding.

    They are measured unless the drafter has them or a call of the same shape has measured them.

    Args:
      model: the target model.
      tokens: i32[B, P] prompts.
      request: the call's arrays.
      drafter: has the arms.
      kernels: kernel implementation of the call.
      mode: sampling of the call.
      num_logprobs: alternatives whose logits are kept, None = no logits.
    """
    if drafter.step_costs is not None:
        return drafter.step_costs
    shapes = tuple((array.shape, array.dtype) for array in model.arrays)
    key = (shapes, tokens.shape, drafter, kernels, mode, num_logprobs)
    if key not in _known:
        _known[key] = _measure(
            model, tokens, request, drafter, kernels=kernels, mode=mode, num_logprobs=num_logprobs
        )
    return _known[key]


def _measure(
    model: FlatModel,
    tokens: jax.Array,
    request: Request,
    drafter: Auto,
    *,
    num_logprobs: int | None,
    **options: Any,
) -> tuple[float, ...]:
    """Time some steps of every arm, each forced in turn by costs that leave no choice."""
    num_arms, batch_size = len(drafter.arms), tokens.shape[0]
    request = dataclasses.replace(
        request,
        max_new_tokens=jnp.full((batch_size,), tokens.shape[1], jnp.int32),
        eos_ids=jnp.full_like(request.eos_ids, -1),
    )
    state = init_state(model, tokens, request, drafter=drafter, num_logprobs=num_logprobs)
    times = np.full((_NUM_RUNS, num_arms), np.inf)
    for run in range(-1, _NUM_RUNS):
        for arm in range(num_arms):
            # Every call from the same place in the text: the first round of them only warms up.
            state = dataclasses.replace(
                state,
                length=request.prompt_length + 0,
                finish=jnp.zeros_like(state.finish),
                num_steps=jnp.zeros_like(state.num_steps),
            )
            costs = jnp.full((num_arms,), 1e6, jnp.float32).at[arm].set(1e-6)
            given = dataclasses.replace(request, step_costs=costs)
            num_steps = jnp.int32(_NUM_STEPS if run >= 0 else 1)
            jax.block_until_ready((state, given, num_steps))
            started = time.perf_counter()
            state = run_steps(model, state, given, num_steps, drafter=drafter, **options)
            taken = int(jax.device_get(state.num_steps).max())
            if run >= 0:
                times[run, arm] = (time.perf_counter() - started) / max(taken, 1)
    best = times.min(axis=0)
    return tuple((best / best[0]).tolist())
