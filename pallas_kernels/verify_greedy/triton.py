"""Pallas Triton form of verify_greedy: one launch, one program a batch row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

from pallas_kernels.argmax.reference import INVALID_INDEX, INVALID_KEY, sort_key
from pallas_kernels.argmax.triton import best

# Elements of the largest array that a program holds in registers, and its warps.
TILE = 4096
NUM_WARPS = 8


def _verify_greedy_kernel(
    draft_ref,
    num_draft_ref,
    value_ref,
    index_ref,
    rows_ref,
    target_ref,
    num_accepted_ref,
    best_candidate_ref,
    *,
    tile_rows,
    candidates,
    drafts,
):
    batch = pl.program_id(0)
    _, num_rows, num_parts = value_ref.shape
    _, num_candidates, num_draft_tokens = draft_ref.shape
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)[None]
    candidate = jnp.arange(candidates, dtype=jnp.int32)[:, None]
    offset = jnp.arange(drafts, dtype=jnp.int32)[None]
    is_draft = (candidate < num_candidates) & (offset < num_draft_tokens)
    before = plt.load(rows_ref.at[candidate, offset], mask=is_draft, other=0)

    def reduce_rows(i, target_before):
        """Write the target tokens of one tile of rows, and keep those that drafts follow."""
        row = i * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
        mask = (row[:, None] < num_rows) & (part < num_parts)
        value = plt.load(value_ref.at[batch, row[:, None], part], mask=mask, other=0)
        index = plt.load(index_ref.at[batch, row[:, None], part], mask=mask, other=INVALID_INDEX)
        _, target = best(jnp.where(mask, sort_key(value), INVALID_KEY), index)
        plt.store(target_ref.at[batch, row], target, mask=row < num_rows)
        # Triton cannot gather from registers: select by comparison. One row of one tile matches.
        is_before = before[:, :, None] == row[None, None, :]
        return target_before + jnp.sum(jnp.where(is_before, target[None, None, :], 0), axis=2)

    target_before = jax.lax.fori_loop(
        0, pl.cdiv(num_rows, tile_rows), reduce_rows, jnp.zeros((candidates, drafts), jnp.int32)
    )
    draft = plt.load(draft_ref.at[batch, candidate, offset], mask=is_draft, other=-1)
    num_draft = plt.load(
        num_draft_ref.at[batch, candidate], mask=candidate < num_candidates, other=0
    )
    agrees = (draft == target_before) & (draft >= 0) & (offset < num_draft)
    # The first disagreement ends the prefix. Padding is no disagreement of a real candidate.
    agrees = agrees | (offset >= num_draft_tokens)
    accepted = jnp.min(jnp.where(agrees, num_draft_tokens, offset), axis=1)
    candidate = jnp.arange(candidates, dtype=jnp.int32)
    accepted = jnp.where(candidate < num_candidates, accepted, -1)
    num_accepted, best_candidate = best(accepted, candidate)
    num_accepted_ref[batch] = num_accepted
    best_candidate_ref[batch] = best_candidate


def verify_greedy(
    draft_tokens: Int[Array, "B C M"],
    num_draft: Int[Array, "B C"],
    values: Float[Array, "B T Q"],
    indices: Int[Array, "B T Q"],
    *,
    candidate_rows: tuple[tuple[int, ...], ...],
    interpret: bool = False,
    tile: int = TILE,
    num_warps: int = NUM_WARPS,
) -> tuple[Int[Array, "B T"], Int[Array, "B"], Int[Array, "B"]]:
    """Accept the longest confirmed prefix, as ``pallas_kernels.verify_greedy``."""
    batch, num_rows, num_parts = values.shape
    if draft_tokens.shape[2] == 0:
        # An array without elements cannot be passed; one draft that is not in use can.
        draft_tokens = jnp.full((*draft_tokens.shape[:2], 1), -1, jnp.int32)
        num_draft = jnp.zeros_like(num_draft)
    candidates, drafts = map(pl.next_power_of_2, draft_tokens.shape[1:])
    tile_rows = max(1, tile // max(pl.next_power_of_2(num_parts), candidates * drafts))
    tile_rows = min(tile_rows, pl.next_power_of_2(num_rows))
    return pl.pallas_call(
        partial(_verify_greedy_kernel, tile_rows=tile_rows, candidates=candidates, drafts=drafts),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_rows), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        ),
        grid=(batch,),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(draft_tokens, num_draft, values, indices, jnp.asarray(np.asarray(candidate_rows, np.int32)))
