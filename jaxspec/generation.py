"""Token ids in, token ids out: the host's side of the loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxspec.config import GenerateConfig
from jaxspec.decode import prefill, run_steps_of
from jaxspec.drafters import Auto, Drafter, NoDraft
from jaxspec.layout import check_count
from jaxspec.model import Qwen3
from jaxspec.placement import FlatModel
from jaxspec.request import (
    check_prompts,
    eos_ids_of,
    make_request,
    prefill_chunks,
    sampling_mode,
)
from jaxspec.result import Generation, to_host
from jaxspec.sharding import check_alike, spans_processes
from jaxspec.state import FINISHED_BY_STOP, DecodeState, init_state
from jaxspec.step_costs import with_step_costs
from jaxspec.text import StopSearch

_STEPS_PER_STOP_SEARCH = 16


def generate(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig | None = None,
    drafter: Drafter | Auto | None = None,
    *,
    tokenizer: Any = None,
) -> Generation:
    """Continue each prompt with the tokens that plain decoding would give.

    Args:
      model: the target model.
      prompts: B prompts of at least one token id each; they may differ in length.
      config: what to generate; None = the defaults.
      drafter: how drafts are made; None = `NoDraft()`, plain decoding. It changes the time a text
        takes, not the text.
      tokenizer: of transformers; needed where the configuration has stop strings.

    Returns:
      The finished texts.

    Raises:
      ValueError: a prompt is empty, holds an id outside the vocabulary, or does not fit; a stop
        string is empty, or there is no tokenizer to look for it with.
    """
    *_, generation = stream(
        model, prompts, config, drafter, tokenizer=tokenizer, steps_per_chunk=None
    )
    return generation


def stream(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig | None = None,
    drafter: Drafter | Auto | None = None,
    *,
    tokenizer: Any = None,
    steps_per_chunk: int | None = 16,
) -> Iterator[Generation]:
    """Yield the growing texts every `steps_per_chunk` steps; the last one is finished.

    Arguments and errors are those of `generate`, raised before the first chunk is asked for. The
    compiled program is the same one; None runs to the end in one go, or with stop strings, which
    are looked for between chunks, 16 steps at a time.
    """
    config = GenerateConfig() if config is None else config
    for name, value, kind in (("model", model, Qwen3), ("config", config, GenerateConfig)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}, expected a {kind.__name__}")
    if drafter is None:
        drafter = NoDraft()
    check_drafter(drafter)
    drafter = with_kernels(drafter, config.kernels)
    check_prompts(prompts, model.config, config)
    if steps_per_chunk is not None:
        check_count("steps_per_chunk", steps_per_chunk, 1)
    if config.stop_strings and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer to look for them with")
    if config.stop_strings and steps_per_chunk is None:
        steps_per_chunk = _STEPS_PER_STOP_SEARCH
    if spans_processes(model.mesh):
        ids = [np.asarray(prompt).tolist() for prompt in prompts]
        target = (model.config, str(model.dtype), str(model.mesh))
        check_alike(target, ids, config, drafter, steps_per_chunk)
    return _stream(model, prompts, config, drafter, tokenizer, steps_per_chunk)


def _stream(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    drafter: Drafter | Auto,
    tokenizer: Any,
    steps_per_chunk: int | None,
) -> Iterator[Generation]:
    tokens, request = make_request(model.config, prompts, config, mesh=model.mesh)
    flat = FlatModel.of(model)
    chunk_size, num_chunks = prefill_chunks(
        config,
        capacity=tokens.shape[1],
        longest_prompt=max(len(prompt) for prompt in prompts),
        batch_size=len(prompts),
    )
    steps = run_steps_of(model)

    def run(state: DecodeState, num_steps: int) -> DecodeState:
        return steps(
            flat,
            state,
            request,
            np.int32(num_steps),
            drafter=drafter,
            kernels=config.kernels,
            mode=sampling_mode(config),
        )

    started = time.perf_counter()
    request, measure_seconds = with_step_costs(
        flat,
        tokens,
        request,
        drafter,
        kernels=config.kernels,
        mode=sampling_mode(config),
        num_logprobs=config.num_logprobs,
    )
    # Zero chunks and zero steps compile the programs without running them.
    state = init_state(flat, tokens, request, drafter=drafter, num_logprobs=config.num_logprobs)
    fill = functools.partial(prefill, chunk_size=chunk_size, kernels=config.kernels)
    state = fill(flat, state, np.int32(0))
    jax.block_until_ready(_mark(state.length))
    if config.stop_strings:
        state = _with_stopped_rows(state, np.zeros(len(prompts), np.bool_))
    state = jax.block_until_ready(run(state, 0))
    compiled = time.perf_counter()
    # No step emits less than one token, so the budget bounds the number of steps.
    num_steps = steps_per_chunk or config.max_new_tokens
    state = fill(flat, state, np.int32(num_chunks))
    # The loop is queued while the prompts are being cached. Another thread takes the time at which
    # they are: where the host has a part in the loop, queueing it lasts as long as the loop.
    with ThreadPoolExecutor(1) as pool:
        filled = pool.submit(_time_when_ready, _mark(state.length))
        state = run(state, num_steps)
        prefilled = chunk_started = filled.result()
    decode_seconds = 0.0
    stops = None
    if config.stop_strings:
        stops = StopStrings(tokenizer, config, eos_ids_of(model.config, config), len(prompts))
    while True:
        generation = to_host(state, request, drafter, num_rows=len(prompts))
        if stops is not None:
            generation, state = stops.apply(generation, state)
        decode_seconds += time.perf_counter() - chunk_started
        yield dataclasses.replace(
            generation,
            compile_seconds=compiled - started - measure_seconds,
            measure_seconds=measure_seconds,
            prefill_seconds=prefilled - compiled,
            decode_seconds=decode_seconds,
        )
        if generation.is_finished:
            return
        chunk_started = time.perf_counter()
        state = run(state, num_steps)


@jax.jit
def _mark(length: jax.Array) -> jax.Array:
    """Return an array that is ready when the state is whose lengths these are."""
    return length + 0


def _time_when_ready(array: jax.Array) -> float:
    jax.block_until_ready(array)
    return time.perf_counter()


def check_drafter(drafter: object) -> None:
    """Raise a one-line ValueError unless `drafter` is a hashable drafter."""
    if isinstance(drafter, type):
        raise ValueError(f"drafter={drafter.__name__} is a class, expected an instance of it")
    try:
        hash(drafter)
    except TypeError:
        raise ValueError(
            f"drafter {type(drafter).__name__} is not hashable: expected a frozen dataclass"
        ) from None
    if isinstance(drafter, Auto):
        return
    for name in ("layout", "init", "propose", "update"):
        if not hasattr(drafter, name):
            raise ValueError(f"drafter {type(drafter).__name__} has no {name}")


def with_kernels(drafter: Drafter | Auto, kernels: str | None) -> Drafter | Auto:
    """Return the drafter with the call's kernels where it has some and names none itself."""
    if kernels is None or getattr(drafter, "kernels", kernels) is not None:
        return drafter
    return dataclasses.replace(cast(Any, drafter), kernels=kernels)


