"""Argmax over the vocabulary in two stages, so that it spreads over a GPU and over devices."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.dispatch import Implementation, dispatch


def argmax_partial(
    logits: Float[Array, "R V"],
    *,
    num_valid: int | None = None,
    index_offset: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "R Q"], Int[Array, "R Q"]]:
    """Find the best id of each of Q equal parts of every row of logits.

    The order is total: the first NaN, then the largest value, then the lowest id; -0.0 equals
    0.0. Values are compared in f32.

    Args:
        logits: One shard of the vocabulary, f32, bf16 or f16.
        num_valid: Global ids from this one on never win; None lets every id win.
        index_offset: Global id of the first column; may be traced.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        Best values, f32, and their global ids, i32. A part with no valid id gives -inf and
        2**31 - 1, which loses to every valid id.

    Raises:
        ValueError: ``num_valid`` is below 1, or the logits have another dtype or no columns.

    Source: the argmax_partial kernel of Mirage, which skips NaN, and breaks ties by lane.
    """
    _validate(logits, num_valid)
    return dispatch(
        __name__,
        "argmax_partial",
        implementation,
        logits,
        jnp.asarray(index_offset, jnp.int32),
        num_valid=num_valid,
    )


def argmax_reduce(
    values: Float[Array, "R Q"],
    indices: Int[Array, "R Q"],
    *,
    implementation: Implementation | None = None,
) -> Int[Array, "R"]:
    """Pick the id of the best of each row's partial results, in the order of argmax_partial.

    Args:
        values: Values from argmax_partial, f32; those of several shards side by side.
        indices: Their global ids, i32.
        implementation: Form to run, see ``pallas_kernels``.

    Raises:
        ValueError: The arrays differ in shape, have the wrong dtype, or no columns.
    """
    validate_partials(values, indices)
    return dispatch(__name__, "argmax_reduce", implementation, values, indices)


def argmax(
    logits: Float[Array, "*rows V"],
    *,
    num_valid: int | None = None,
    implementation: Implementation | None = None,
) -> Int[Array, "*rows"]:
    """Pick the best id of the last axis, in the order of argmax_partial.

    Args:
        logits: The whole vocabulary, f32, bf16 or f16.
        num_valid: Ids from this one on never win; None lets every id win.
        implementation: Form to run, see ``pallas_kernels``.

    Raises:
        ValueError: ``num_valid`` is below 1 or above V, or the logits have another dtype or no
            columns.
    """
    _validate(logits, num_valid)
    if num_valid is not None and num_valid > logits.shape[-1]:
        raise ValueError(f"num_valid={num_valid} is greater than the {logits.shape[-1]} logits")
    rows = logits.reshape(-1, logits.shape[-1])
    ids = dispatch(__name__, "argmax", implementation, rows, num_valid=num_valid)
    return ids.reshape(logits.shape[:-1])


def validate_partials(values: Float[Array, "..."], indices: Int[Array, "..."]) -> None:
    """Check partial results of argmax_partial; the last axis is Q."""
    if values.shape != indices.shape:
        raise ValueError(f"values has shape {values.shape} but indices has shape {indices.shape}")
    if values.shape[-1] < 1:
        raise ValueError(f"values of shape {values.shape} has no partial results")
    if values.dtype != jnp.float32:
        raise ValueError(f"values has dtype {values.dtype}, not float32")
    if indices.dtype != jnp.int32:
        raise ValueError(f"indices has dtype {indices.dtype}, not int32")


def _validate(logits: Float[Array, "*rows V"], num_valid: int | None) -> None:
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"logits has dtype {logits.dtype}, not float32, bfloat16 or float16")
    if logits.shape[-1] < 1:
        raise ValueError(f"logits of shape {logits.shape} has no columns")
    if num_valid is not None and num_valid < 1:
        raise ValueError(f"num_valid={num_valid} is less than 1")
