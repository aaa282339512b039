"""What a run did, for tables and JSON; host side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxspec.config import GenerateConfig
from jaxspec.drafters import Drafter
from jaxspec.generation import Generation


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the 0-based index of the first token in which two texts differ, None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


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
    drafter: Drafter,
    config: GenerateConfig,
    text: str | None,
    model: str,
    dtype: str,
    version: str,
) -> dict[str, Any]:
    """Return one row's result as the JSON object that `decode.py --json` prints.

    `accepted_by_position[j]` counts the steps in which draft token j was accepted and emitted.
    Times are those of the whole call, which its rows share; `tokens_per_second` is this row's.
    """
    num_tokens = int(generation.num_tokens[row])
    seconds = generation.decode_seconds
    return {
        "id": row,
        "text": text,
        "token_ids": generation.token_ids[row],
        "num_tokens": num_tokens,
        "num_steps": int(generation.num_steps[row]),
        "mean_accepted_length": float(generation.mean_accepted_length[row]),
        "accepted_by_position": generation.accepted_by_position[row].tolist(),
        "finish_reason": generation.finish_reasons[row],
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds > 0 else 0.0,
        "compile_seconds": generation.compile_seconds,
        "spec": spec,
        "settings": settings_of(drafter) | settings_of(config),
        "model": model,
        "device": jax.devices()[0].device_kind,
        "dtype": dtype,
        "version": version,
    }


def comparison(report: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `--compare` adds to a row: equality with plain decoding, and the speed-up.

    `speedup` is the ratio of decode times per token, > 1 where `report` is faster.
    """
    index = first_difference(report["token_ids"], reference["token_ids"])
    difference = None
    if index is not None:
        difference = {
            "position": index,
            "token_id": _at(report["token_ids"], index),
            "reference_token_id": _at(reference["token_ids"], index),
        }
    reference_speed = reference["tokens_per_second"]
    return {
        "equal": index is None,
        "speedup": report["tokens_per_second"] / reference_speed if reference_speed else None,
        "first_difference": difference,
    }


def settings_of(settings: Any) -> dict[str, Any]:
    """Return the fields of a settings dataclass as JSON values."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def _at(token_ids: Sequence[int], index: int) -> int | None:
    return token_ids[index] if index < len(token_ids) else None
