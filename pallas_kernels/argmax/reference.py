"""XLA form of the argmax ops, and their specification.

Floats are mapped to i32 keys whose integer order is the order of the ops. Integers leave nothing
to a backend's treatment of NaN, signed zeros and denormals, and the best of two is associative
and commutative, so any order of evaluation gives the same id.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

# The key below every float's, and the id that loses every tie: an id that must not win.
INVALID_KEY = -(2**31)
INVALID_INDEX = 2**31 - 1
NAN_KEY = 2**31 - 1

# Columns of a part of a row: small ones while programs are few, so that every multiprocessor has
# some. Fastest on an H200 at 1, 8 and 64 rows of 151,936 among 1,024 to 16,384.
BLOCK, LARGE_BLOCK = 2048, 4096
MIN_LARGE_PROGRAMS = 2048


def block_size(num_rows: int, num_columns: int) -> int:
    """Choose the columns of a part; every form uses this, so that their Q agree."""
    if num_rows * -(-num_columns // LARGE_BLOCK) >= MIN_LARGE_PROGRAMS:
        return LARGE_BLOCK
    return min(BLOCK, 1 << (num_columns - 1).bit_length())


def sort_key(values: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Map floats to integers of the same order: NaN above all, -0.0 equal to 0.0."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    # Two's complement orders negative floats backwards.
    key = jnp.where(bits < 0, -magnitude, bits)
    return jnp.where(magnitude > 0x7F800000, NAN_KEY, key)


def key_value(key: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Invert sort_key; INVALID_KEY gives -inf."""
    bits = jnp.where(key < 0, jnp.abs(key) | INVALID_KEY, key)
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(key == INVALID_KEY, -jnp.inf, value)


def best(
    key: Int[Array, "*rows N"], index: Int[Array, "*#rows N"]
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    """Reduce the last axis to the largest key and the lowest index that has it."""

    def combine(left, right):
        is_right = (right[0] > left[0]) | ((right[0] == left[0]) & (right[1] < left[1]))
        return jax.tree.map(lambda x, y: jnp.where(is_right, y, x), left, right)

    operands = (key, jnp.broadcast_to(index, key.shape))
    worst = (jnp.int32(INVALID_KEY), jnp.int32(INVALID_INDEX))
    return jax.lax.reduce(operands, worst, combine, (key.ndim - 1,))


def argmax_partial(
    logits: Float[Array, "R V"], index_offset: Int[Array, ""], *, num_valid: int | None
) -> tuple[Float[Array, "R Q"], Int[Array, "R Q"]]:
    """Find the best id of each part of every row, as ``pallas_kernels.argmax_partial``."""
    num_rows, num_columns = logits.shape
    block = block_size(num_rows, num_columns)
    num_blocks = -(-num_columns // block)
    index = index_offset + jnp.arange(num_columns, dtype=jnp.int32)[None]
    key = sort_key(logits)
    if num_valid is not None:
        valid = index < num_valid
        key = jnp.where(valid, key, INVALID_KEY)
        index = jnp.where(valid, index, INVALID_INDEX)
    padding = ((0, 0), (0, num_blocks * block - num_columns))
    key = jnp.pad(key, padding, constant_values=INVALID_KEY)
    index = jnp.pad(index, padding, constant_values=INVALID_INDEX)
    key, index = best(key.reshape(num_rows, num_blocks, block), index.reshape(1, num_blocks, block))
    return key_value(key), index


def argmax_reduce(values: Float[Array, "R Q"], indices: Int[Array, "R Q"]) -> Int[Array, "R"]:
    """Pick the id of the best partial result, as ``pallas_kernels.argmax_reduce``."""
    return best(sort_key(values), indices)[1]


def argmax(logits: Float[Array, "R V"], *, num_valid: int | None) -> Int[Array, "R"]:
    """Pick the best id of each row in one pass, as ``pallas_kernels.argmax``."""
    key = sort_key(logits[:, :num_valid])
    return best(key, jax.lax.broadcasted_iota(jnp.int32, key.shape, 1))[1]
