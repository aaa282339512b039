"""What a call asks of the loop, and what one step hands to the next."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspec.cache import init_cache
from jaxspec.drafters import Auto, Drafter
from jaxspec.drafters.protocol import Leaf
from jaxspec.model import Qwen3
from jaxspec.placement import FlatModel, over_mesh
from jaxspec.record import TokenRecord, init_record
from jaxspec.sampling import SamplingParams
from jaxspec.sharding import ROWS, SPECS, shard_config

if not TYPE_CHECKING:
    # As with `Leaf`: a partition spec may stand for the whole of one.
    TokenRecord = SamplingParams = Any

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


def _specs_of(kind: type) -> Any:
    """Return the partition spec of every field."""
    return kind(**{field.name: SPECS.get(field.name, ROWS) for field in dataclasses.fields(kind)})


REQUEST_SPECS, STATE_SPECS = _specs_of(Request), _specs_of(DecodeState)
SCALAR = P()


@functools.partial(jax.jit, static_argnames=("drafter", "num_logprobs"))
def init_state(
    model: Qwen3 | FlatModel,
    tokens: jax.Array,
    request: Request,
    *,
    drafter: Drafter | Auto,
    num_logprobs: int | None = None,
) -> DecodeState:
    """Return the state of fresh texts, the cache empty; a row without any budget is finished.

    Args:
      model: the target model.
      tokens: i32[B, P] prompts, padded to the capacity P of text and cache.
      request: the call's arrays.
      drafter: how drafts are made.
      num_logprobs: alternatives to keep logits of; None = keep none, not even the token's.
    """
    begin = functools.partial(_init_state, drafter=drafter, num_logprobs=num_logprobs)
    return over_mesh(begin, model, (ROWS, REQUEST_SPECS), STATE_SPECS)(tokens, request)


def _init_state(
    model: Qwen3,
    tokens: jax.Array,
    request: Request,
    *,
    drafter: Drafter | Auto,
    num_logprobs: int | None,
) -> DecodeState:
    batch_size, capacity = tokens.shape
    is_finished = request.max_new_tokens <= 0
    memory = drafter.init(tokens, request.prompt_length, jax.vmap(jax.random.key)(request.seed))
    for leaf in jax.tree.leaves(memory):
        if leaf.ndim < 1 or leaf.shape[0] != batch_size:
            raise ValueError(
                f"{type(drafter).__name__} has an array of shape {leaf.shape} in its state, "
                f"expected the {batch_size} rows of the batch on its first axis"
            )
    return DecodeState(
        tokens=tokens,
        length=request.prompt_length,
        finish=jnp.where(is_finished, jnp.int32(FINISHED_BY_LENGTH), jnp.int32(UNFINISHED)),
        num_steps=jnp.zeros((batch_size,), jnp.int32),
        record=init_record(batch_size, capacity, num_logprobs),
        cache=init_cache(
            shard_config(model.config, model.axis.size),
            batch_size=batch_size,
            capacity=capacity,
            dtype=model.dtype,
        ),
        drafter=memory,
    )
