"""The static shape of one query block: who sits where, who sees whom, who is a candidate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# Far more than any block that pays; the mask of a block has this many entries squared.
MAX_ROWS = 4096


def check_count(name: str, value: object, least: int) -> None:
    """Raise a one-line ValueError unless a setting is an integer of at least `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not an integer")
    if value < least:
        raise ValueError(f"{name}={value} is not at least {least}")


def check_num_rows(num_rows: int) -> None:
    """Raise a ValueError if a drafter asks for a block that no machine can want."""
    if num_rows > MAX_ROWS:
        raise ValueError(f"the drafter's block has {num_rows} rows, expected at most {MAX_ROWS}")


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Hashable description of the T rows that one target forward processes.

    Row 0 is the current token: known, its K/V not cached yet. Every row sees all cached tokens;
    `mask` says which rows of the block it sees besides.

    Attributes:
      depth: position of each row relative to the current token, length T.
      packed_mask: row-major bytes of the (T, T) mask, one byte an entry: cheap to hash at any T.
      candidate_rows: C tuples of M + 1 row indices, the current token's row 0 first, then the
        rows of the candidate's draft tokens in order. The row in place j has depth j and sees
        exactly the rows up to it: what plain decoding would see there.
      logit_rows: ascending rows whose logits are needed at all.
    """

    depth: tuple[int, ...]
    packed_mask: bytes
    candidate_rows: tuple[tuple[int, ...], ...]
    logit_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        num_rows = len(self.depth)
        if self.candidate_rows:
            check_num_rows(num_rows)
        if len(self.packed_mask) != num_rows * num_rows:
            raise ValueError(
                f"mask has {len(self.packed_mask)} entries, expected {num_rows * num_rows} "
                f"for {num_rows} rows"
            )
        if len({len(rows) for rows in self.candidate_rows}) > 1:
            raise ValueError("candidate_rows differ in length")
        for rows in self.candidate_rows:
            if not rows or rows[0] != 0:
                raise ValueError(f"candidate rows {rows} do not start at row 0")
            if not set(rows) <= set(self.logit_rows):
                raise ValueError(f"candidate rows {rows} are not all in logit_rows")
        if list(self.logit_rows) != sorted(set(self.logit_rows) & set(range(num_rows))):
            raise ValueError(f"logit_rows={self.logit_rows} are not ascending rows of the block")
        for rows in self.candidate_rows:
            self._check_text(rows)

    def _check_text(self, rows: tuple[int, ...]) -> None:
        """Raise a ValueError unless a candidate's rows see what plain decoding would see there."""
        for place, row in enumerate(rows):
            text = f"candidate rows {rows}: row {row}"
            if self.depth[row] != place:
                raise ValueError(f"{text} has depth {self.depth[row]}, expected {place}")
            seen, expected = np.flatnonzero(self.mask[row]).tolist(), sorted(rows[: place + 1])
            if seen != expected:
                raise ValueError(f"{text} sees rows {seen}, expected {expected}")

    @classmethod
    def from_mask(
        cls,
        depth: Sequence[int],
        mask: np.ndarray | Sequence[Sequence[bool]],
        candidate_rows: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
    ) -> BlockLayout:
        """Build a layout from a (T, T) boolean mask; `mask[i, j]` = row i sees row j."""
        return cls(
            depth=tuple(int(d) for d in depth),
            packed_mask=np.asarray(mask, dtype=np.bool_).tobytes(),
            candidate_rows=tuple(tuple(int(r) for r in rows) for rows in candidate_rows),
            logit_rows=tuple(int(r) for r in logit_rows),
        )

    @classmethod
    @functools.lru_cache(maxsize=64)
    def linear(cls, num_rows: int, *, has_logits: bool = True) -> BlockLayout:
        """Return the causal chain of `num_rows` rows: the current token and one candidate.

        Args:
          num_rows: T; the candidate has M = T - 1 draft tokens.
          has_logits: whether any logits are needed; without, there is no candidate either.
        """
        rows = range(num_rows)
        return cls.from_mask(
            depth=rows,
            mask=np.tri(num_rows, dtype=np.bool_),
            candidate_rows=[rows] if has_logits else [],
            logit_rows=rows if has_logits else [],
        )

    @property
    def num_rows(self) -> int:
        """Return T."""
        return len(self.depth)

    @property
    def num_candidates(self) -> int:
        """Return C."""
        return len(self.candidate_rows)

    @property
    def num_draft_tokens(self) -> int:
        """Return M, the draft tokens of one candidate."""
        return len(self.candidate_rows[0]) - 1 if self.candidate_rows else 0

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """Return the (T, T) boolean mask, read-only; `mask[i, j]` = row i sees row j."""
        num_rows = self.num_rows
        return np.frombuffer(self.packed_mask, dtype=np.bool_).reshape(num_rows, num_rows)

    @functools.cached_property
    def is_linear(self) -> bool:
        """Return whether row i sits i positions on and sees rows 0..i.

        Such a block writes its K/V straight into the cache: slot = position.
        """
        num_rows = self.num_rows
        return self.depth == tuple(range(num_rows)) and bool(
            np.array_equal(self.mask, np.tri(num_rows, dtype=np.bool_))
        )
