"""XLA form of block_attention, and its specification."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int


def norm(x: Float[Array, "*rows H"], weight: Float[Array, "H"], eps: float) -> Array:
    """Divide every head by its root mean square: f32 statistics, cast back, then the weight."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T H2"], sin: Float[Array, "B T H2"]
) -> Float[Array, "B T *heads H"]:
    """Rotate the pairs (j, j + H/2) of every head."""
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def split_qkv(
    qkv: Float[Array, "B T K X H"],
    cos: Float[Array, "B T H2"],
    sin: Float[Array, "B T H2"],
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    *,
    eps: float,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """Return the block's queries and keys, normed and rotated, and its values."""
    query = rotate(norm(qkv[..., :-2, :], q_norm, eps), cos, sin)
    key = rotate(norm(qkv[..., -2, :], k_norm, eps), cos, sin)
    return query, key.swapaxes(1, 2), qkv[..., -1, :].swapaxes(1, 2)


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
) -> tuple[
    Float[Array, "B T K G H"],
    Float[Array, "B K T H"],
    Float[Array, "B K T H"],
    Int[Array, "N"] | None,
]:
    """Attend to cache and block, as ``pallas_kernels.block_attention``."""
    query, key, value = split_qkv(qkv, cos, sin, q_norm, k_norm, eps=eps)
    batch_size, num_rows, kv_heads, groups, head_dim = query.shape
    # One matrix of G * T query rows per kv head: both products then run without a transposed
    # copy of the cache.
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch_size, kv_heads, -1, head_dim)
    visible = jnp.asarray(mask_array(num_rows, mask), jnp.bool_)[None]
    parts = [(_scores(rows, key, visible), value)]
    if cache_key is not None and cache_value is not None:
        is_live = jnp.arange(cache_key.shape[2])[None] < num_cached[:, None]
        # A weight of 0 does not silence a NaN.
        live_value = jnp.where(is_live[:, None, :, None], cache_value, 0)
        parts.append((_scores(rows, cache_key, is_live[:, None]), live_value))
    # One softmax over both parts, without a joint array of scores.
    best = jnp.max(parts[0][0], axis=-1, keepdims=True)
    for scores, _ in parts[1:]:
        best = jnp.maximum(best, jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.zeros_like(best)
    out = jnp.zeros(rows.shape, jnp.float32)
    for scores, values in parts:
        weights = jnp.exp(scores - best)
        total = total + jnp.sum(weights, axis=-1, keepdims=True)
        out = out + _product("BKQS,BKSH->BKQH", weights.astype(qkv.dtype), values)
    out = (out / total).astype(qkv.dtype)
    out = out.reshape(batch_size, kv_heads, groups, num_rows, head_dim).transpose(0, 3, 1, 2, 4)
    return out, key, value, counters


def mask_array(num_rows: int, mask: bytes | None) -> np.ndarray:
    """Return the (T, T) mask of a block, i8; None is causal."""
    if mask is None:
        return np.tri(num_rows, dtype=np.int8)
    return np.frombuffer(mask, np.int8).reshape(num_rows, num_rows)


def precision_of(x: Array) -> jax.lax.Precision:
    """Return full products for f32, where a GPU's default is TF32."""
    is_float32 = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT


def _product(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, precision=precision_of(x), preferred_element_type=jnp.float32)


def _scores(
    rows: Float[Array, "B K Q H"], key: Float[Array, "B K S H"], visible: Bool[Array, "#B #T S"]
) -> Float[Array, "B K Q S"]:
    scores = _product("BKQH,BKSH->BKQS", rows, key) * (rows.shape[-1] ** -0.5)
    num_groups = rows.shape[2] // visible.shape[1] if visible.shape[1] > 1 else 1
    visible = jnp.tile(visible, (1, num_groups, 1))[:, None]
    return jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
