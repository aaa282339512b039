"""What a run did, for tables and JSON; host side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import GenerateConfig
from jaxspec.drafters import Auto, Drafter
from jaxspec.result import Generation

# Parts of a text that `accepted_over_time` tells apart.
_NUM_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two runs of one prompt part, and how near the choice was in each.

    Two runs of one model part where rounding turned a near tie: then each run's two best logits
    are the same two tokens, a little apart. A large gap is a fault.

    Attributes:
      position: 0-based index of the first emitted token that differs.
      token_id: the token of the first run, None if its text has ended.
      reference_token_id: that of the second run.
      top2_ids: the two tokens of the largest logits there in the first run, the best one first;
        None if the run kept no logits of two tokens.
      top2_logits: their logits.
      gap: by how much the token won, in the scores that it was picked by (the logits, if nothing
        is sampled or penalised); None also if no other token could be picked.
      reference_top2_ids: as `top2_ids`, of the second run.
      reference_top2_logits: as `top2_logits`.
      reference_gap: as `gap`.
    """

    position: int
    token_id: int | None
    reference_token_id: int | None
    top2_ids: tuple[int, int] | None = None
    top2_logits: tuple[float, float] | None = None
    gap: float | None = None
    reference_top2_ids: tuple[int, int] | None = None
    reference_top2_logits: tuple[float, float] | None = None
    reference_gap: float | None = None


def first_difference(
    generation: Generation, reference: Generation, row: int = 0
) -> Difference | None:
    """Return where a row of two runs first differs, None if nowhere.

    Args:
      generation: one run.
      reference: another run of the same prompts.
      row: which of them.

    Returns:
      The place, both tokens, and where both runs were asked for two log-probabilities at least
      (`GenerateConfig(num_logprobs=2)`) both runs' two best logits with their gap.
    """
    left, right = generation.token_ids[row], reference.token_ids[row]
    position = first_different_index(left, right)
    if position is None:
        return None
    ours, theirs = _choice(generation, row, position), _choice(reference, row, position)
    return Difference(position, _at(left, position), _at(right, position), *ours, *theirs)


def _choice(generation: Generation, row: int, position: int) -> tuple[Any, Any, Any]:
    """Return the two best tokens of a place, their logits, and the gap of the choice."""
    logits = generation.record.logits
    index = int(generation.prompt_lengths[row]) + position
    if logits is None or logits.top_ids.shape[-1] < 2 or index >= generation.lengths[row]:
        return None, None, None
    ids, values = logits.top_ids[row, index, :2], logits.top_logits[row, index, :2]
    gap = float(logits.pick_gap[row, index])
    return tuple(ids.tolist()), tuple(values.tolist()), gap if math.isfinite(gap) else None


