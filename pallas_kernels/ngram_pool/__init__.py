"""A pool of n-grams, looked up by first token and forgetting the least recently seen."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from pallas_kernels.dispatch import Implementation, dispatch


def lookup_ngrams(
    grams: Int[Array, "B R N"],
    seen: Int[Array, "B R"],
    key: Int[Array, "B"],
    *,
    num_candidates: int,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B G D"], Int[Array, "B G"]]:
    """Find the most recently seen n-grams that start with a key.

    Args:
        grams: N-grams of each pool, i32, in no order; N is at least 2.
        seen: When each was last seen, i32, 0 where the entry is empty; the others of one b differ.
        key: First token of the n-grams to find, i32.
        num_candidates: G, n-grams to return.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        The n-grams without the key (D = N - 1), most recent first, any where there are no more;
        and the tokens of each: N - 1, or 0 where there are no more.

    Raises:
        ValueError: An array is not i32, shapes disagree, or there are no entries, candidates or
            tokens.
    """
    _validate(grams, seen, key=key)
    if num_candidates < 1:
        raise ValueError(f"num_candidates={num_candidates} is less than 1")
    return dispatch(
        __name__,
        "lookup_ngrams",
        implementation,
        grams,
        seen,
        key,
        num_candidates=num_candidates,
    )


def insert_ngrams(
    grams: Int[Array, "B R N"],
    seen: Int[Array, "B R"],
    clock: Int[Array, "B"],
    new: Int[Array, "B n N"],
    is_new: Bool[Array, "B n"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B R N"], Int[Array, "B R"], Int[Array, "B"]]:
    """Add n-grams as the most recently seen ones; copies seen before are dropped.

    The latest takes the place of the least recently seen entry, the lowest among equals, and so
    on; what does not fit is older than all of these.

    Args:
        grams: N-grams of each pool, i32; updated in place where the caller allows.
        seen: When each was last seen, i32, 0 where the entry is empty; the others of one b differ.
        clock: Largest ``seen`` so far, i32.
        new: N-grams to add, i32, oldest first.
        is_new: Which of them to add.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        The pool's three arrays.

    Raises:
        ValueError: An array has the wrong dtype, shapes disagree, or there are no entries.
    """
    _validate(grams, seen, clock=clock)
    if new.dtype != jnp.int32:
        raise ValueError(f"new has dtype {new.dtype}, not int32")
    if (new.shape[0], new.shape[2]) != (grams.shape[0], grams.shape[2]):
        raise ValueError(f"new has shape {new.shape} but grams has shape {grams.shape}")
    if new.shape[1] < 1 or is_new.shape != new.shape[:2]:
        raise ValueError(f"is_new has shape {is_new.shape} but new has shape {new.shape}")
    return dispatch(__name__, "insert_ngrams", implementation, grams, seen, clock, new, is_new)


def _validate(grams: Array, seen: Array, **per_row: Array) -> None:
    for name, array in {"grams": grams, "seen": seen, **per_row}.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, not int32")
    batch, num_entries, ngram_size = grams.shape
    if num_entries < 1 or ngram_size < 2:
        raise ValueError(f"grams of shape {grams.shape} has no entries, or less than 2 tokens each")
    if seen.shape != (batch, num_entries):
        raise ValueError(f"seen has shape {seen.shape}, not {(batch, num_entries)}")
    for name, array in per_row.items():
        if array.shape != (batch,):
            raise ValueError(f"{name} has shape {array.shape}, not {(batch,)}")
