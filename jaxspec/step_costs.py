"""What a step of each arm of `Auto` costs, measured once for every shape of a call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.decode import run_steps_of
from jaxspec.drafters import Auto, Drafter
from jaxspec.placement import FlatModel
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import SPECS, fetch, place, spans_processes
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
      The request, and the seconds that the measuring took, compilation left out.
    """
    if not isinstance(drafter, Auto):
        return request, 0.0
    costs, seconds = drafter.step_costs, 0.0
    if costs is None:
        arrays = tuple((array.shape, array.dtype, array.sharding) for array in model.arrays)
        key = (arrays, tokens.shape, drafter, kernels, mode, num_logprobs)
        if key not in _known:
            if len(_known) >= _MOST_SHAPES:
                _known.clear()
            _known[key], seconds = _measure(
                model, tokens, request, drafter, num_logprobs, kernels=kernels, mode=mode
            )
        costs = _known[key]
    return _with_costs(request, costs, model), seconds


def _with_costs(request: Request, costs: Sequence[float], model: FlatModel) -> Request:
    placed = place(model.mesh, np.asarray(costs, np.float32), SPECS["step_costs"])
    return dataclasses.replace(request, step_costs=placed)


def _measure(
    model: FlatModel,
    tokens: jax.Array,
    request: Request,
    drafter: Auto,
    num_logprobs: int | None,
    **options: Any,
) -> tuple[tuple[float, ...], float]:
    """Time some steps of every arm, each forced in turn by costs that leave no choice.

    Returns the costs, and the seconds that it took once all was compiled.
    """
    num_arms, capacity = len(drafter.arms), tokens.shape[1]
    # From where there is room for all steps, were every draft accepted.
    room = (_NUM_STEPS + 1) * (1 + drafter.layout.num_draft_tokens)
    start = jnp.minimum(request.prompt_length, max(1, capacity - room))
    request = dataclasses.replace(
        request,
        prompt_length=start,
        # Rows that only pad the batch stay without a budget.
        max_new_tokens=(request.max_new_tokens > 0).astype(jnp.int32) * capacity,
        eos_ids=request.eos_ids * 0 - 1,
    )
    steps_of = run_steps_of(model)
    state = init_state(model, tokens, request, drafter=drafter, num_logprobs=num_logprobs)
    idle: list[float] = []
    times = np.full((_NUM_RUNS, num_arms), np.inf)
    measure_started = time.perf_counter()
    for run in range(-1, _NUM_RUNS):
        if run == 0:
            measure_started = time.perf_counter()
        for arm in range(num_arms):
            costs = np.full(num_arms, 1e6)
            costs[arm] = 1e-6
            given = _with_costs(request, costs.tolist(), model)
            # Without steps, that is what a call costs; the first round of all only warms up.
            for num_steps in (0, _NUM_STEPS if run >= 0 else 1):
                state = dataclasses.replace(
                    state,
                    length=start + 0,
                    finish=state.finish * 0,
                    num_steps=state.num_steps * 0,
                )
                steps = np.int32(num_steps)
                jax.block_until_ready((state, given))
                started = time.perf_counter()
                state = steps_of(model, state, given, steps, drafter=drafter, **options)
                taken = int(fetch(state.num_steps).max())
                seconds = time.perf_counter() - started
                if run >= 0 and num_steps:
                    times[run, arm] = max(seconds - min(idle), 1e-9) / max(taken, 1)
                elif run >= 0:
                    idle.append(seconds)
    best = times.min(axis=0)
    costs = best / best[0]
    if spans_processes(model.mesh):
        # All processes have to choose alike.
        costs = multihost_utils.broadcast_one_to_all(costs.astype(np.float32))
    return tuple(np.asarray(costs, np.float64).tolist()), time.perf_counter() - measure_started
