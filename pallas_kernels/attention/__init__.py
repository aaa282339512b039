"""Attention of a block of rows over the live part of a cache and over the block itself."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.attention.reference import norm as norm
from pallas_kernels.attention.reference import rotate as rotate
from pallas_kernels.dispatch import Implementation, dispatch

# Fewest query rows of a program that has a counter of its own.
COUNTED_ROWS = 16


def block_attention(
    qkv: Float[Array, "B T K X H"],
    cos: Float[Array, "B T H2"],
    sin: Float[Array, "B T H2"],
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    cache_key: Float[Array, "B K S H"] | None,
    cache_value: Float[Array, "B K S H"] | None,
    num_cached: Int[Array, "B"],
    counters: Int[Array, "N"] | None = None,
    *,
    mask: bytes | None,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "B T K G H"],
    Float[Array, "B K T H"],
    Float[Array, "B K T H"],
    Int[Array, "N"] | None,
]:
    """Norm and rotate the block's queries and keys, then attend to the cache and the block.

    Queries and keys get an RMSNorm per head, in the cast order of transformers, then RoPE in its
    half-rotation form. Scores are f32, scaled by H ** -0.5; weights are cast to the input's dtype
    before the product with the values, which accumulates in f32. A row sees the cache slots below
    ``num_cached`` and the rows of the block that the mask says; what it gives if it sees neither is
    up to the form. Other slots change nothing, whatever they hold, NaN included.

    Args:
        qkv: For each of K kv heads its G query heads, its key, its value: X = G + 2.
        cos: Cosines of the rows' H / 2 angles, in the dtype of ``qkv``.
        sin: Their sines.
        q_norm: Weight of the queries' norm.
        k_norm: Weight of the keys' norm.
        cache_key: Keys of the S slots, rotated; None for no cache.
        cache_value: Their values; None for no cache.
        num_cached: Live slots of each batch row, 0 to S, i32. Without a cache it has no effect.
        counters: At least ``num_counters(qkv.shape)`` zeros, i32, for programs to count arrivals.
            A caller with many calls passes the returned ones on to the next call, so that no call
            has to make its own; None makes them.
        mask: Row-major bytes of the (T, T) mask, 1 at (i, j) if row i sees row j. None: the block
            continues the text, row i is at position ``num_cached + i`` and sees rows 0..i.
        eps: Added to the mean square in the norms.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        Attention output of every query head; the block's keys, rotated, and its values, as the
        cache stores them; ``counters``, zeros again.

    Raises:
        ValueError: Arrays disagree in shape or dtype, one of the cache's arrays is missing, there
            are too few counters, or the mask has another size.
        NotImplementedError: A form asked for by name does not take these shapes.

    Source: flash-decoding (Dao et al., 2023) for the split over keys. Ours reads what is live
    only, and adds the block's norm and rotation.
    """
    _validate_block(qkv, cos, sin, q_norm, k_norm)
    _validate_cache(qkv, cache_key, cache_value, num_cached)
    _validate_counters(qkv.shape, counters)
    _validate_mask(qkv.shape[1], mask)
    return dispatch(
        __name__,
        "block_attention",
        implementation,
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        cache_key,
        cache_value,
        num_cached,
        counters,
        mask=mask,
        eps=eps,
    )


def num_counters(qkv_shape: tuple[int, ...]) -> int:
    """Return how many counters a call on ``qkv`` of this shape needs at most."""
    batch_size, num_rows, kv_heads, heads, _ = qkv_shape
    return batch_size * kv_heads * -(-num_rows * (heads - 2) // COUNTED_ROWS)


def _validate_block(
    qkv: Float[Array, "..."],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    q_norm: Float[Array, "..."],
    k_norm: Float[Array, "..."],
) -> None:
    if qkv.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"qkv has dtype {qkv.dtype}, not float32, bfloat16 or float16")
    batch_size, num_rows, _, heads, head_dim = qkv.shape
    if heads < 3 or qkv.size == 0:
        raise ValueError(f"qkv of shape {qkv.shape} has no query heads or no elements")
    if head_dim % 2:
        raise ValueError(f"qkv has an odd head width, {head_dim}")
    table, weight = (batch_size, num_rows, head_dim // 2), (head_dim,)
    for name, array, shape in (
        ("cos", cos, table),
        ("sin", sin, table),
        ("q_norm", q_norm, weight),
        ("k_norm", k_norm, weight),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
        if array.dtype != qkv.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, not {qkv.dtype} as qkv")


def _validate_cache(
    qkv: Float[Array, "..."],
    cache_key: Float[Array, "..."] | None,
    cache_value: Float[Array, "..."] | None,
    num_cached: Int[Array, "..."],
) -> None:
    if num_cached.dtype != jnp.int32:
        raise ValueError(f"num_cached has dtype {num_cached.dtype}, not int32")
    if num_cached.shape != qkv.shape[:1]:
        raise ValueError(f"num_cached has shape {num_cached.shape}, not {qkv.shape[:1]}")
    if (cache_key is None) != (cache_value is None):
        raise ValueError("cache_key and cache_value are not both given or both None")
    if cache_key is None or cache_value is None:
        return
    batch_size, _, kv_heads, _, head_dim = qkv.shape
    shape = (batch_size, kv_heads, *cache_key.shape[2:3], head_dim)
    for name, array in (("cache_key", cache_key), ("cache_value", cache_value)):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
        if array.dtype != qkv.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, not {qkv.dtype} as qkv")
    if cache_key.shape[2] < 1:
        raise ValueError(f"cache_key of shape {cache_key.shape} has no slots")


def _validate_counters(qkv_shape: tuple[int, ...], counters: Int[Array, "..."] | None) -> None:
    if counters is None:
        return
    if counters.dtype != jnp.int32:
        raise ValueError(f"counters has dtype {counters.dtype}, not int32")
    if counters.ndim != 1 or counters.size < num_counters(qkv_shape):
        raise ValueError(
            f"counters has shape {counters.shape}, at least {(num_counters(qkv_shape),)} is needed"
        )


def _validate_mask(num_rows: int, mask: bytes | None) -> None:
    if mask is None:
        return
    if len(mask) != num_rows * num_rows:
        raise ValueError(
            f"mask has {len(mask)} entries, expected {num_rows * num_rows} for {num_rows} rows"
        )
