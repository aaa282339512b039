"""Named shapes of find_ngram, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One call: random text of ``vocab_size`` symbols, rows of slightly different length."""

    name: str
    num_rows: int
    capacity: int
    length: int
    ngram_size: int
    num_draft_tokens: int
    min_ngram_size: int = 1
    match: str = "last"
    vocab_size: int = 3
    is_benchmark: bool = False

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make the op's arrays: tokens and length."""
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, self.vocab_size, (self.num_rows, self.capacity), np.int32)
        length = np.maximum(self.length - 3 * np.arange(self.num_rows, dtype=np.int32), 0)
        return tokens, length

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments."""
        return {
            "ngram_size": self.ngram_size,
            "num_draft_tokens": self.num_draft_tokens,
            "min_ngram_size": self.min_ngram_size,
            "match": self.match,
        }


CASES = (
    Case("one_token_capacity", 1, 1, 1, 1, 1),
    Case("capacity_below_ngram", 3, 5, 5, 16, 4),
    Case("short_first", 5, 37, 37, 3, 5, min_ngram_size=3, match="first"),
    Case("odd_draft", 4, 129, 120, 4, 7),
    Case("power_of_two_capacity", 2, 2048, 2000, 16, 7),
    Case("odd_capacity_first", 2, 3001, 3001, 8, 10, match="first"),
    Case("odd_capacity", 3, 4999, 4990, 5, 7),
    Case("first_of_half_text", 2, 6000, 2500, 3, 5, min_ngram_size=3, match="first"),
    Case("longest_ngram", 1, 40960, 40960, 64, 15),
    # 32k tokens of a vocabulary where most positions differ at once, as in real text.
    Case("32k_1row_n3", 1, 32768, 30000, 3, 7, vocab_size=1000, is_benchmark=True),
    Case("32k_1row_n16", 1, 32768, 30000, 16, 7, vocab_size=1000, is_benchmark=True),
    Case("32k_8rows_n3", 8, 32768, 30000, 3, 7, vocab_size=1000, is_benchmark=True),
    Case("32k_8rows_n16", 8, 32768, 30000, 16, 7, vocab_size=1000, is_benchmark=True),
    Case("2k_1row_n16", 1, 2048, 1500, 16, 7, vocab_size=1000, is_benchmark=True),
    Case("4k_8rows_n16", 8, 4096, 4000, 16, 7, vocab_size=1000, is_benchmark=True),
)
