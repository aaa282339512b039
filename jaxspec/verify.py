"""Target tokens of a block and how much of each candidate agrees with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.drafters.protocol import Outcome, Proposal
from jaxspec.layout import BlockLayout
from jaxspec.sharding import ONE_DEVICE, ModelAxis
from pallas_kernels import argmax_partial, verify_greedy
from pallas_kernels.dispatch import Implementation


def verify(
    logits: Float[Array, "B R V"],
    proposal: Proposal,
    layout: BlockLayout,
    *,
    scores: Float[Array, "_ _ _"] | None = None,
    num_valid: int | None = None,
    axis: ModelAxis = ONE_DEVICE,
    implementation: Implementation | None = None,
) -> Outcome:
    """Pick the target token after every logit row and accept the longest agreeing prefix.

    Draft token j of a candidate is accepted if it and all before it equal the target of the row
    before. The token emitted after the accepted ones (the bonus token) is the target of the last
    accepted row, so every emitted token is the target model's own.

    Args:
      logits: of the layout's R logit rows; where devices share the vocabulary, of a part of it.
      proposal: what was fed.
      layout: the block's layout.
      scores: what targets are the argmax of where that is not the logits: filtered and noised. Of
        all ids in any case; devices that share the vocabulary have some rows each, [R', 1, V].
      num_valid: ids at or past it are never picked; None = V.
      axis: the devices that share the vocabulary.
      implementation: kernel implementation, None = the best available.

    Returns:
      The outcome; `num_emitted` is `num_accepted + 1`, before any clip.
    """
    batch_size, num_logit_rows, num_columns = logits.shape
    picked = logits if scores is None else scores
    values, indices = argmax_partial(
        picked.reshape(-1, picked.shape[-1]),
        num_valid=num_valid,
        index_offset=axis.index * num_columns if scores is None else 0,
        implementation=implementation,
    )
    if axis.size > 1:
        # Values and ids in one message between devices.
        both = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), indices], axis=-1)
        if scores is None:
            both = axis.gather(both, axis=1)
        else:
            both = axis.collect_rows(both, batch_size * num_logit_rows)
        values = jax.lax.bitcast_convert_type(both[..., 0], jnp.float32)
        indices = both[..., 1]
    # The kernel knows logit rows only; the layout's indices count all rows of the block.
    logit_index = {row: index for index, row in enumerate(layout.logit_rows)}
    candidate_rows = tuple(
        tuple(logit_index[row] for row in rows) for rows in layout.candidate_rows
    )
    targets, num_accepted, best_candidate = verify_greedy(
        _draft_tokens(proposal.block_tokens, layout),
        proposal.num_draft,
        values.reshape(batch_size, num_logit_rows, -1),
        indices.reshape(batch_size, num_logit_rows, -1),
        candidate_rows=candidate_rows,
        implementation=implementation,
    )
    greedy = targets
    if scores is not None:
        greedy = _greedy_tokens(logits, num_valid, axis)
    return Outcome(
        target_tokens=_at_logit_rows(targets, layout),
        greedy_tokens=_at_logit_rows(greedy, layout),
        num_accepted=num_accepted,
        best_candidate=best_candidate,
        num_emitted=num_accepted + 1,
    )


def _greedy_tokens(
    logits: Float[Array, "B R V"], num_valid: int | None, axis: ModelAxis
) -> Int[Array, "B R"]:
    """Return the argmax of rows whose vocabulary the devices of `axis` share.

    Not by the kernel's XLA form: two of those in one program crash XLA's CPU compiler (seen with
    jax 0.10.2). The order is the same: first NaN, largest, lowest id.
    """
    if axis.size == 1:
        return jnp.argmax(logits[..., :num_valid], axis=-1).astype(jnp.int32)
    num_columns = logits.shape[-1]
    ids = axis.index * num_columns + jnp.arange(num_columns, dtype=jnp.int32)
    valid = (
        logits if num_valid is None else jnp.where((ids < num_valid)[None, None], logits, -jnp.inf)
    )
    best = jnp.argmax(valid, axis=-1, keepdims=True)
    values = axis.gather(jnp.take_along_axis(valid, best, axis=-1), axis=2)
    tokens = axis.gather(ids[best], axis=2)
    # The first of equal devices has the lowest ids.
    device = jnp.argmax(values, axis=-1, keepdims=True)
    return jnp.take_along_axis(tokens, device, axis=-1)[..., 0]


def _draft_tokens(block_tokens: Int[Array, "B T"], layout: BlockLayout) -> Int[Array, "B C M"]:
    """Return each candidate's draft tokens.

    Mostly they stand side by side: a slice, which compiles to nothing where the drafter has
    joined the block from the current token and the drafts.
    """
    rows = np.asarray([rows[1:] for rows in layout.candidate_rows], dtype=np.int32)
    first = int(rows.flat[0]) if rows.size else 0
    if np.array_equal(rows.ravel(), np.arange(first, first + rows.size)):
        drafts = block_tokens[:, first : first + rows.size]
        return drafts.reshape(block_tokens.shape[0], *rows.shape)
    return block_tokens[:, rows]


def _at_logit_rows(token_ids: Int[Array, "B R"], layout: BlockLayout) -> Int[Array, "B T"]:
    """Return the ids of the logit rows at their places in the block, -1 elsewhere.

    A gather, which joins the kernels of its users; a scatter would be two of its own.
    """
    if len(layout.logit_rows) == layout.num_rows:
        return token_ids
    is_logit_row = np.isin(np.arange(layout.num_rows), layout.logit_rows)
    index = np.maximum(np.cumsum(is_logit_row) - 1, 0)
    return jnp.where(jnp.asarray(is_logit_row)[None], token_ids[:, index], -1)
