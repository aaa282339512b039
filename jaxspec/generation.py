"""Token ids in, token ids out: the host's side of the loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import GenerateConfig, Qwen3Config
from jaxspec.decode import (
    FINISHED_BY_EOS,
    FINISHED_BY_LENGTH,
    DecodeState,
    Request,
    init_state,
    prefill,
    run_steps,
)
from jaxspec.drafters import Drafter, NoDraft
from jaxspec.model import FlatModel, Qwen3
from jaxspec.sampling import SamplingMode, SamplingParams

_EOS_ROUND = 8
_MIN_CAPACITY = 128
_FINISH_REASONS: dict[int, Literal["eos", "length"]] = {
    FINISHED_BY_EOS: "eos",
    FINISHED_BY_LENGTH: "length",
}


@dataclasses.dataclass(frozen=True)
class Generation:
    """The texts of one call, on the host.

    Attributes:
      tokens: i32[B, P] prompt and output; only the first `lengths` of a row are known.
      lengths: i32[B] known tokens.
      prompt_lengths: i32[B] tokens of each prompt.
      finish_reasons: per row "eos", "length", or None while it goes on.
      num_steps: i32[B] target forwards that the row took part in.
      accepted_by_position: i32[B, M] steps in which draft token j was accepted and emitted.
      prefill_seconds: time of the prefill, all rows together.
      decode_seconds: time of the decode loop so far, all rows together.
      compile_seconds: time to trace and compile (or find compiled) the programs.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    finish_reasons: tuple[Literal["eos", "length"] | None, ...]
    num_steps: np.ndarray
    accepted_by_position: np.ndarray
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def token_ids(self) -> list[list[int]]:
        """Return the emitted ids of each row, EOS included, prompt excluded."""
        return [
            row[start:end].tolist()
            for row, start, end in zip(self.tokens, self.prompt_lengths, self.lengths, strict=True)
        ]

    @property
    def num_tokens(self) -> np.ndarray:
        """Return i32[B], emitted tokens."""
        return self.lengths - self.prompt_lengths

    @property
    def mean_accepted_length(self) -> np.ndarray:
        """Return f64[B], tokens emitted per target forward, the bonus token included."""
        return self.num_tokens / np.maximum(self.num_steps, 1)

    @property
    def is_finished(self) -> bool:
        """Return whether every row has ended."""
        return None not in self.finish_reasons


def capacity_for(num_tokens: int) -> int:
    """Return the buffer size for `num_tokens`: 128, 192, 256, 384, 512, 768, 1024, ...

    Few sizes, so that programs are reused, and never more than 1.5 times what is needed, so that
    memory follows need.
    """
    size = _MIN_CAPACITY
    while size < num_tokens:
        size *= 2
    smaller = size // 4 * 3
    return smaller if smaller >= num_tokens and smaller > _MIN_CAPACITY else size


def generate(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig | None = None,
    drafter: Drafter | None = None,
) -> Generation:
    """Continue each prompt with the tokens that plain decoding would give.

    Args:
      model: the target model.
      prompts: B prompts of at least one token id each; they may differ in length.
      config: what to generate; None = the defaults.
      drafter: how drafts are made; None = `NoDraft()`, plain decoding. It changes the time a text
        takes, not the text.

    Returns:
      The finished texts.

    Raises:
      ValueError: a prompt is empty, holds an id outside the vocabulary, or does not fit.
    """
    *_, generation = stream(model, prompts, config, drafter, steps_per_chunk=None)
    return generation


def stream(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig | None = None,
    drafter: Drafter | None = None,
    *,
    steps_per_chunk: int | None = 16,
) -> Iterator[Generation]:
    """Yield the growing texts every `steps_per_chunk` steps; the last one is finished.

    Arguments and errors are those of `generate`, raised before the first chunk is asked for. The
    compiled program is the same one; None runs to the end in one go.
    """
    config = config or GenerateConfig()
    if drafter is None:
        drafter = NoDraft()
    check_drafter(drafter)
    drafter = with_kernels(drafter, config.kernels)
    check_prompts(prompts, model.config, config)
    if steps_per_chunk is not None and steps_per_chunk < 1:
        raise ValueError(f"steps_per_chunk={steps_per_chunk} is not at least 1")
    return _stream(model, prompts, config, drafter, steps_per_chunk)


