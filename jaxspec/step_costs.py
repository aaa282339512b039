"""What a step of each arm of `Auto` costs, measured once for every shape of a call."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode import run_steps
from jaxspec.drafters import Auto, Drafter
from jaxspec.model import FlatModel
from jaxspec.sampling import SamplingMode
from jaxspec.state import Request, init_state

_NUM_STEPS, _NUM_RUNS = 4, 2
_MOST_SHAPES = 256
_known: dict[Any, tuple[float, ...]] = {}


def with_step_costs(
    model: FlatModel,
    tokens: jax.Array,
    request: Request,
    drafter: Drafter | Auto,
    *,
    kernels: str | None,
    mode: SamplingMode,
    num_logprobs: int | None = None,
) -> tuple[Request, float]:
    """Return the request with the time of a step of each arm of `Auto`, relative to the first's.

    They are measured unless the drafter has them or a call of the same shape has measured them.

    Args:
      model: the target model.
      tokens: i32[B, P] prompts.
      request: the call's arrays.
      drafter: has the arms; any other drafter's request stays as it is.
      kernels: kernel implementation of the call.
      mode: sampling of the call.
      num_logprobs: alternatives whose logits are kept, None = no logits.

    Returns:
      The request, and the seconds that the measuring took.
    """
    if not isinstance(drafter, Auto):
        return request, 0.0
    costs, seconds = drafter.step_costs, 0.0
    if costs is None:
        arrays = tuple((array.shape, array.dtype, array.sharding) for array in model.arrays)
        key = (arrays, tokens.shape, drafter, kernels, mode, num_logprobs)
        if key not in _known:
            started = time.perf_counter()
            if len(_known) >= _MOST_SHAPES:
                _known.clear()
            _known[key] = _measure(
                model, tokens, request, drafter, num_logprobs, kernels=kernels, mode=mode
            )
            seconds = time.perf_counter() - started
        costs = _known[key]
    return dataclasses.replace(request, step_costs=jnp.asarray(costs, jnp.float32)), seconds


def _measure(
    model: FlatModel,
    tokens: jax.Array,
    request: Request,
    drafter: Auto,
    num_logprobs: int | None,
    **options: Any,
) -> tuple[float, ...]:
    """Time some steps of every arm, each forced in turn by costs that leave no choice."""
    num_arms, (batch_size, capacity) = len(drafter.arms), tokens.shape
    # From where there is room for all steps, were every draft accepted.
    room = (_NUM_STEPS + 1) * (1 + drafter.layout.num_draft_tokens)
    start = jnp.minimum(request.prompt_length, max(1, capacity - room))
    request = dataclasses.replace(
        request,
        prompt_length=start,
        max_new_tokens=jnp.full((batch_size,), capacity, jnp.int32),
        eos_ids=jnp.full_like(request.eos_ids, -1),
    )
    state = init_state(model, tokens, request, drafter=drafter, num_logprobs=num_logprobs)
    idle: list[float] = []
    times = np.full((_NUM_RUNS, num_arms), np.inf)
    for run in range(-1, _NUM_RUNS):
        for arm in range(num_arms):
            costs = jnp.full((num_arms,), 1e6, jnp.float32).at[arm].set(1e-6)
            given = dataclasses.replace(request, step_costs=costs)
            # Without steps, that is what a call costs; the first round of all only warms up.
            for num_steps in (0, _NUM_STEPS if run >= 0 else 1):
                state = dataclasses.replace(
                    state,
                    length=start + 0,
                    finish=jnp.zeros_like(state.finish),
                    num_steps=jnp.zeros_like(state.num_steps),
                )
                steps = jnp.int32(num_steps)
                jax.block_until_ready((state, given, steps))
                started = time.perf_counter()
                state = run_steps(model, state, given, steps, drafter=drafter, **options)
                taken = int(jax.device_get(state.num_steps).max())
                seconds = time.perf_counter() - started
                if run >= 0 and num_steps:
                    times[run, arm] = max(seconds - min(idle), 1e-9) / max(taken, 1)
                elif run >= 0:
                    idle.append(seconds)
    best = times.min(axis=0)
    return tuple((best / best[0]).tolist())
