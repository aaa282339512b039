"""XLA form of the products, and their specification: transformers' order of casts."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def _product(spec: str, x: Array, weight: Array, out_dtype: jax.typing.DTypeLike) -> Array:
    """Contract with float32 sums; float32 operands are multiplied as such, not as TF32."""
    is_float32 = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=out_dtype)


def _normalise(rows, eps: float) -> Array:
    wide = rows.x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(rows.x.dtype) * rows.norm_weight[None]


def rms_linear(
    rows,
    weight: Array,
    counters: Int[Array, "_"] | None = None,
    *,
    eps: float,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "R N"], Int[Array, "_"] | None]:
    """Multiply normalised rows by a weight, as ``pallas_kernels.rms_linear``."""
    spec = "RD,ND->RN" if transposed else "RD,DN->RN"
    return _product(spec, _normalise(rows, eps), weight, out_dtype), counters


def rms_swiglu(
    rows, weight: Float[Array, "D 2 F"], counters: Int[Array, "_"] | None = None, *, eps: float
) -> tuple[Float[Array, "R F"], Int[Array, "_"] | None]:
    """Return silu(gate) * up of normalised rows, as ``pallas_kernels.rms_swiglu``."""
    both = _product("RD,DXF->RXF", _normalise(rows, eps), weight, rows.x.dtype)
    return jax.nn.silu(both[:, 0]) * both[:, 1], counters


def linear_residual(
    x: Float[Array, "R K"],
    weight: Float[Array, "K D"],
    residual: Float[Array, "R D"],
    norm_weight: Float[Array, "D"],
    counters: Int[Array, "N"] | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"], Float[Array, "R 1"], Int[Array, "N"] | None]:
    """Return the sum, the sum times the norm's weight, its sum of squares, and the counters."""
    y = residual + _product("RK,KD->RD", x, weight, x.dtype)
    squares = jnp.sum(jnp.square(y.astype(jnp.float32)), axis=1, keepdims=True)
    return y, y * norm_weight[None], squares, counters
