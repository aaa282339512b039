"""Named shapes of top_threshold, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One call on random logits in steps of 1/8, which tie."""

    name: str
    num_rows: int
    num_columns: int
    least: float
    measure: str
    is_benchmark: bool = False

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make the op's arrays, logits, least and largest, in f32."""
        rng = np.random.default_rng(seed)
        logits = 4 * rng.standard_normal((self.num_rows, self.num_columns), np.float32)
        least = np.full((self.num_rows,), self.least, np.float32)
        logits = np.round(8 * logits) / np.float32(8)
        return logits, least, logits.max(axis=1)

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments."""
        return {"measure": self.measure}


CASES = (
    Case("one_column", 2, 1, 1.0, "count"),
    Case("97_columns_count", 3, 97, 5.0, "count"),
    Case("97_columns_mass", 3, 97, 0.7, "mass"),
    Case("5000_columns_count", 2, 5000, 1000.0, "count"),
    Case("5000_columns_mass", 2, 5000, 0.95, "mass"),
    Case("1row_count", 1, 151936, 20.0, "count", is_benchmark=True),
    Case("8rows_count", 8, 151936, 20.0, "count", is_benchmark=True),
    Case("8rows_mass", 8, 151936, 0.95, "mass", is_benchmark=True),
    Case("64rows_mass", 64, 151936, 0.95, "mass", is_benchmark=True),
)