class StopStrings:
    """Ends the rows of a batch at stop strings, which show only in the text.

    Args:
      tokenizer: turns ids into text.
      config: has the strings.
      eos_ids: ids that are no part of a text.
      batch_size: B.
    """

    def __init__(
        self, tokenizer: Any, config: GenerateConfig, eos_ids: Sequence[int], batch_size: int
    ) -> None:
        self._searches = [
            StopSearch(
                tokenizer,
                config.stop_strings,
                eos_ids=eos_ids,
                min_new_tokens=config.min_new_tokens,
            )
            for _ in range(batch_size)
        ]
        self._num_seen = [0] * batch_size
        self._num_kept: dict[int, int] = {}

    def apply(self, generation: Generation, state: DecodeState) -> tuple[Generation, DecodeState]:
        """Return the texts cut at their stop strings, and the state with those rows finished."""
        num_stopped = len(self._num_kept)
        for row, ids in enumerate(generation.token_ids):
            if row not in self._num_kept:
                num_kept = self._searches[row].push(ids[self._num_seen[row] :])
                self._num_seen[row] = len(ids)
                if num_kept is not None:
                    self._num_kept[row] = num_kept
        if not self._num_kept:
            return generation, state
        lengths, reasons = generation.lengths.copy(), list(generation.finish_reasons)
        for row, num_kept in self._num_kept.items():
            lengths[row] = generation.prompt_lengths[row] + num_kept
            reasons[row] = "stop"
        cut = dataclasses.replace(generation, lengths=lengths, finish_reasons=tuple(reasons))
        if len(self._num_kept) > num_stopped and not cut.is_finished:
            is_stopped = np.zeros(lengths.shape, np.bool_)
            is_stopped[list(self._num_kept)] = True
            state = _with_stopped_rows(state, is_stopped)
        return cut, state


def _with_stopped_rows(state: DecodeState, is_stopped: np.ndarray) -> DecodeState:
    """Return the state with some of the first rows at a stop string."""
    finish = state.finish
    padded = np.pad(is_stopped, (0, finish.shape[0] - len(is_stopped)))
    return dataclasses.replace(state, finish=_stop_rows(finish.sharding)(finish, padded))


@functools.lru_cache(maxsize=64)
def _stop_rows(sharding: Sharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    def stop_rows(finish: jax.Array, is_stopped: jax.Array) -> jax.Array:
        return jnp.where(is_stopped, jnp.int32(FINISHED_BY_STOP), finish)

    # Where the loop finds it: another sharding would be another program.
    return jax.jit(stop_rows, out_shardings=sharding)
