"""What a call asks of the loop, and what one step hands to the next."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import init_cache
from jaxspec.drafters import Auto, Drafter
from jaxspec.drafters.protocol import Leaf
from jaxspec.model import FlatModel, Qwen3, whole_model
from jaxspec.record import TokenRecord, init_record
from jaxspec.sampling import SamplingParams

UNFINISHED, FINISHED_BY_EOS, FINISHED_BY_LENGTH, FINISHED_BY_STOP = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """What varies from call to call, as arrays.

    Attributes:
      prompt_length: i32[B] tokens of each prompt.
      max_new_tokens: i32[B] most tokens to emit.
      min_new_tokens: i32[B] tokens before which no EOS is picked.
      eos_ids: i32[E] ids that end a text; unused entries hold -1.
      seed: u32[B] seed of each row's random streams.
      sampling: settings of each row.
      step_costs: f32[A] relative time of a step of each arm of `Auto`; one 1 for other drafters.
    """

    prompt_length: Leaf
    max_new_tokens: Leaf
    min_new_tokens: Leaf
    eos_ids: Leaf
    seed: Leaf
    sampling: SamplingParams
    step_costs: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What one step hands to the next.

    Attributes:
      tokens: i32[B, P] prompt and output; only the first `length` of a row are known.
      length: i32[B] known tokens; the K/V of all but the last are cached.
      finish: i32[B], one of UNFINISHED, FINISHED_BY_EOS, FINISHED_BY_LENGTH, FINISHED_BY_STOP.
      num_steps: i32[B] steps in which the row was unfinished.
      record: how each token came about.
      cache: the KV cache.
      drafter: the drafter's state.
    """

    tokens: Leaf
    length: Leaf
    finish: Leaf
    num_steps: Leaf
    record: TokenRecord
    cache: Any
    drafter: Any


@functools.partial(jax.jit, static_argnames=("drafter", "num_logprobs"))
def init_state(
    model: Qwen3 | FlatModel,
    tokens: jax.Array,
    request: Request,
    *,
    drafter: Drafter | Auto,
    num_logprobs: int | None = None,
) -> DecodeState:
    """Return the state of fresh texts, the cache empty.

    Args:
      model: the target model.
      tokens: i32[B, P] prompts, padded to the capacity P of text and cache.
      request: the call's arrays.
      drafter: how drafts are made.
      num_logprobs: alternatives to keep logits of; None = keep none, not even the token's.
    """
    model = whole_model(model)
    batch_size, capacity = tokens.shape
    zeros = jnp.zeros((batch_size,), jnp.int32)
    return DecodeState(
        tokens=tokens,
        length=request.prompt_length,
        finish=zeros,
        num_steps=zeros,
        record=init_record(batch_size, capacity, num_logprobs),
        cache=init_cache(model.config, batch_size=batch_size, capacity=capacity, dtype=model.dtype),
        drafter=drafter.init(tokens, request.prompt_length, jax.vmap(jax.random.key)(request.seed)),
    )
