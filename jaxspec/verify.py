"""Target tokens of a block and how much of each candidate agrees with them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.drafters.protocol import Outcome, Proposal
from jaxspec.layout import BlockLayout
from pallas_kernels import argmax_partial, verify_greedy
from pallas_kernels.dispatch import Implementation


def verify(
    logits: Float[Array, "B R V"],
    proposal: Proposal,
    layout: BlockLayout,
    *,
    scores: Float[Array, "B R V"] | None = None,
    num_valid: int | None = None,
    implementation: Implementation | None = None,
) -> Outcome:
    """Pick the target token after every logit row and accept the longest agreeing prefix.

    Draft token j of a candidate is accepted if it and all before it equal the target of the row
    before. The token emitted after the accepted ones (the bonus token) is the target of the last
    accepted row, so every emitted token is the target model's own.

    Args:
      logits: of the layout's R logit rows.
      proposal: what was fed.
      layout: the block's layout.
      scores: what targets are the argmax of where that is not the logits: filtered and noised.
      num_valid: ids at or past it are never picked; None = V.
      implementation: kernel implementation, None = the best available.

    Returns:
      The outcome; `num_emitted` is `num_accepted + 1`, before any clip.
    """
    batch_size, num_logit_rows, vocab_size = logits.shape
    picked = logits if scores is None else scores
    values, indices = argmax_partial(
        picked.reshape(batch_size * num_logit_rows, vocab_size),
        num_valid=num_valid,
        implementation=implementation,
    )
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
        # Not the kernel's XLA form: two of those in one program crash XLA's CPU compiler (seen
        # with jax 0.10.2). The order is the same: first NaN, largest, lowest id.
        valid = logits[..., :num_valid]
        greedy = jnp.argmax(valid, axis=-1).astype(jnp.int32)
    return Outcome(
        target_tokens=_at_logit_rows(targets, layout),
        greedy_tokens=_at_logit_rows(greedy, layout),
        num_accepted=num_accepted,
        best_candidate=best_candidate,
        num_emitted=num_accepted + 1,
    )


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
