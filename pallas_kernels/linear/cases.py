"""Named shapes of the products, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import PreNorm


@dataclass(frozen=True)
class Case:
    """One call of one of the ops; the rows of an RMSNorm bring their squares in several parts."""

    op: str
    name: str
    num_rows: int
    inner: int
    num_columns: int
    transposed: bool = False
    num_parts: int = 1
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    is_benchmark: bool = False

    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the op's weight."""
        if self.op == "rms_swiglu":
            return self.inner, 2, self.num_columns
        shape = self.inner, self.num_columns
        return shape[::-1] if self.transposed else shape

    def arrays(self, seed: int = 0) -> tuple[Any, ...]:
        """Make the op's arrays; those of a weight repeat after a while, it is large."""
        rng = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)

        def normal(*shape: int, scale: float = 1.0) -> Any:
            values = rng.standard_normal(min(int(np.prod(shape)), 1000003), np.float32)
            return np.resize((values * np.float32(scale)).astype(dtype), shape)

        x = normal(self.num_rows, self.inner)
        weight = normal(*self.weight_shape(), scale=self.inner**-0.5)
        if self.op == "linear_residual":
            residual = normal(self.num_rows, self.num_columns)
            return x, weight, residual, normal(self.num_columns)
        norm_weight = normal(self.inner)
        squares = np.square(x.astype(np.float32))
        parts = [part.sum(1) for part in np.array_split(squares, self.num_parts, axis=1)]
        sum_squares: Any = np.stack(parts, axis=1)
        return PreNorm(x, norm_weight, x * norm_weight, sum_squares), weight

    def shapes(self) -> tuple[Any, ...]:
        """Return the shapes and dtypes of the op's arrays."""

        def array(*shape: int, dtype: str = self.dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        x, weight = array(self.num_rows, self.inner), array(*self.weight_shape())
        if self.op == "linear_residual":
            return x, weight, array(self.num_rows, self.num_columns), array(self.num_columns)
        squares = array(self.num_rows, self.num_parts, dtype="float32")
        return PreNorm(x, array(self.inner), x, squares), weight

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments."""
        if self.op == "linear_residual":
            return {}
        if self.op == "rms_swiglu":
            return {"eps": 1e-6}
        return {"eps": 1e-6, "transposed": self.transposed, "out_dtype": self.out_dtype}


# The products of Qwen3-8B: op, name, inner axis, columns, and whether the weight is transposed.
_QWEN3_8B = (
    ("rms_linear", "qkv", 4096, 6144, False),
    ("linear_residual", "o", 4096, 4096, False),
    ("rms_swiglu", "gate_up", 4096, 12288, False),
    ("linear_residual", "down", 12288, 4096, False),
    ("rms_linear", "head", 4096, 151936, True),
)

# One device's part of them, where 8 or 4 devices share the model.
_PARTS = (
    ("rms_linear", "qkv_of_8", 4096, 768, False),
    ("linear_residual", "o_of_8", 512, 4096, False),
    ("rms_swiglu", "gate_up_of_8", 4096, 1536, False),
    ("rms_swiglu", "gate_up_of_4", 4096, 3072, False),
    ("linear_residual", "down_of_8", 1536, 4096, False),
    ("rms_linear", "head_of_8", 4096, 19072, True),
)

CASES = (
    Case("rms_linear", "one_row", 1, 64, 96),
    Case("rms_linear", "odd_f32", 3, 131, 97, num_parts=5, dtype="float32"),
    Case("rms_linear", "many_rows", 128, 256, 192, num_parts=4),
    Case("rms_linear", "head_97_columns", 5, 256, 97, True, 3, out_dtype="float32"),
    Case("rms_linear", "head_odd_f32", 17, 131, 97, True, dtype="float32"),
    Case("rms_linear", "head_many_rows", 60, 128, 320, True),
    Case("rms_swiglu", "one_row", 1, 64, 96),
    Case("rms_swiglu", "odd_f32", 2, 131, 97, num_parts=3, dtype="float32"),
    Case("rms_swiglu", "8_rows", 8, 256, 160, num_parts=4),
    Case("rms_swiglu", "many_rows", 128, 131, 97),
    Case("linear_residual", "one_row", 1, 64, 96),
    Case("linear_residual", "odd_f32", 3, 131, 97, dtype="float32"),
    Case("linear_residual", "16_rows", 16, 512, 128),
    Case("linear_residual", "split_f32", 33, 256, 97, dtype="float32"),
    Case("linear_residual", "many_rows", 128, 384, 160),
    *(
        Case(op, f"{name}_{rows}rows", rows, inner, columns, transposed, is_benchmark=True)
        for op, name, inner, columns, transposed in _QWEN3_8B
        for rows in (1, 8, 64)
    ),
    *(
        Case(op, f"{name}_{rows}rows", rows, inner, columns, transposed, is_benchmark=True)
        for op, name, inner, columns, transposed in _PARTS
        for rows in (8, 64)
    ),
    # The most rows that there are tilings for, wide and narrow.
    *(
        Case(op, f"{name}_128rows", 128, inner, columns, is_benchmark=True)
        for op, name, inner, columns, transposed in (*_QWEN3_8B, *_PARTS)
        if not transposed
    ),
)
