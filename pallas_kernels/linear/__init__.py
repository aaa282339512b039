"""Products of a few rows with a large weight, with the RMSNorm before or the residual after them.

A decode step reads every weight once, so these products run at the speed of memory, and every small
kernel between two of them is time in which memory rests. Here the norm, SwiGLU and the residual sum
ride along. An RMSNorm is split in two: the kernel that makes the rows also multiplies them by the
norm's weight and sums their squares; the kernel that reads them divides its result by the root mean
square.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.dispatch import Implementation, dispatch

# Products of more rows are bound by arithmetic, and XLA's are faster; a head's earlier.
MAX_ROWS, MAX_HEAD_ROWS = 128, 64
# Fewest columns of a program that has a counter of its own.
COUNTED_COLUMNS = 16


class PreNorm(NamedTuple):
    """Rows that an RMSNorm is to be applied to.

    Attributes:
        x: The rows, [R, D].
        norm_weight: The norm's weight, [D].
        scaled: x times the norm's weight, [R, D].
        sum_squares: f32[R, Q], parts of each row's sum of squares.
    """

    x: Float[Array, "R D"]
    norm_weight: Float[Array, "D"]
    scaled: Float[Array, "R D"]
    sum_squares: Float[Array, "R Q"]


def pre_norm(x: Float[Array, "R D"], norm_weight: Float[Array, "D"]) -> PreNorm:
    """Prepare rows for an RMSNorm.

    Squares are summed by elementwise additions, in an order that does not depend on the number of
    rows; a reduction's order would.
    """
    width = x.shape[1]
    num_added = min(width & -width, 64)
    squares = jnp.square(x.astype(jnp.float32)).reshape(-1, num_added, width // num_added)
    sum_squares = squares[:, 0]
    for index in range(1, num_added):
        sum_squares = sum_squares + squares[:, index]
    return PreNorm(x, norm_weight, x * norm_weight[None], sum_squares)


def rms_linear(
    rows: PreNorm,
    weight: Float[Array, "_ _"],
    counters: Int[Array, "_"] | None = None,
    *,
    eps: float,
    transposed: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "R N"], Int[Array, "_"] | None]:
    """Multiply normalised rows by a weight, with float32 sums.

    Args:
        rows: What to normalise.
        weight: [D, N], or [N, D] where `transposed`.
        counters: At least ``num_counters`` of the columns zeros, i32, for programs to count
            arrivals where they share the inner axis. A caller with many calls passes the returned
            ones on to the next call; None makes them.
        eps: Added to the mean square.
        transposed: Whether the weight's rows are the result's columns.
        out_dtype: Of the result; None means that of the rows.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        The product; ``counters``, zeros again.

    Raises:
        ValueError: The shapes or dtypes do not belong together, or there are too few counters.
        NotImplementedError: A form asked for by name does not take these shapes.
    """
    _check("weight", weight, rows.x, axis=1 if transposed else 0, ndim=2)
    _check_counters(counters, weight.shape[0 if transposed else 1])
    return dispatch(
        __name__,
        "rms_linear",
        implementation,
        rows,
        weight,
        counters,
        eps=eps,
        transposed=transposed,
        out_dtype=out_dtype or rows.x.dtype,
    )


def rms_swiglu(
    rows: PreNorm,
    weight: Float[Array, "D 2 F"],
    counters: Int[Array, "_"] | None = None,
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "R F"], Int[Array, "_"] | None]:
    """Return silu(gate) * up of normalised rows, the two products side by side in one weight.

    Args:
        rows: What to normalise.
        weight: Gate, then up.
        counters: As for ``rms_linear``.
        eps: Added to the mean square.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        The result; ``counters``, zeros again.

    Raises:
        ValueError: The shapes or dtypes do not belong together, or there are too few counters.
        NotImplementedError: A form asked for by name does not take these shapes.
    """
    _check("weight", weight, rows.x, axis=0, ndim=3)
    _check_counters(counters, weight.shape[2])
    return dispatch(__name__, "rms_swiglu", implementation, rows, weight, counters, eps=eps)


def linear_residual(
    x: Float[Array, "R K"],
    weight: Float[Array, "K D"],
    residual: Float[Array, "R D"],
    norm_weight: Float[Array, "D"],
    counters: Int[Array, "N"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[PreNorm, Int[Array, "N"] | None]:
    """Add x @ weight to the residual stream and prepare the sum for the RMSNorm that follows.

    Args:
        x: Rows.
        weight: Their weight.
        residual: What to add the product to.
        norm_weight: Weight of the norm that follows.
        counters: As for ``rms_linear``.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        The sum, prepared; ``counters``, zeros again.

    Raises:
        ValueError: The shapes or dtypes do not belong together, or there are too few counters.
        NotImplementedError: A form asked for by name does not take these shapes.
    """
    _check("weight", weight, x, axis=0, ndim=2)
    expected = (x.shape[0], weight.shape[1])
    if residual.shape != expected or norm_weight.shape != expected[1:]:
        raise ValueError(
            f"residual {residual.shape} and norm_weight {norm_weight.shape} are not "
            f"{expected} and {expected[1:]}"
        )
    if residual.dtype != x.dtype or norm_weight.dtype != x.dtype:
        raise ValueError(
            f"residual has dtype {residual.dtype} and norm_weight {norm_weight.dtype}, "
            f"but the rows have {x.dtype}"
        )
    _check_counters(counters, weight.shape[1])
    y, scaled, squares, counters = dispatch(
        __name__, "linear_residual", implementation, x, weight, residual, norm_weight, counters
    )
    return PreNorm(y, norm_weight, scaled, squares), counters


def num_counters(num_columns: int) -> int:
    """Return how many counters a product needs at most for so many columns."""
    return -(-num_columns // COUNTED_COLUMNS)


def _check_counters(counters: Array | None, num_columns: int) -> None:
    needed = num_counters(num_columns)
    if counters is not None and (
        counters.dtype != jnp.int32 or counters.ndim != 1 or counters.size < needed
    ):
        raise ValueError(
            f"counters has shape {counters.shape} and dtype {counters.dtype}, at least "
            f"{(needed,)} and int32 are needed"
        )


def _check(name: str, weight: Array, x: Array, *, axis: int, ndim: int) -> None:
    if weight.ndim != ndim or weight.shape[axis] != x.shape[-1]:
        raise ValueError(
            f"{name} has shape {weight.shape}, expected {x.shape[-1]} on axis {axis} of {ndim}"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"{name} has dtype {weight.dtype} but the rows have {x.dtype}")