def first_different_index(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the 0-based index of the first token in which two texts differ, None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def accepted_over_time(accepted_lengths: Sequence[int] | np.ndarray) -> list[float]:
    """Return the mean tokens a step of up to eight equal parts of a text's steps, in order."""
    parts = np.array_split(np.asarray(accepted_lengths), _NUM_PARTS)
    return [float(part.mean()) for part in parts if len(part)]


def first_periodic_position(token_ids: Sequence[int], max_period: int = 32) -> int:
    """Return the 0-based index from which a text repeats itself to its end.

    The text is periodic from index i with period p if every token from i + p on equals the one p
    before it, over at least two whole periods. Drafts of such a tail are accepted without merit,
    so acceptance is counted only up to it.

    Args:
      token_ids: the emitted ids.
      max_period: longest period looked for, in tokens.

    Returns:
      The smallest such index over all periods, or the text's length if there is none.
    """
    length = len(token_ids)
    first = length
    for period in range(1, min(max_period, length // 2) + 1):
        index = length - period
        while index > 0 and token_ids[index - 1] == token_ids[index - 1 + period]:
            index -= 1
        if length - index >= 2 * period:
            first = min(first, index)
    return first


def row_report(
    generation: Generation,
    row: int,
    *,
    spec: str,
    drafter: Drafter | Auto,
    config: GenerateConfig,
    text: str | None,
    model: str,
    dtype: str,
    version: str,
    load_seconds: float = 0.0,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Return one row's result as the JSON object that `decode.py --json` prints.

    `accepted_by_position[j]` counts the steps in which draft token j was accepted and emitted,
    `num_drafted` the draft tokens that were fed, `accepted_over_time` has the mean tokens a step
    of equal parts of the steps, `num_steps_by_rows` the steps by the rows of their blocks,
    `step_costs` what `auto` took a step of each of its drafters to cost (plain decoding 1), `mesh`
    the devices on each axis, null for one device. Times are those of the whole call, which its
    rows share; `tokens_per_second` is this row's.
    """
    num_tokens = int(generation.num_tokens[row])
    num_steps = int(generation.num_steps[row])
    seconds = generation.decode_seconds
    report = {
        "id": row,
        "text": text,
        "token_ids": generation.token_ids[row],
        "num_tokens": num_tokens,
        "num_steps": num_steps,
        "mean_accepted_length": float(generation.mean_accepted_length[row]),
        "accepted_by_position": generation.accepted_by_position[row].tolist(),
        "num_drafted": int(generation.num_drafted[row]),
        "accepted_over_time": accepted_over_time(generation.accepted_lengths[row]),
        "num_steps_by_rows": {
            str(rows): count for rows, count in generation.num_steps_by_rows[row].items()
        },
        "finish_reason": generation.finish_reasons[row],
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds > 0 else 0.0,
        "compile_seconds": generation.compile_seconds,
        "measure_seconds": generation.measure_seconds,
        "step_costs": generation.step_costs,
        "load_seconds": load_seconds,
        "spec": spec,
        "settings": settings_of(drafter) | settings_of(config) | {"seed": seed_of(config, row)},
        "model": model,
        "device": jax.devices()[0].device_kind,
        "mesh": None if mesh is None else dict(mesh.shape),
        "dtype": dtype,
        "version": version,
    }
    if generation.logprobs is not None and generation.top_logprobs is not None:
        ids, values = generation.top_logprobs[row]
        report["logprobs"] = generation.logprobs[row].tolist()
        report["top_logprobs"] = [
            list(zip(places, numbers, strict=True))
            for places, numbers in zip(ids.tolist(), values.tolist(), strict=True)
        ]
    return report


def comparison(
    report: Mapping[str, Any], reference: Mapping[str, Any], difference: Difference | None = None
) -> dict[str, Any]:
    """Return what `--compare` adds to a row: equality with plain decoding, and the speed-up.

    `speedup` is the ratio of decode times per token, > 1 where `report` is faster.

    Args:
      report: a row's report.
      reference: that of plain decoding.
      difference: where they part, if that is known with its logits.
    """
    index = first_different_index(report["token_ids"], reference["token_ids"])
    if index is not None and (difference is None or difference.position != index):
        # The runs that kept logits did not part in this place.
        ids = _at(report["token_ids"], index), _at(reference["token_ids"], index)
        difference = Difference(index, *ids)
    speed = reference["tokens_per_second"]
    return {
        "equal": index is None,
        "speedup": report["tokens_per_second"] / speed if speed else None,
        "first_difference": (
            dataclasses.asdict(difference) if index is not None and difference else None
        ),
    }


def settings_of(settings: Any) -> dict[str, Any]:
    """Return the fields of a settings dataclass as JSON values."""
    return dataclasses.asdict(settings)


def seed_of(config: GenerateConfig, row: int) -> int:
    """Return the seed of a row, whether there is one for all or one for each."""
    return config.seed[row] if isinstance(config.seed, tuple) else config.seed


def _at(token_ids: Sequence[int], index: int) -> int | None:
    return token_ids[index] if index < len(token_ids) else None
