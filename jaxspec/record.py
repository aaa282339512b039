"""What is kept of every emitted token: how it came about and, if asked for, its logits.

Arrays run parallel to the text: what is known of the token at position p stands at index p. So a
text that is cut short, at a stop string say, takes its statistics with it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.drafters.protocol import Leaf
from jaxspec.layout import BlockLayout
from jaxspec.sharding import ONE_DEVICE, ModelAxis

# In the place of a draft position: the model's own token, the last one of its step.
NOT_DRAFTED = -1
# A block has at most 4096 rows, so at most 4095 draft tokens.
_POSITION_BITS, _DRAFTED_BITS = 13, 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitRecord:
    """Logits of the emitted tokens, in float32 and before any penalty, temperature or filter.

    Attributes:
      token_logit: f32[B, P] of the token itself.
      normalizer: f32[B, P] log of the sum of exp of all logits of the place.
      top_ids: i32[B, P, N] the best tokens, the best one first.
      top_logits: f32[B, P, N] their logits.
      pick_gap: f32[B, P] by how much the token won: best less second best of the scores that it
        was picked by, penalties, filters and noise included.
    """

    token_logit: Leaf
    normalizer: Leaf
    top_ids: Leaf
    top_logits: Leaf
    pick_gap: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRecord:
    """How each emitted token came about; entries of the prompt mean nothing.

    Attributes:
      origin: i32[B, P] what `Origin` has, in one number: to write three would be three kernels.
      logits: logits of the emitted tokens, None if they were not asked for.
    """

    origin: Leaf
    logits: LogitRecord | None


@dataclasses.dataclass(frozen=True)
class Origin:
    """The step that emitted each token, on the host.

    Attributes:
      draft_position: i32 j for the accepted draft token j of a step, NOT_DRAFTED for the model's
        own token, with which a step ends.
      num_drafted: i32 draft tokens that were fed in the step, all candidates together; 4095 stands
        for more.
      arm: i32 which of several drafters made the block.
    """

    draft_position: np.ndarray
    num_drafted: np.ndarray
    arm: np.ndarray

    @classmethod
    def unpack(cls, origin: np.ndarray) -> Origin:
        """Return what `origin` stands for."""
        position = origin % (1 << _POSITION_BITS)
        rest = origin >> _POSITION_BITS
        return cls(position - 1, rest % (1 << _DRAFTED_BITS), rest >> _DRAFTED_BITS)


def init_record(batch_size: int, capacity: int, num_logprobs: int | None) -> TokenRecord:
    """Return a record of nothing; with logits of `num_logprobs` alternatives unless None."""
    shape = (batch_size, capacity)

    def zeros(*more: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return jnp.zeros((*shape, *more), dtype)

    logits = None
    if num_logprobs is not None:
        logits = LogitRecord(
            token_logit=zeros(dtype=jnp.float32),
            normalizer=zeros(dtype=jnp.float32),
            top_ids=zeros(num_logprobs),
            top_logits=zeros(num_logprobs, dtype=jnp.float32),
            pick_gap=zeros(dtype=jnp.float32),
        )
    return TokenRecord(zeros(), logits)


def step_record(
    emitted: Int[Array, "B W"],
    num_accepted: Int[Array, "B"],
    num_draft: Int[Array, "B C"],
    logits: LogitRecord | None,
    *,
    arm: int = 0,
) -> TokenRecord:
    """Return the record, of W places, of the tokens that a step can emit.

    Args:
      emitted: what the rows of the best candidate picked.
      num_accepted: draft tokens of it that were accepted.
      num_draft: draft tokens of each candidate that were fed.
      logits: what is kept of the logits.
      arm: which of several drafters made the block, below 64.
    """
    offset = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    position = jnp.where(offset < num_accepted[:, None], offset, NOT_DRAFTED)
    num_drafted = jnp.sum(jnp.maximum(num_draft, 0), axis=1, keepdims=True, dtype=jnp.int32)
    # Candidates that share rows may count more than there is room for.
    num_drafted = jnp.minimum(num_drafted, 2**_DRAFTED_BITS - 1)
    step = (arm << _DRAFTED_BITS) + num_drafted
    return TokenRecord((step << _POSITION_BITS) + position + 1, logits)


def emitted_logits(
    logits: Float[Array, "B R V"],
    scores: Float[Array, "_ _ _"] | None,
    emitted: Int[Array, "B W"],
    rows: Int[Array, "B W"] | None,
    layout: BlockLayout,
    *,
    num_top: int,
    num_valid: int | None,
    num_ids: int,
    axis: ModelAxis = ONE_DEVICE,
) -> LogitRecord:
    """Return what is to be kept of the logits of W tokens.

    Args:
      logits: of the layout's logit rows, of this device's part of the vocabulary.
      scores: what the tokens were picked by, where that is not the logits, [B, R, V]; devices that
        share the vocabulary have some rows each, [R', 1, V].
      emitted: the tokens.
      rows: rows of the block that picked them, None = all of them in order.
      layout: the block's layout.
      num_top: N, the best tokens to keep.
      num_valid: ids at or past it are no alternatives.
      num_ids: V, of all devices together.
      axis: the devices that share the vocabulary.

    Returns:
      The arrays of a record, of W places instead of P.
    """

    batch_size, num_rows = logits.shape[:2]
    num_places = emitted.size

    def on_path(values: jax.Array) -> jax.Array:
        if rows is None:
            return values
        index = np.zeros(layout.num_rows, np.int32)
        index[list(layout.logit_rows)] = np.arange(len(layout.logit_rows))
        chosen = jnp.asarray(index)[rows].reshape(*rows.shape, *(1,) * (values.ndim - 2))
        return jnp.take_along_axis(values, chosen, axis=1)

    def collect(values: jax.Array) -> jax.Array:
        return axis.collect_rows(values, num_places).reshape(*emitted.shape, *values.shape[1:])

    # From here on whole rows of logits, one after the other: all of them or this device's.
    flat = on_path(logits).reshape(num_places, -1).astype(jnp.float32)
    flat = axis.spread_rows(flat, num_ids)
    index = axis.own_rows(jnp.maximum(emitted, 0).reshape(-1, 1))
    best, ids = jax.lax.top_k(flat[:, :num_valid], max(num_top, 1))
    if scores is None:
        gap = collect(_best_gap(flat[:, :num_valid]))
    else:
        gaps = _best_gap(scores.reshape(-1, scores.shape[-1])[:, :num_valid])
        gap = on_path(axis.collect_rows(gaps, batch_size * num_rows).reshape(batch_size, -1))
    return LogitRecord(
        token_logit=collect(jnp.take_along_axis(flat, index, axis=1)[:, 0]),
        normalizer=collect(jax.nn.logsumexp(flat, axis=1)),
        top_ids=collect(ids[:, :num_top]),
        top_logits=collect(best[:, :num_top]),
        pick_gap=gap,
    )


def _best_gap(scores: Float[Array, "R V"]) -> Float[Array, "R"]:
    """Return the largest less the second largest score, 0 where the largest stands twice."""
    best = jnp.argmax(scores, axis=1, keepdims=True)
    is_best = jnp.arange(scores.shape[1])[None] == best
    return jnp.max(scores, axis=1) - jnp.max(jnp.where(is_best, -jnp.inf, scores), axis=1)
