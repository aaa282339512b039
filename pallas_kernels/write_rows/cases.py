"""Named shapes of write_rows, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One call: rows of slightly different length, some of them past the end or dropped."""

    name: str
    num_caches: int
    batch: int
    kv_heads: int
    capacity: int
    head_dim: int
    block_rows: int
    num_written: int | None = None
    dtype: str = "float32"
    is_benchmark: bool = False

    def arrays(self, seed: int = 0) -> tuple[Any, ...]:
        """Make the op's arrays: caches, rows, slots, and row_index if ``num_written`` is set."""
        rng = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)

        def draw(num_slots: int) -> tuple[np.ndarray, ...]:
            shape = (self.batch, self.kv_heads, num_slots, self.head_dim)
            return tuple(
                rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(self.num_caches)
            )

        num_written = self.num_written or self.block_rows
        start = rng.integers(0, self.capacity + 1, (self.batch, 1))
        slots = (start + np.arange(num_written)[None]).astype(np.int32)
        slots[rng.random(slots.shape) < 0.2] = -1
        arrays = draw(self.capacity), draw(self.block_rows), slots
        if self.num_written is None:
            return arrays
        row_index = rng.integers(0, self.block_rows, slots.shape, np.int32)
        return *arrays, row_index

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments: none."""
        return {}


CASES = (
    Case("one_row", 2, 1, 2, 16, 32, 1),
    Case("linear", 4, 3, 2, 40, 32, 6),
    Case("branch", 6, 2, 3, 33, 64, 11, num_written=5),
    Case("odd_number_of_caches", 9, 1, 1, 8, 16, 3),
    Case("more_caches_than_a_launch", 130, 1, 1, 8, 16, 2),
    Case("more_rows_than_slots", 2, 2, 2, 20, 16, 70),
    Case("linear_bf16", 4, 1, 8, 256, 128, 8, dtype="bfloat16"),
    # A step of 36 layers, and the least of a prefill's chunk.
    Case("72_caches_8rows", 72, 1, 8, 512, 128, 8, dtype="bfloat16", is_benchmark=True),
    Case("72_caches_5_of_56rows", 72, 1, 8, 512, 128, 56, 5, dtype="bfloat16", is_benchmark=True),
    Case("72_caches_8x8rows", 72, 8, 8, 64, 128, 8, dtype="bfloat16", is_benchmark=True),
)