def _stream(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    drafter: Drafter,
    steps_per_chunk: int | None,
) -> Iterator[Generation]:
    tokens, request = make_request(model.config, prompts, config)
    flat = FlatModel.of(model)
    chunk_size, num_chunks = prefill_chunks(
        config,
        capacity=tokens.shape[1],
        longest_prompt=max(len(prompt) for prompt in prompts),
        batch_size=len(prompts),
    )

    def run(state: DecodeState, num_steps: int) -> DecodeState:
        return run_steps(
            flat,
            state,
            request,
            jnp.int32(num_steps),
            drafter=drafter,
            kernels=config.kernels,
            mode=sampling_mode(config),
        )

    # Zero chunks and zero steps compile the programs without running them.
    started = time.perf_counter()
    state = init_state(flat, tokens, request, drafter=drafter)
    fill = functools.partial(prefill, chunk_size=chunk_size, kernels=config.kernels)
    state = fill(flat, state, jnp.int32(0))
    jax.block_until_ready(_mark(state.length))
    state = jax.block_until_ready(run(state, 0))
    compiled = time.perf_counter()
    # No step emits less than one token, so the budget bounds the number of steps.
    num_steps = steps_per_chunk or config.max_new_tokens
    state = fill(flat, state, jnp.int32(num_chunks))
    # The loop is queued while the prompts are being cached. Another thread takes the time at which
    # they are: where the host has a part in the loop, queueing it lasts as long as the loop.
    with ThreadPoolExecutor(1) as pool:
        filled = pool.submit(_time_when_ready, _mark(state.length))
        state = run(state, num_steps)
        prefilled = chunk_started = filled.result()
    decode_seconds = 0.0
    while True:
        generation = _to_host(state, request)
        decode_seconds += time.perf_counter() - chunk_started
        yield dataclasses.replace(
            generation,
            compile_seconds=compiled - started,
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


def prefill_chunks(
    config: GenerateConfig, *, capacity: int, longest_prompt: int, batch_size: int = 1
) -> tuple[int, int]:
    """Return the tokens of one prefill pass, and how many passes cache all but the last token.

    There are two sizes of a pass, so that prompts of all lengths share two programs.
    """
    chunk_size = config.prefill_chunk_size
    if chunk_size is None:
        # A GPU's products are at their best from some 2,000 rows on; short prompts would pad them.
        gpu_size = 2048 if longest_prompt > 1024 and batch_size <= 2 else 512
        chunk_size = 128 if jax.default_backend() == "cpu" else gpu_size
    chunk_size = min(chunk_size, capacity)
    return chunk_size, -(-(longest_prompt - 1) // chunk_size)


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
    for name in ("layout", "init", "propose", "update"):
        if not hasattr(drafter, name):
            raise ValueError(f"drafter {type(drafter).__name__} has no {name}")


def check_prompts(
    prompts: Sequence[Sequence[int]], model_config: Qwen3Config, config: GenerateConfig
) -> None:
    """Raise a one-line ValueError if the call cannot be run as asked, before any work."""
    if not len(prompts):
        raise ValueError("no prompts: expected at least one")
    limit = config.max_seq_len or model_config.max_position_embeddings
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty: expected at least one token")
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < model_config.vocab_size:
                raise ValueError(
                    f"prompt {index} holds id {token_id}, expected 0..{model_config.vocab_size - 1}"
                )
        if len(prompt) + config.max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, which with "
                f"max_new_tokens={config.max_new_tokens} exceed max_seq_len={limit}"
            )
    if isinstance(config.seed, tuple) and len(config.seed) != len(prompts):
        raise ValueError(f"{len(config.seed)} seeds for {len(prompts)} prompts")
    for eos_id in config.eos_token_ids or ():
        if not 0 <= eos_id < model_config.vocab_size:
            raise ValueError(
                f"eos_token_ids holds {eos_id}, expected 0..{model_config.vocab_size - 1}"
            )


def make_request(
    model_config: Qwen3Config, prompts: Sequence[Sequence[int]], config: GenerateConfig
) -> tuple[jax.Array, Request]:
    """Return the padded prompts, i32[B, P], and the call's arrays."""
    batch_size = len(prompts)
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    capacity = capacity_for(int(lengths.max()) + config.max_new_tokens)
    tokens = np.zeros((batch_size, capacity), dtype=np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    eos_ids = config.eos_token_ids
    if eos_ids is None:
        eos_ids = model_config.eos_token_ids
    # Rounded up, so that a longer list of EOS ids does not compile again.
    padded_eos = np.full(-(-max(len(eos_ids), 1) // _EOS_ROUND) * _EOS_ROUND, -1, dtype=np.int32)
    padded_eos[: len(eos_ids)] = eos_ids
    return jnp.asarray(tokens), Request(
        prompt_length=jnp.asarray(lengths),
        max_new_tokens=jnp.full((batch_size,), config.max_new_tokens, jnp.int32),
        eos_ids=jnp.asarray(padded_eos),
        seed=jnp.broadcast_to(jnp.asarray(config.seed, jnp.uint32), (batch_size,)),
        sampling=SamplingParams(
            temperature=jnp.full((batch_size,), config.temperature, jnp.float32),
            top_k=jnp.full((batch_size,), config.top_k, jnp.int32),
            top_p=jnp.full((batch_size,), config.top_p, jnp.float32),
            min_p=jnp.full((batch_size,), config.min_p, jnp.float32),
            repetition_penalty=jnp.full((batch_size,), config.repetition_penalty, jnp.float32),
            presence_penalty=jnp.full((batch_size,), config.presence_penalty, jnp.float32),
            frequency_penalty=jnp.full((batch_size,), config.frequency_penalty, jnp.float32),
        ),
    )


def with_kernels(drafter: Drafter, kernels: str | None) -> Drafter:
    """Return the drafter with the call's kernels where it has some and names none itself."""
    if kernels is None or getattr(drafter, "kernels", kernels) is not None:
        return drafter
    return dataclasses.replace(cast(Any, drafter), kernels=kernels)


def sampling_mode(config: GenerateConfig) -> SamplingMode:
    """Return what of sampling the call's program needs."""
    is_sampled = config.temperature > 0
    has_filters = config.top_k > 0 or config.top_p < 1 or config.min_p > 0
    return SamplingMode(
        is_sampled=is_sampled,
        # Filters keep the best token: greedy decoding does not notice them.
        has_filters=is_sampled and has_filters,
        has_penalties=config.repetition_penalty != 1
        or config.presence_penalty != 0
        or config.frequency_penalty != 0,
    )


def _to_host(state: DecodeState, request: Request) -> Generation:
    tokens, lengths, prompt_lengths, finish, num_steps, accepted = jax.device_get(
        (
            state.tokens,
            state.length,
            request.prompt_length,
            state.finish,
            state.num_steps,
            state.accepted_by_position,
        )
    )
    return Generation(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        finish_reasons=tuple(_FINISH_REASONS.get(int(code)) for code in finish),
        num_steps=num_steps,
        accepted_by_position=accepted,
        prefill_seconds=0.0,
        decode_seconds=0.0,
        compile_seconds=0.0,
    )
