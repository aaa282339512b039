"""Named shapes of the n-gram pool's ops, for tests and benchmarks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One insertion into a pool, full but for some entries, and one lookup.

    Few symbols make copies, within the new n-grams as well, and many n-grams of one key.
    """

    name: str
    batch: int
    num_entries: int
    ngram_size: int
    num_new: int
    num_candidates: int
    num_symbols: int = 3
    is_benchmark: bool = False

    def pool(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make grams, seen and clock; n-grams that are in use differ, as in a pool."""
        rng = np.random.default_rng(seed)
        shape = (self.batch, self.num_entries)
        grams = rng.integers(0, self.num_symbols, (*shape, self.ngram_size), np.int32)
        clock = np.full((self.batch,), 2 * self.num_entries, np.int32)
        order = np.tile(1 + np.arange(clock[0], dtype=np.int32), (self.batch, 1))
        order = rng.permuted(order, axis=1)
        seen = order[:, : self.num_entries].copy()
        seen[rng.random(shape) < 0.1] = 0
        for row in range(self.batch):
            _, first = np.unique(grams[row], axis=0, return_index=True)
            is_copy = np.ones(self.num_entries, np.bool_)
            is_copy[first] = False
            seen[row, is_copy] = 0
        return grams, seen, clock

    def new(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make the n-grams to add, some of them in the pool, and which of them to add."""
        rng = np.random.default_rng(seed + 1)
        shape = (self.batch, self.num_new)
        new = rng.integers(0, self.num_symbols, (*shape, self.ngram_size), np.int32)
        return new, rng.random(shape) < 0.8

    def key(self, seed: int = 0) -> np.ndarray:
        """Make the keys of a lookup."""
        rng = np.random.default_rng(seed + 2)
        return rng.integers(0, self.num_symbols, (self.batch,), np.int32)


CASES = (
    Case("one_entry", 2, 1, 2, 1, 1),
    Case("more_new_than_entries", 3, 3, 2, 5, 4),
    Case("small", 4, 16, 3, 5, 2),
    Case("odd_sizes", 3, 125, 4, 7, 7),
    Case("many_of_one_key", 2, 500, 5, 12, 16, num_symbols=2),
    Case("default", 1, 4096, 5, 12, 7, num_symbols=5, is_benchmark=True),
    Case("default_8rows", 8, 4096, 5, 12, 7, num_symbols=5, is_benchmark=True),
    Case("7_grams", 1, 4096, 7, 14, 7, num_symbols=4, is_benchmark=True),
)
