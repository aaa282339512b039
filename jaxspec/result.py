"""What a call gives back: texts, and how they came about; on the host."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Literal

import jax
import numpy as np

from jaxspec.drafters import Auto, Drafter
from jaxspec.record import NOT_DRAFTED, Origin, TokenRecord
from jaxspec.sharding import fetch
from jaxspec.state import (
    FINISHED_BY_EOS,
    FINISHED_BY_LENGTH,
    FINISHED_BY_STOP,
    DecodeState,
    Request,
)

FinishReason = Literal["eos", "stop", "length"]
_FINISH_REASONS: dict[int, FinishReason] = {
    FINISHED_BY_EOS: "eos",
    FINISHED_BY_LENGTH: "length",
    FINISHED_BY_STOP: "stop",
}


@dataclasses.dataclass(frozen=True)
class Generation:
    """The texts of one call, on the host.

    Attributes:
      tokens: i32[B, P] prompt and output; only the first `lengths` of a row are known.
      lengths: i32[B] known tokens.
      prompt_lengths: i32[B] tokens of each prompt.
      finish_reasons: per row "eos", "stop", "length", or None while it goes on.
      record: how each token came about, and its logits if they were asked for; arrays of NumPy.
      num_draft_tokens: M, most draft tokens that a step can accept.
      rows_by_arm: rows of a block, one number for each drafter that `Auto` chooses among.
      prefill_seconds: time of the prefill, all rows together.
      decode_seconds: time of the decode loop so far, all rows together.
      compile_seconds: time to trace and compile (or find compiled) the programs.
      measure_seconds: time to measure what `Auto` chooses by; 0 where that was known.
      step_costs: relative time of a step of each drafter that `Auto` chooses among, plain decoding
        first: what it chose by; None without it.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    finish_reasons: tuple[FinishReason | None, ...]
    record: TokenRecord
    num_draft_tokens: int
    rows_by_arm: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    measure_seconds: float
    step_costs: tuple[float, ...] | None = None

    @property
    def token_ids(self) -> list[list[int]]:
        """Return the emitted ids of each row, EOS included, prompt excluded."""
        return [row.tolist() for row in self._emitted(self.tokens)]

    @property
    def num_tokens(self) -> np.ndarray:
        """Return i32[B], emitted tokens."""
        return self.lengths - self.prompt_lengths

    @property
    def num_steps(self) -> np.ndarray:
        """Return i64[B], target forwards that emitted the row's tokens.

        A row that ends at a stop string may have taken part in a few more before it was found.
        """
        return np.array([len(ends) for ends in self._step_ends], np.int64)

    @property
    def mean_accepted_length(self) -> np.ndarray:
        """Return f64[B], tokens emitted per target forward, the bonus token included."""
        return self.num_tokens / np.maximum(self.num_steps, 1)

    @property
    def accepted_lengths(self) -> list[np.ndarray]:
        """Return per row the tokens that each of its steps emitted, the first step first."""
        return [np.diff(ends, prepend=0) for ends in self._step_ends]

    @property
    def accepted_by_position(self) -> np.ndarray:
        """Return i64[B, M], steps in which draft token j was accepted and emitted."""
        positions = [origin.draft_position for origin in self._origins]
        return np.array(
            [
                np.bincount(row[row != NOT_DRAFTED], minlength=self.num_draft_tokens)
                for row in positions
            ]
        )

    @property
    def num_drafted(self) -> np.ndarray:
        """Return i64[B], draft tokens that were fed, those of all candidates together."""
        return np.array(
            [
                origin.num_drafted[ends - 1].sum()
                for origin, ends in zip(self._origins, self._step_ends, strict=True)
            ],
            np.int64,
        )

    @property
    def num_steps_by_rows(self) -> list[dict[int, int]]:
        """Return per row of the batch how many of its steps had a block of so many rows."""
        rows = np.asarray(self.rows_by_arm)
        return [
            dict(sorted(Counter(rows[origin.arm[ends - 1]].tolist()).items()))
            for origin, ends in zip(self._origins, self._step_ends, strict=True)
        ]

    @property
    def logprobs(self) -> list[np.ndarray] | None:
        """Return per row f32[n], natural log-probabilities of its tokens; None if not asked for.

        They are the model's own: before penalties, temperature and filters.
        """
        if self.record.logits is None:
            return None
        return self._emitted(self.record.logits.token_logit - self.record.logits.normalizer)

    @property
    def top_logprobs(self) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return per row the best tokens of each place, i32[n, N], and their log-probabilities.

        f32[n, N], the best token first; None if not asked for.
        """
        logits = self.record.logits
        if logits is None:
            return None
        values = self._emitted(logits.top_logits - logits.normalizer[..., None])
        return list(zip(self._emitted(logits.top_ids), values, strict=True))

    def _emitted(self, values: np.ndarray | jax.Array) -> list[np.ndarray]:
        """Return the entries of each row's emitted tokens."""
        return [
            np.asarray(row[start:end])
            for row, start, end in zip(values, self.prompt_lengths, self.lengths, strict=True)
        ]

    @functools.cached_property
    def _origins(self) -> list[Origin]:
        return [Origin.unpack(row) for row in self._emitted(self.record.origin)]

    @functools.cached_property
    def _step_ends(self) -> list[np.ndarray]:
        """Return per row how many tokens it had emitted after each of its steps."""
        ends = []
        for origin in self._origins:
            # A step ends with the model's own token, the last one perhaps with a clipped draft.
            is_end = origin.draft_position == NOT_DRAFTED
            is_end[-1:] = True
            ends.append(np.flatnonzero(is_end) + 1)
        return ends

    @property
    def is_finished(self) -> bool:
        """Return whether every row has ended."""
        return None not in self.finish_reasons


def to_host(
    state: DecodeState, request: Request, drafter: Drafter | Auto, *, num_rows: int | None = None
) -> Generation:
    """Return the texts of a state, of its first `num_rows` rows if given, times left out."""
    arrays = fetch((state.tokens, state.length, request.prompt_length, state.finish, state.record))
    tokens, lengths, prompt_lengths, finish, record = jax.tree.map(lambda x: x[:num_rows], arrays)
    arms: tuple[Drafter | Auto, ...] = (drafter,)
    step_costs = None
    if isinstance(drafter, Auto):
        arms, step_costs = drafter.arms, tuple(fetch(request.step_costs).tolist())
    return Generation(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        finish_reasons=tuple(_FINISH_REASONS.get(int(code)) for code in finish),
        record=record,
        num_draft_tokens=drafter.layout.num_draft_tokens,
        rows_by_arm=tuple(arm.layout.num_rows for arm in arms),
        prefill_seconds=0.0,
        decode_seconds=0.0,
        compile_seconds=0.0,
        measure_seconds=0.0,
        step_costs=step_costs,
    )
