"""Tiles of keys: their sizes, and the arithmetic on one as it stands inside a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = 1.4426950408889634
# Up to so many rows are one launch, and blocks that continue the text give bits that do not depend
# on the width; from more than so many rows on such a block is prefill.
NARROW_ROWS, PREFILL_ROWS = 16, 128
# Fewest entries of a tile that is normed. Every thread then has whole vectors of a row: the order
# of a row's sum, and with it its bits, do not depend on how many rows there are.
NORMED_ENTRIES = 2048


class Tiles(NamedTuple):
    """Query rows and keys of a program's matrix products, and how it is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(
    num_rows: int,
    num_query_rows: int,
    head_dim: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    *,
    is_prefill: bool,
) -> Tiles:
    """Return the tiles that suit a block best; full f32 products run on no tensor core.

    The query rows and stages of a narrow block change no bits.
    """
    if dtype == jnp.float32:
        return Tiles(16, 16 if num_rows <= NARROW_ROWS else 32, 8, 2)
    if num_rows <= NARROW_ROWS:
        # In a short cache loads in flight cost more than they save.
        row_tile = max(16 if num_query_rows <= 32 else 32, NORMED_ENTRIES // head_dim)
        return Tiles(row_tile, 128, 8, 1 if capacity <= 4096 else 3)
    if is_prefill:
        return Tiles(128, 64, 4, 2) if num_rows > 1024 else Tiles(64, 64, 4, 3)
    if capacity > 8192:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32 if num_rows <= 64 else 64, 4, 3)


def product(x, y, precision, contracting):
    """Multiply two matrices over one axis of each, with f32 accumulation."""
    contract = tuple((axis,) for axis in contracting)
    return jax.lax.dot_general(
        x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def norm_rotate(x, partner, cos, sin, weight_ref, eps):
    """Norm and rotate heads; `partner` holds, for each entry, the other one of its pair.

    Rounds as the reference does.
    """
    dtype, width = x.dtype, x.shape[1]

    def rounded(x):
        return x.astype(dtype).astype(jnp.float32)

    column = jnp.arange(width, dtype=jnp.int32)
    is_low = column < width // 2
    other = jnp.where(is_low, column + width // 2, column - width // 2)
    weight = weight_ref[column].astype(jnp.float32)[None]
    other_weight = weight_ref[other].astype(jnp.float32)[None]
    x, partner, cos, sin = (part.astype(jnp.float32) for part in (x, partner, cos, sin))
    scale = jax.lax.rsqrt(jnp.sum(x * x, axis=1) / width + eps)[:, None]
    x = rounded(rounded(x * scale) * weight)
    partner = rounded(rounded(partner * scale) * other_weight)
    turned = rounded(partner * sin)
    return (rounded(x * cos) + jnp.where(is_low[None], -turned, turned)).astype(dtype)


def accumulate(state, scores, value, scale, precision):
    """Add a tile of keys to a running softmax. Invisible keys have a score of -inf.

    Keys are the long side of the products and query rows the short one: [keys, rows] scores,
    [H, rows] sums. Weights are summed key by key, and over the keys of a tile only at the end.
    """
    best, total, out = state
    new_best = jnp.maximum(best, jnp.max(scores, axis=0))
    # Rows that have seen no key yet.
    base = jnp.where(new_best == -jnp.inf, 0.0, new_best)
    # Scaled after the difference: nothing here can be contracted in two ways, so that every
    # kind of tile rounds alike.
    weights = jnp.exp2((scores - base[None]) * scale)
    decay = jnp.exp2((best - base) * scale)[None]
    out = out * decay + product(value, weights.astype(value.dtype), precision, (0, 0))
    return new_best, total * decay + weights, out
