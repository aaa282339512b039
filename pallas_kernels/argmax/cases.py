"""Named shapes of the argmax ops, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One call on random logits in steps of 1/8, which tie as bfloat16 logits do."""

    name: str
    num_rows: int
    num_columns: int
    num_valid: int | None = None
    dtype: str = "float32"
    is_benchmark: bool = False

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make the op's array, logits, in f32 or the case's dtype."""
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((self.num_rows, self.num_columns), np.float32)
        return (np.round(8 * logits) / np.float32(8),)

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments."""
        return {"num_valid": self.num_valid}


CASES = (
    Case("one_column", 2, 1),
    Case("97_columns", 3, 97),
    Case("1000_columns_bf16", 5, 1000, dtype="bfloat16"),
    Case("5000_columns_half_valid", 3, 5000, num_valid=2500),
    Case("vocabulary_bf16", 2, 151936, num_valid=151669, dtype="bfloat16"),
    Case("1row", 1, 151936, is_benchmark=True),
    Case("8rows", 8, 151936, is_benchmark=True),
    Case("64rows", 64, 151936, is_benchmark=True),
    Case("8rows_valid", 8, 151936, num_valid=151669, is_benchmark=True),
)
