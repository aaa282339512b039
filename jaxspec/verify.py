"""Target tokens of a block and how much of each candidate agrees with them."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.drafters.protocol import Outcome, Proposal
from jaxspec.layout import BlockLayout
from pallas_kernels import argmax_partial, verify_greedy


def verify(
    logits: Float[Array, "B R V"],
    proposal: Proposal,
    layout: BlockLayout,
    *,
    num_valid: int | None = None,
    implementation: Literal["triton", "interpret", "xla"] | None = None,
) -> Outcome:
    """Pick the target token after every logit row and accept the longest agreeing prefix.

    Draft token j of a candidate is accepted if it and all before it equal the target of the row
    before. The token emitted after the accepted ones (the bonus token) is the target of the last
    accepted row, so every emitted token is the target model's own.

    Args:
      logits: of the layout's R logit rows.
      proposal: what was fed.
      layout: the block's layout.
      num_valid: ids at or past it are never picked; None = V.
      implementation: kernel implementation, None = the best available.

    Returns:
      The outcome; `num_emitted` is `num_accepted + 1`, before any clip.
    """
    batch_size, num_logit_rows, vocab_size = logits.shape
    flat = logits.reshape(batch_size * num_logit_rows, vocab_size)
    values, indices = argmax_partial(flat, num_valid=num_valid, implementation=implementation)
    # The kernel knows logit rows only; the layout's indices count all rows of the block.
    logit_index = {row: index for index, row in enumerate(layout.logit_rows)}
    candidate_rows = tuple(
        tuple(logit_index[row] for row in rows) for rows in layout.candidate_rows
    )
    draft_rows = np.asarray([rows[1:] for rows in layout.candidate_rows], dtype=np.int32)
    targets, num_accepted, best_candidate = verify_greedy(
        proposal.block_tokens[:, draft_rows],
        proposal.num_draft,
        values.reshape(batch_size, num_logit_rows, -1),
        indices.reshape(batch_size, num_logit_rows, -1),
        candidate_rows=candidate_rows,
        implementation=implementation,
    )
    if num_logit_rows < layout.num_rows:
        rows = np.asarray(layout.logit_rows, dtype=np.int32)
        everywhere = jnp.full((batch_size, layout.num_rows), -1, jnp.int32)
        targets = everywhere.at[:, rows].set(targets)
    return Outcome(
        target_tokens=targets,
        greedy_tokens=targets,
        num_accepted=num_accepted,
        best_candidate=best_candidate,
        num_emitted=num_accepted + 1,
    )
