"""Verification: target tokens from partial argmax results, and how many drafts they confirm."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.argmax import validate_partials
from pallas_kernels.dispatch import Implementation, dispatch


def verify_greedy(
    draft_tokens: Int[Array, "B C M"],
    num_draft: Int[Array, "B C"],
    values: Float[Array, "B T Q"],
    indices: Int[Array, "B T Q"],
    *,
    candidate_rows: Sequence[Sequence[int]] | np.ndarray,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, "B"], Int[Array, "B"]]:
    """Accept the longest prefix of any candidate that the target model would have emitted.

    Draft j of a candidate is accepted if it equals the target token of the row before it, and
    all drafts before it are accepted. Drafts at or past ``num_draft``, and negative ones, never
    are.

    Args:
        draft_tokens: M drafts of each candidate; M may be 0.
        num_draft: Drafts in use, 0 to M; a candidate with 0 accepts nothing.
        values: Partial argmax values of every row of the block, f32.
        indices: Their global ids, i32.
        candidate_rows: Static (C, M + 1) rows of the block: the current token's, then each
            draft's.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        Target token of every row of the block; number of drafts accepted, 0 to M; the candidate
        they are from, the lowest among the longest.

    Raises:
        ValueError: ``candidate_rows`` does not have shape (C, M + 1) or leaves the block, or
            arrays disagree in shape or have the wrong dtype.

    Source: the target_verify_greedy and argmax_reduce kernels of Mirage, which handle one
    candidate and one row of partials. Several candidates as in lookahead decoding (Fu et al.,
    2024, section 3).
    """
    rows = np.asarray(candidate_rows, np.int32)
    _validate(draft_tokens, num_draft, values, indices, rows)
    return dispatch(
        __name__,
        "verify_greedy",
        implementation,
        draft_tokens,
        num_draft,
        values,
        indices,
        candidate_rows=tuple(map(tuple, rows.tolist())),
    )


def _validate(
    draft_tokens: Int[Array, "B C M"],
    num_draft: Int[Array, "..."],
    values: Float[Array, "..."],
    indices: Int[Array, "..."],
    rows: np.ndarray,
) -> None:
    validate_partials(values, indices)
    for name, array in (("draft_tokens", draft_tokens), ("num_draft", num_draft)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, not int32")
    batch, num_candidates, num_draft_tokens = draft_tokens.shape
    if num_candidates < 1:
        raise ValueError(f"draft_tokens of shape {draft_tokens.shape} has no candidates")
    if num_draft.shape != (batch, num_candidates):
        raise ValueError(f"num_draft has shape {num_draft.shape}, not {(batch, num_candidates)}")
    if values.shape[0] != batch:
        raise ValueError(f"values has {values.shape[0]} batch rows but draft_tokens has {batch}")
    if rows.shape != (num_candidates, num_draft_tokens + 1):
        raise ValueError(
            f"candidate_rows has shape {rows.shape}, not {(num_candidates, num_draft_tokens + 1)}"
        )
    num_rows = values.shape[1]
    if rows.min() < 0 or rows.max() >= num_rows:
        raise ValueError(
            f"candidate_rows has rows {rows.min()} to {rows.max()}, outside a block of {num_rows}"
        )
