"""The end of a step: agreed tokens are appended to their texts, their K/V to the cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, commit_block
from jaxspec.drafters import Outcome
from jaxspec.layout import BlockLayout
from jaxspec.record import TokenRecord
from jaxspec.state import (
    FINISHED_BY_EOS,
    FINISHED_BY_LENGTH,
    UNFINISHED,
    DecodeState,
    Request,
)
from pallas_kernels.dispatch import Implementation

NO_END = 2**31 - 1


def commit(
    state: DecodeState,
    outcome: Outcome,
    request: Request,
    layout: BlockLayout,
    block: KVCache,
    emitted: jax.Array,
    fresh: TokenRecord,
    kernels: Implementation | None = None,
) -> tuple[DecodeState, Outcome]:
    """Append the agreed tokens to each text, clipped at EOS, budget and capacity.

    Args:
      state: the state before the step.
      outcome: the verifier's, not clipped yet.
      request: the call's arrays.
      layout: the block's layout.
      block: the block's own K/V, per layer.
      emitted: i32[B, W] what the best candidate's rows picked.
      fresh: what is recorded of `emitted`, W places.
      kernels: kernel implementation, None = the best available.

    Returns:
      The new state but for the drafter's part, and the outcome with `num_emitted` clipped.
    """
    is_active = state.finish == UNFINISHED
    eos_end = _first_eos_end(emitted, request.eos_ids)
    room = room_of(state, request)
    num_emitted = jnp.minimum(jnp.minimum(outcome.num_accepted + 1, eos_end), room)
    num_emitted = jnp.where(is_active, num_emitted, 0)
    finish = jnp.where(num_emitted == room, FINISHED_BY_LENGTH, UNFINISHED)
    finish = jnp.where(eos_end <= num_emitted, FINISHED_BY_EOS, finish)
    # One kernel computes these from the old counts, and the rest follows from them. Were the old
    # counts read elsewhere too, each would be copied before it is overwritten.
    num_emitted, length, finish, num_steps = jax.lax.optimization_barrier(
        (
            num_emitted,
            state.length + num_emitted,
            jnp.where(is_active, finish, state.finish),
            state.num_steps + is_active.astype(jnp.int32),
        )
    )
    start = length - num_emitted

    cache = commit_block(
        state.cache,
        block,
        layout,
        num_cached=start - 1,
        best_candidate=outcome.best_candidate,
        num_emitted=num_emitted,
        kernels=kernels,
    )
    new_state = dataclasses.replace(
        state,
        tokens=_append(state.tokens, start, emitted, num_emitted),
        length=length,
        finish=finish,
        num_steps=num_steps,
        record=jax.tree.map(
            lambda old, new: _append(old, start, new, num_emitted), state.record, fresh
        ),
        cache=cache,
    )
    return new_state, dataclasses.replace(outcome, num_emitted=num_emitted)


def room_of(state: DecodeState, request: Request) -> jax.Array:
    """Return i32[B], the tokens that each row's budget and capacity leave."""
    budget = request.max_new_tokens - (state.length - request.prompt_length)
    return jnp.minimum(budget, state.tokens.shape[1] - state.length)


def _first_eos_end(emitted: jax.Array, eos_ids: jax.Array) -> jax.Array:
    """Return i32[B], the number of tokens up to the first EOS, that one included.

    Far more than a text holds where there is none. Short blocks are unrolled: small reductions
    would be kernels of their own, elementwise operations join their users.
    """
    is_eos = functools.reduce(jnp.logical_or, [emitted == eos_id for eos_id in eos_ids])
    if emitted.shape[1] > 32:
        return jnp.min(jnp.where(is_eos, jnp.arange(1, emitted.shape[1] + 1)[None], NO_END), axis=1)
    end = jnp.full(emitted.shape[:1], NO_END, jnp.int32)
    for offset in reversed(range(emitted.shape[1])):
        end = jnp.where(is_eos[:, offset], offset + 1, end)
    return end


def _append(
    values: jax.Array, length: jax.Array, new: jax.Array, num_emitted: jax.Array
) -> jax.Array:
    """Return [B, P, ...] with the first `num_emitted` of each row's W new entries at its end."""
    offset = jnp.arange(values.shape[1])[None] - length[:, None]
    is_new = (offset >= 0) & (offset < num_emitted[:, None])
    index = jnp.clip(offset, 0, new.shape[1] - 1)
    more = (1,) * (values.ndim - 2)
    index, is_new = index.reshape(*index.shape, *more), is_new.reshape(*is_new.shape, *more)
    return jnp.where(is_new, jnp.take_along_axis(new, index, axis=1), values)
