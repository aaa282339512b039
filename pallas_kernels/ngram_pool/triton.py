"""Pallas Triton form of the n-gram pool's ops: one launch each, one program a pool.

A program holds its pool's columns in registers, and takes the largest or the smallest `seen` of
all entries as often as it needs one: few, where XLA sorts all entries in many launches.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Bool, Int

# Entries of a pool that a program holds, and tokens that it compares each of them with.
MAX_ENTRIES = 16384
MAX_COMPARISONS = 256
# Above every `seen`: an entry that is taken, or that is none.
TAKEN = 2**31 - 1
NUM_WARPS = 8


def _lookup_ngrams_kernel(
    gram_ref, seen_ref, key_ref, found_ref, num_tokens_ref, *, entries, candidates, tokens
):
    row = pl.program_id(0)
    _, num_entries, _ = gram_ref.shape
    _, num_candidates, num_tokens = found_ref.shape
    entry = jnp.arange(entries, dtype=jnp.int32)
    inside = entry < num_entries
    first = plt.load(gram_ref.at[row, entry, 0], mask=inside, other=0)
    seen = plt.load(seen_ref.at[row, entry], mask=inside, other=0)
    score = jnp.where(first == key_ref[row], seen, 0)
    num_found = jnp.sum((inside & (score > 0)).astype(jnp.int32))
    candidate = jnp.arange(candidates, dtype=jnp.int32)

    def find(index, carry):
        score, place = carry
        best = jnp.argmax(score).astype(jnp.int32)
        score = jnp.where(entry == best, -1, score)
        return score, jnp.where(candidate == index, best, place)

    carry = jnp.where(inside, score, -1), jnp.zeros((candidates,), jnp.int32)
    _, place = jax.lax.fori_loop(0, min(num_candidates, num_entries), find, carry)
    token = jnp.arange(tokens, dtype=jnp.int32)[None]
    is_output = (candidate[:, None] < num_candidates) & (token < num_tokens)
    mask = is_output & (candidate[:, None] < num_entries)
    found = plt.load(gram_ref.at[row, place[:, None], token + 1], mask=mask, other=0)
    plt.store(found_ref.at[row, candidate[:, None], token], found, mask=is_output)
    length = (candidate < num_found).astype(jnp.int32) * num_tokens
    plt.store(num_tokens_ref.at[row, candidate], length, mask=candidate < num_candidates)


def _insert_ngrams_kernel(
    old_gram_ref,
    old_seen_ref,
    old_clock_ref,
    new_ref,
    is_new_ref,
    gram_ref,
    seen_ref,
    clock_ref,
    *,
    entries,
    news,
):
    row = pl.program_id(0)
    _, num_entries, ngram_size = gram_ref.shape
    num_new = new_ref.shape[1]
    clock = old_clock_ref[row]
    entry = jnp.arange(entries, dtype=jnp.int32)
    inside = entry < num_entries
    seen = plt.load(old_seen_ref.at[row, entry], mask=inside, other=TAKEN)
    columns = [
        plt.load(old_gram_ref.at[row, entry, i], mask=inside, other=0) for i in range(ngram_size)
    ]
    is_copy = jnp.zeros((entries,), jnp.bool_)
    for j in range(num_new):
        is_same = inside & (is_new_ref[row, j] != 0)
        for i, column in enumerate(columns):
            is_same = is_same & (column == new_ref[row, j, i])
        is_copy = is_copy | is_same
    seen = jnp.where(is_copy, 0, seen)

    # Of equal new ones the latest is kept; the rank of one is the number of later ones.
    j = jnp.arange(news, dtype=jnp.int32)
    is_later = j[:, None] < j[None]
    is_new = plt.load(is_new_ref.at[row, j], mask=j < num_new, other=0)
    new = [plt.load(new_ref.at[row, j, i], mask=j < num_new, other=0) for i in range(ngram_size)]
    is_same = is_later & (is_new[None] != 0)
    for token in new:
        is_same = is_same & (token[:, None] == token[None])
    is_kept = is_new * (1 - jnp.max(is_same.astype(jnp.int32), axis=1))
    rank = jnp.sum(jnp.where(is_later, is_kept[None], 0), axis=1)
    num_placed = jnp.minimum(jnp.sum(is_kept), num_entries)

    def take(index, carry):
        seen, place = carry
        oldest = jnp.argmin(seen).astype(jnp.int32)
        seen = jnp.where(entry == oldest, TAKEN, seen)
        return seen, jnp.where(rank == index, oldest, place)

    carry = seen, jnp.zeros((news,), jnp.int32)
    seen, place = jax.lax.fori_loop(0, num_placed, take, carry)
    # No two threads write one address: an entry is either forgotten or taken. Every read comes
    # before these writes, which wait for the reductions above.
    plt.store(seen_ref.at[row, entry], jnp.zeros_like(seen), mask=is_copy & (seen != TAKEN))
    is_placed = (is_kept != 0) & (rank < num_placed)
    # Interpreted, a masked store writes back what it finds: let it find nothing.
    place = jnp.where(is_placed, place, num_entries)
    for i, token in enumerate(new):
        plt.store(gram_ref.at[row, place, i], token, mask=is_placed)
    plt.store(seen_ref.at[row, place], clock + 1 + j, mask=is_placed)
    clock_ref[row] = clock + jnp.max(is_new) * num_new


def lookup_ngrams(
    grams: Int[Array, "B R N"],
    seen: Int[Array, "B R"],
    key: Int[Array, "B"],
    *,
    num_candidates: int,
    interpret: bool = False,
    num_warps: int = NUM_WARPS,
) -> tuple[Int[Array, "B G D"], Int[Array, "B G"]]:
    """Find the latest n-grams of a key, as ``pallas_kernels.lookup_ngrams``.

    Raises:
        NotImplementedError: The pool is larger than a program holds.
    """
    batch, num_entries, ngram_size = grams.shape
    _check_size(num_entries)
    return pl.pallas_call(
        partial(
            _lookup_ngrams_kernel,
            entries=pl.next_power_of_2(num_entries),
            candidates=pl.next_power_of_2(num_candidates),
            tokens=pl.next_power_of_2(ngram_size - 1),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_candidates, ngram_size - 1), jnp.int32),
            jax.ShapeDtypeStruct((batch, num_candidates), jnp.int32),
        ),
        grid=(batch,),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(grams, seen, key)


def insert_ngrams(
    grams: Int[Array, "B R N"],
    seen: Int[Array, "B R"],
    clock: Int[Array, "B"],
    new: Int[Array, "B n N"],
    is_new: Bool[Array, "B n"],
    *,
    interpret: bool = False,
    num_warps: int = NUM_WARPS,
) -> tuple[Int[Array, "B R N"], Int[Array, "B R"], Int[Array, "B"]]:
    """Add n-grams as the latest seen, as ``pallas_kernels.insert_ngrams``.

    Raises:
        NotImplementedError: The pool is larger than a program holds, or the new n-grams are more
            than the kernel unrolls.
    """
    batch, num_entries, ngram_size = grams.shape
    num_new = new.shape[1]
    _check_size(num_entries)
    if num_new * ngram_size > MAX_COMPARISONS:
        raise NotImplementedError(f"{num_new} n-grams of {ngram_size} tokens are too many")
    pool = (grams, seen, clock)
    return pl.pallas_call(
        partial(
            _insert_ngrams_kernel,
            entries=pl.next_power_of_2(num_entries),
            news=pl.next_power_of_2(num_new),
        ),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool),
        grid=(batch,),
        input_output_aliases={0: 0, 1: 1, 2: 2},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(*pool, new, is_new.astype(jnp.int32))


def _check_size(num_entries: int) -> None:
    if num_entries > MAX_ENTRIES:
        raise NotImplementedError(f"a pool of {num_entries} n-grams exceeds {MAX_ENTRIES}")
