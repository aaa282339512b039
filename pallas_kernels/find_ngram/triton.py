"""Pallas Triton form of find_ngram.

Two launches: one program per chunk of positions writes that chunk's best score, then one program
a row takes the maximum and gathers the draft. Scores are those of ``reference.py``. One launch
with one program a row is slower already at 2,048 tokens (H200: 5.7 us against 4.6).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Int

from pallas_kernels.find_ngram.reference import NO_MATCH

# Positions a program and its warps, fastest on an H200 among 128 to 2,048 and 1 to 8.
BLOCK, SMALL_BLOCK = 512, 256
SMALL_CAPACITY = 4096
NUM_WARPS = 8
# The comparisons are unrolled over the n-gram.
MAX_NGRAM_SIZE = 64


class _Search(NamedTuple):
    """Static arguments of a call, the same for all kernels."""

    capacity: int
    ngram_size: int
    min_ngram_size: int
    match: str


def _block_score(search, tokens_ref, row, start, length, block):
    """Best score of ``block`` positions from ``start``; loads only what ``length`` bounds."""
    position = start + jnp.arange(block, dtype=jnp.int32)
    # The last known token ends the suffix itself: nothing follows it.
    inside = position < length - 1
    match_length = jnp.full((block,), search.ngram_size, jnp.int32)
    for j in range(search.ngram_size):
        suffix = plt.load(tokens_ref.at[row, length - 1 - j], mask=length > j, other=0)
        mask = inside & (position >= j)
        token = plt.load(tokens_ref.at[row, position - j], mask=mask, other=0)
        agrees = mask & (token == suffix)
        match_length = jnp.minimum(match_length, jnp.where(agrees, search.ngram_size, j))
    rank = position if search.match == "last" else search.capacity - 1 - position
    valid = inside & (match_length >= search.min_ngram_size)
    return jnp.max(jnp.where(valid, match_length * search.capacity + rank, NO_MATCH))


def _write_draft(search, tokens_ref, draft_ref, num_draft_ref, row, score, length):
    """Write the row's draft from its best score."""
    num_draft_tokens = draft_ref.shape[1]
    found = score >= 0
    rank = jax.lax.rem(jnp.maximum(score, 0), jnp.int32(search.capacity))
    start = (rank if search.match == "last" else search.capacity - 1 - rank) + 1
    # Past the end of the text the draft repeats with the distance of the match as its period.
    period = jnp.maximum(length - start, 1)
    step = jnp.arange(pl.next_power_of_2(num_draft_tokens), dtype=jnp.int32)
    index = start + jax.lax.rem(step, jnp.full(step.shape, period))
    written = step < num_draft_tokens
    draft = plt.load(tokens_ref.at[row, index], mask=written & found, other=NO_MATCH)
    plt.store(draft_ref.at[row, step], draft, mask=written)
    # Not jnp.where(found, M, 0): the backend gives two Python scalars the predicate's type, i1.
    num_draft_ref[row] = found.astype(jnp.int32) * num_draft_tokens


def _find_ngram_partial_kernel(tokens_ref, length_ref, score_ref, *, search, block):
    chunk, row = pl.program_id(0), pl.program_id(1)
    score_ref[row, chunk] = _block_score(
        search, tokens_ref, row, chunk * block, length_ref[row], block
    )


def _find_ngram_global_kernel(
    score_ref, tokens_ref, length_ref, draft_ref, num_draft_ref, *, search
):
    row = pl.program_id(0)
    num_chunks = score_ref.shape[1]
    chunk = jnp.arange(pl.next_power_of_2(num_chunks), dtype=jnp.int32)
    scores = plt.load(score_ref.at[row, chunk], mask=chunk < num_chunks, other=NO_MATCH)
    _write_draft(
        search, tokens_ref, draft_ref, num_draft_ref, row, jnp.max(scores), length_ref[row]
    )


def find_ngram(
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    *,
    ngram_size: int,
    num_draft_tokens: int,
    min_ngram_size: int,
    match: str,
    interpret: bool = False,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[Int[Array, "B M"], Int[Array, "B"]]:
    """Draft from the longest earlier match of the suffix, as ``pallas_kernels.find_ngram``.

    Raises:
        NotImplementedError: The n-gram is longer than the kernel unrolls.
    """
    if ngram_size > MAX_NGRAM_SIZE:
        raise NotImplementedError(f"ngram_size={ngram_size} is greater than {MAX_NGRAM_SIZE}")
    num_rows, capacity = tokens.shape
    search = _Search(capacity, ngram_size, min_ngram_size, match)
    drafts = (
        jax.ShapeDtypeStruct((num_rows, num_draft_tokens), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )
    block = block or (BLOCK if capacity > SMALL_CAPACITY else SMALL_BLOCK)
    num_chunks = pl.cdiv(capacity, block)
    scores = jax.ShapeDtypeStruct((num_rows, num_chunks), jnp.int32)
    kernel = partial(_find_ngram_partial_kernel, search=search, block=block)
    launch = _launcher((num_chunks, num_rows), num_warps or NUM_WARPS, interpret)
    scores = launch(kernel, scores)(tokens, length)
    launch = _launcher((num_rows,), 1, interpret)
    kernel = partial(_find_ngram_global_kernel, search=search)
    return launch(kernel, drafts)(scores, tokens, length)


def _launcher(grid: tuple[int, ...], num_warps: int, interpret: bool) -> Callable[..., Any]:
    """Fix what all launches share. Staging only helps loops that feed a matrix product."""
    return partial(
        pl.pallas_call,
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )
