"""Named shapes of verify_greedy, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One call: the candidates' rows are the last C * M of the block, row 0 is shared."""

    name: str
    num_rows: int
    num_candidates: int
    num_draft_tokens: int
    block_rows: int
    num_parts: int
    vocab_size: int = 2
    is_benchmark: bool = False

    def candidate_rows(self) -> np.ndarray:
        """Return the static (C, M + 1) rows of the block."""
        shape = (self.num_candidates, self.num_draft_tokens)
        rows = self.block_rows - np.arange(np.prod(shape), 0, -1).reshape(shape)
        return np.concatenate([np.zeros((shape[0], 1), np.int64), rows], axis=1)

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make the op's arrays: draft_tokens, num_draft, values and indices.

        A vocabulary of two makes drafts agree often, values of three make ties often.
        """
        rng = np.random.default_rng(seed)
        shape = (self.num_rows, self.num_candidates, self.num_draft_tokens)
        draft_tokens = rng.integers(0, self.vocab_size, shape, np.int32)
        num_draft = rng.integers(0, self.num_draft_tokens + 1, shape[:2], np.int32)
        shape = (self.num_rows, self.block_rows, self.num_parts)
        values = rng.integers(0, 3, shape).astype(np.float32)
        indices = rng.integers(0, self.vocab_size, shape, np.int32)
        return draft_tokens, num_draft, values, indices

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments."""
        return {"candidate_rows": tuple(map(tuple, self.candidate_rows().tolist()))}


CASES = (
    Case("no_draft", 3, 1, 0, 1, 1),
    Case("no_draft_many_parts", 1, 1, 0, 1, 149),
    Case("linear", 4, 1, 5, 6, 3),
    Case("cpu_lookahead", 3, 2, 2, 8, 1),
    Case("odd_shape", 2, 3, 3, 11, 37),
    Case("widest_block", 2, 16, 7, 128, 256),
    Case("one_draft_many_candidates", 2, 16, 1, 17, 5),
    # The logit rows and parts of the defaults on a GPU, at 151,936 logits.
    Case("linear_15_drafts", 1, 1, 15, 16, 75),
    Case("lookahead_7_candidates_of_6", 1, 7, 6, 50, 75),
    Case("linear_7_drafts", 1, 1, 7, 8, 38, is_benchmark=True),
    Case("lookahead_7_candidates", 1, 7, 4, 56, 19, is_benchmark=True),
    Case("lookahead_8rows", 8, 7, 4, 56, 19, is_benchmark=True),
)
