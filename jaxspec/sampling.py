"""Which token is picked from a row's logits: penalties, temperature, filters, position-keyed noise.

The token at position p of row b is the argmax of filtered logits / temperature plus Gumbel noise
that depends on (seed of b, p) alone. So it is a function of the text before it, the seed and the
position, whatever was drafted: one verifier serves greedy and sampled decoding, speculation changes
no sampled token, and a draft token is accepted with its own probability.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.drafters.protocol import Leaf
from jaxspec.layout import BlockLayout
from pallas_kernels import top_threshold
from pallas_kernels.dispatch import Implementation
from pallas_kernels.top_threshold import Measure


@dataclasses.dataclass(frozen=True)
class SamplingMode:
    """What of sampling a program has at all; what it does not need costs it nothing.

    Attributes:
      is_sampled: add noise; False = greedy.
      has_top_k: keep the k best.
      has_top_p: keep the best of some mass.
      has_min_p: keep those of some share of the best one's probability.
      has_penalties: repetition, presence or frequency penalty.
      has_minimum: EOS ids are not picked before some number of tokens.
    """

    is_sampled: bool = False
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False
    has_penalties: bool = False
    has_minimum: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of each row, as arrays: changing them compiles nothing.

    Attributes:
      temperature: f32[B]; 0 = greedy.
      top_k: i32[B]; 0 = off.
      top_p: f32[B]; 1 = off.
      min_p: f32[B]; 0 = off.
      repetition_penalty: f32[B]; 1 = off.
      presence_penalty: f32[B]; 0 = off.
      frequency_penalty: f32[B]; 0 = off.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf
    repetition_penalty: Leaf
    presence_penalty: Leaf
    frequency_penalty: Leaf


def process_logits(
    logits: Float[Array, "B R V"],
    params: SamplingParams,
    mode: SamplingMode,
    *,
    num_valid: int | None,
    counts: tuple[Int[Array, "B R V"], Int[Array, "B R V"]] | None,
    is_banned: Bool[Array, "B R V"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B R V"]:
    """Return logits with penalties, temperature, top-k, top-p and min-p applied, in that order.

    The order and meaning are those of transformers' processors. Tokens whose logits tie at a
    filter's threshold all stay. Tokens that a filter removes, banned ones, and ids at or past
    `num_valid` get -inf. The best of the others always stays.

    Args:
      logits: float32.
      params: settings of each row.
      mode: which of them the program has.
      num_valid: ids at or past it do not count.
      counts: with penalties, how often each id stands in the row's whole text, and in its output.
      is_banned: tokens that may not be picked; None = all may.
      implementation: kernel implementation, None = the best available.
    """
    if mode.has_penalties:
        assert counts is not None
        logits = _penalised(logits, params, *counts)
    if num_valid is not None and num_valid < logits.shape[-1]:
        is_valid = jnp.arange(logits.shape[-1]) < num_valid
        logits = jnp.where(is_valid[None, None], logits, -jnp.inf)
    if is_banned is not None:
        logits = jnp.where(is_banned, -jnp.inf, logits)
    if mode.is_sampled:
        temperature = params.temperature[:, None, None]
        logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    if mode.has_top_k:
        logits = _top_k(logits, largest, params.top_k[:, None, None], implementation)
    if mode.has_top_p:
        logits = _top_p(logits, largest, params.top_p[:, None, None], implementation)
    if mode.has_min_p:
        logits = _min_p(logits, largest, params.min_p[:, None, None])
    return logits


def add_noise(
    logits: Float[Array, "B R V"],
    params: SamplingParams,
    seed: UInt32[Array, "B"],
    positions: Int[Array, "B R"],
    depth: np.ndarray,
) -> Float[Array, "B R V"]:
    """Add each row's Gumbel noise, so that the argmax is a sample; greedy rows get none.

    Args:
      logits: processed logits of the layout's logit rows.
      params: settings of each row of the batch.
      seed: of each row's random stream.
      positions: of the tokens that the logit rows pick.
      depth: how far on each logit row stands. Rows of one depth share their noise, which is what
        keeps several candidates unbiased.
    """
    _, first, index = np.unique(depth, return_index=True, return_inverse=True)
    num_ids = logits.shape[-1]

    def noise_of(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (num_ids,), jnp.float32)

    noise = jax.vmap(jax.vmap(noise_of, in_axes=(None, 0)))(seed, positions[:, first])
    is_sampled = (params.temperature > 0)[:, None, None]
    return logits + jnp.where(is_sampled, noise[:, index], 0.0)


def prefix_counts(
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    prompt_length: Int[Array, "B"],
    block_tokens: Int[Array, "B T"],
    layout: BlockLayout,
    num_ids: int,
) -> tuple[Int[Array, "B R V"], Int[Array, "B R V"]]:
    """Return how often each id stands before the token that each logit row picks.

    A row's text is the known text and the draft tokens that it sees, which would be the text if
    they were accepted.

    Returns:
      Counts in the whole text, and in the output: the text without the prompt.
    """
    batch_size, capacity = tokens.shape
    rows = jnp.arange(batch_size)[:, None]
    position = jnp.arange(capacity)[None]
    is_known = (position < length[:, None]).astype(jnp.int32)
    is_output = is_known * (position >= prompt_length[:, None]).astype(jnp.int32)
    zeros = jnp.zeros((batch_size, num_ids), jnp.int32)
    text = zeros.at[rows, tokens].add(is_known, mode="drop")
    output = zeros.at[rows, tokens].add(is_output, mode="drop")
    # Row 0, the current token, is part of the known text.
    seen = layout.mask[list(layout.logit_rows), 1:].astype(np.int32)
    num_rows = seen.shape[0]
    if not seen.any():
        shape = (batch_size, num_rows, num_ids)
        return jnp.broadcast_to(text[:, None], shape), jnp.broadcast_to(output[:, None], shape)
    drafted = jnp.zeros((batch_size, num_rows, num_ids), jnp.int32)
    ids = jnp.where(block_tokens < 0, num_ids, block_tokens)[:, None, 1:]
    ids = jnp.broadcast_to(ids, (batch_size, *seen.shape))
    drafted = drafted.at[rows[..., None], jnp.arange(num_rows)[None, :, None], ids].add(
        jnp.asarray(seen)[None], mode="drop"
    )
    return text[:, None] + drafted, output[:, None] + drafted


def early_eos(
    eos_ids: Int[Array, "E"],
    num_emitted: Int[Array, "B R"],
    min_new_tokens: Int[Array, "B"],
    num_ids: int,
) -> Bool[Array, "B R V"]:
    """Return which ids would end a text among its first `min_new_tokens` tokens.

    Args:
      eos_ids: ids that end a text; entries below 0 are none.
      num_emitted: tokens emitted before the one that each logit row picks.
      min_new_tokens: tokens of each row that are no EOS at least.
      num_ids: V.
    """
    is_early = num_emitted < min_new_tokens[:, None]
    # Past the end, not -1, which would be the last id.
    ids = jnp.where(eos_ids < 0, num_ids, eos_ids)
    is_eos = jnp.zeros((num_ids,), jnp.bool_).at[ids].set(True, mode="drop")
    return is_early[..., None] & is_eos[None, None]


def _penalised(
    logits: Float[Array, "B R V"],
    params: SamplingParams,
    text_counts: Int[Array, "B R V"],
    output_counts: Int[Array, "B R V"],
) -> Float[Array, "B R V"]:
    """Apply the penalties: repetition on the whole text, presence and frequency on the output.

    Source: Keskar et al. 2019 (repetition), the OpenAI API (presence, frequency).
    """
    repetition = params.repetition_penalty[:, None, None]
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(text_counts > 0, repeated, logits)
    logits = logits - params.frequency_penalty[:, None, None] * output_counts.astype(jnp.float32)
    is_present = (output_counts > 0).astype(jnp.float32)
    return logits - params.presence_penalty[:, None, None] * is_present


def _top_k(
    logits: Float[Array, "B R V"],
    largest: Float[Array, "B R 1"],
    top_k: Int[Array, "B 1 1"],
    implementation: Implementation | None,
) -> Float[Array, "B R V"]:
    threshold = _threshold(logits, largest, top_k.astype(jnp.float32), "count", implementation)
    # Not >=: a NaN stays, and wins as it does in an argmax.
    return jnp.where(~(logits < threshold) | (top_k <= 0), logits, -jnp.inf)


def _top_p(
    logits: Float[Array, "B R V"],
    largest: Float[Array, "B R 1"],
    top_p: Float[Array, "B 1 1"],
    implementation: Implementation | None,
) -> Float[Array, "B R V"]:
    """Keep the most probable tokens whose mass first reaches `top_p`."""
    threshold = _threshold(logits, largest, top_p, "mass", implementation)
    is_kept = ~(logits < threshold) | (logits == largest) | (top_p >= 1)
    return jnp.where(is_kept, logits, -jnp.inf)


def _min_p(
    logits: Float[Array, "B R V"], largest: Float[Array, "B R 1"], min_p: Float[Array, "B 1 1"]
) -> Float[Array, "B R V"]:
    """Keep tokens at least `min_p` times as probable as the best one."""
    is_kept = ~(logits < largest + jnp.log(jnp.maximum(min_p, 1e-30))) | (min_p <= 0)
    return jnp.where(is_kept, logits, -jnp.inf)


def _threshold(
    logits: Float[Array, "B R V"],
    largest: Float[Array, "B R 1"],
    least: Float[Array, "B 1 1"],
    measure: Measure,
    implementation: Implementation | None,
) -> Float[Array, "B R 1"]:
    threshold = top_threshold(
        logits.reshape(-1, logits.shape[-1]),
        jnp.broadcast_to(least, largest.shape).reshape(-1),
        measure=measure,
        largest=largest.reshape(-1),
        implementation=implementation,
    )
    return threshold.reshape(largest.shape)
