"""How drafters fare on prompts: time, acceptance, equality with plain decoding; host side.

A text that repeats itself is accepted without merit, so acceptance is *counted* only up to where
the text becomes periodic.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, init_cache
from jaxspec.drafters import Auto, Drafter
from jaxspec.layout import BlockLayout
from jaxspec.model import Qwen3
from jaxspec.request import capacity_for
from jaxspec.runner import Run, Runner
from jaxspec.stats import first_different_index, first_periodic_position, settings_of
from pallas_kernels import pre_norm

# A ratio of speeds between these is no news.
WIN, LOSS = 1.3, 0.95
# A text "loops" if it is periodic from before this token on, for at least so many tokens.
LOOP_BEFORE, LOOP_TOKENS = 128, 32
# Fewer counted tokens, or a smaller share of all, tell nothing of a speed.
LEAST_COUNTED, LEAST_SHARE = 16, 0.25
# Rows fed at once, and rows whose logits are held at once; every capacity is a multiple of 64.
_CHUNK_ROWS, _GAP_ROWS = 512, 64

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One text to continue: its name, its sort, the file it comes from."""

    id: str
    kind: str
    file: str
    text: str


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read prompts, one JSON object a line: `id`, `prompt`, and `kind` or else the file's name.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line is malformed, or there is none; the message names file and line.
    """
    path = Path(path)
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8 text, got {error.reason} at byte {error.start}"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error.msg}") from None
        fields = entry if isinstance(entry, dict) else {}
        texts = [fields.get("id"), fields.get("kind", path.stem), fields.get("prompt")]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{path}, line {number}: expected an object with id and prompt")
        prompts.append(Prompt(texts[0], texts[1], path.stem, texts[2]))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


@jax.jit
def _top2_gaps(model: Qwen3, tokens: jax.Array) -> jax.Array:
    """Return f32[P], the gap between the two best logits after each token of i32[1, P].

    The text goes through a cache in chunks, so that memory grows with P and not with its square.
    """
    capacity = tokens.shape[1]
    chunk_size = math.gcd(capacity, _CHUNK_ROWS)
    layout = BlockLayout.linear(chunk_size, has_logits=False)
    head = BlockLayout.linear(math.gcd(chunk_size, _GAP_ROWS))
    cache = init_cache(model.config, batch_size=1, capacity=capacity, dtype=model.dtype)

    def gaps(part: jax.Array) -> jax.Array:
        logits = model.logits(pre_norm(part, model.norm.weight[...]), head)[0]
        best = jax.lax.top_k(logits[:, : model.config.num_valid_tokens], 2)[0]
        return best[:, 0] - best[:, 1]

    def chunk_gaps(cache: KVCache, chunk: tuple[jax.Array, jax.Array]) -> Any:
        start, ids = chunk
        rows, block = model.hidden_states(ids[None], start[None], cache, layout)
        # Chunks divide the capacity: no slice reaches past the end, where it would be moved.
        cache = jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=2),
            cache,
            block,
        )
        return cache, jax.lax.map(gaps, rows.x.reshape(-1, head.num_rows, rows.x.shape[-1]))

    starts = jnp.arange(0, capacity, chunk_size, dtype=jnp.int32)
    chunks = (starts, tokens.reshape(-1, chunk_size))
    return jax.lax.scan(chunk_gaps, cache, chunks)[1].reshape(-1)


def top2_gaps(model: Qwen3, ids: Sequence[int], *, capacity: int | None = None) -> np.ndarray:
    """Return f32[len(ids)], the gap between the two best logits after each token of a text.

    Args:
      model: the model; its dtype is that of the forward.
      ids: the text.
      capacity: tokens to pad it to, so that texts share a program; None = what fits.
    """
    tokens = np.zeros((1, capacity or capacity_for(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(_top2_gaps(model, jnp.asarray(tokens)))[: len(ids)]


def top2_gap(
    model: Qwen3, ids: Sequence[int], position: int, *, capacity: int | None = None
) -> float:
    """Return the gap between the two best logits that decide `ids[position]`, position >= 1."""
    return float(top2_gaps(model, ids[:position], capacity=capacity)[-1])


def as_float32(model: Qwen3) -> Qwen3:
    """Return the model with its parameters in float32."""
    return jax.tree.map(lambda parameter: parameter.astype(jnp.float32), model)


def measure_prompt(
    runner: Runner,
    index: int,
    drafters: Mapping[str, Drafter | Auto],
    *,
    repeats: int = 3,
    wide: Qwen3 | None = None,
) -> list[Row]:
    """Decode one prompt with every drafter and return a row each.

    A text that becomes periodic is decoded a second time up to there: p tokens over the steps
    that it takes to emit them. The runs of the drafters take turns, so that drift hits all alike;
    the first of each is not timed. A time is the median.

    Args:
      runner: holds the prompts.
      index: of the prompt.
      drafters: by mode; must hold "none", the reference.
      repeats: timed runs of each drafter.
      wide: the model in float32, to look for near ties on the way through the text of "none".
    """
    runs = {spec: runner.run(index, drafter) for spec, drafter in drafters.items()}
    ends = {spec: first_periodic_position(run.token_ids) for spec, run in runs.items()}
    is_whole = {spec: ends[spec] == len(run.token_ids) for spec, run in runs.items()}
    counted = {spec: run if is_whole[spec] else None for spec, run in runs.items()}
    for spec, end in ends.items():
        if end and not is_whole[spec]:
            counted[spec] = runner.run(index, drafters[spec], budget=end)
    whole: dict[str, list[float]] = {spec: [] for spec in drafters}
    part: dict[str, list[float]] = {spec: [] for spec in drafters}
    for _ in range(repeats):
        for spec, drafter in drafters.items():
            whole[spec].append(runner.run(index, drafter).seconds)
        for spec, drafter in drafters.items():
            if is_whole[spec]:
                part[spec].append(whole[spec][-1])
            elif ends[spec]:
                part[spec].append(runner.run(index, drafter, budget=ends[spec]).seconds)
    gap = None if wide is None else _smallest_gap(runner, index, runs["none"], wide)
    rows = []
    for spec, run in runs.items():
        row: Row = {"spec": spec, "settings": settings_of(drafters[spec]), "smallest_gap": gap}
        row |= acceptance(run, counted[spec])
        row |= {"seconds": statistics.median(whole[spec]), "all_seconds": whole[spec]}
        row["counted_seconds"] = statistics.median(part[spec]) if ends[spec] else 0.0
        rows.append(row | _difference(runner, index, run.token_ids, runs["none"].token_ids))
    return with_speeds(rows)


def acceptance(run: Run, counted: Run | None) -> Row:
    """Return what a run accepted, in all and in the part that counts (None = nothing does)."""
    num_tokens = len(run.token_ids)
    end = len(counted.token_ids) if counted else 0
    nothing = [0] * len(run.accepted_by_position)
    return {
        "num_tokens": num_tokens,
        "num_steps": run.num_steps,
        "mean_accepted_length": num_tokens / run.num_steps,
        "accepted_by_position": run.accepted_by_position,
        "periodic_from": end if end < num_tokens else None,
        "loops": end < LOOP_BEFORE and num_tokens - end >= LOOP_TOKENS,
        "counted_tokens": end,
        "counted_steps": counted.num_steps if counted else 0,
        "counted_accepted_length": end / counted.num_steps if counted else None,
        "counted_by_position": counted.accepted_by_position if counted else nothing,
    }


def with_speeds(rows: Sequence[Row]) -> list[Row]:
    """Return rows of the same texts, one a mode, with speeds, ratios to "none" and verdicts."""
    speeds = {row["spec"]: _ratio(row["num_tokens"], row["seconds"]) for row in rows}
    counted = {row["spec"]: _ratio(row["counted_tokens"], row["counted_seconds"]) for row in rows}
    results = []
    for row in rows:
        spec = row["spec"]
        result = row | {
            "tokens_per_second": speeds[spec],
            "speedup": _ratio(speeds[spec], speeds["none"]),
            "counted_tokens_per_second": counted[spec],
            "counted_speedup": _ratio(counted[spec], counted["none"]),
        }
        results.append(result | {"verdict": verdict(result)})
    return results


def _ratio(number: int | float | None, divisor: int | float | None) -> float | None:
    return number / divisor if number is not None and divisor else None


def verdict(row: Row) -> str:
    """Return "win" if both the text and its counted part are clearly faster than with none.

    Else "even" or "loss", by the lesser of the two; "loops" if too little counts to tell, and
    "-" for the reference itself.
    """
    if row["spec"] == "none":
        return "-"
    least = max(LEAST_COUNTED, LEAST_SHARE * row["num_tokens"])
    if row["counted_tokens"] < least or row["counted_speedup"] is None:
        return "loops"
    speedup = min(row["speedup"], row["counted_speedup"])
    return "win" if speedup >= WIN else "even" if speedup >= LOSS else "loss"


def _smallest_gap(runner: Runner, index: int, run: Run, model: Qwen3) -> float:
    prompt = runner.prompts[index]
    gaps = top2_gaps(model, [*prompt, *run.token_ids], capacity=runner.capacity)
    return float(gaps[len(prompt) - 1 : -1].min())


def _difference(runner: Runner, index: int, ids: list[int], reference: list[int]) -> Row:
    position = first_different_index(ids, reference)
    if position is None:
        return {"equal": True, "first_difference": None, "gap_at_difference": None}
    text = [*runner.prompts[index], *reference]
    gap = top2_gap(
        runner.whole, text, len(runner.prompts[index]) + position, capacity=runner.capacity
    )
    return {"equal": False, "first_difference": position, "gap_at_difference": gap}


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Return one row a mode over all prompts: total tokens over total time and steps."""
    by_spec: dict[str, list[Row]] = {}
    for row in rows:
        by_spec.setdefault(row["spec"], []).append(row)
    totals = []
    sums = ("num_tokens", "num_steps", "seconds")
    for spec, part in by_spec.items():
        total: Row = {"spec": spec, "settings": part[0]["settings"], "num_prompts": len(part)}
        for name in (*sums, "counted_tokens", "counted_steps", "counted_seconds"):
            total[name] = sum(row[name] for row in part)
        steps = total["counted_steps"]
        columns = [row["counted_by_position"] for row in part]
        accepted = [sum(column) for column in zip(*columns, strict=True)]
        total |= {
            "mean_accepted_length": total["num_tokens"] / total["num_steps"],
            "counted_accepted_length": total["counted_tokens"] / steps if steps else None,
            "acceptance_by_position": [count / max(steps, 1) for count in accepted],
            "num_equal": sum(row["equal"] for row in part),
            "num_loops": sum(row["loops"] for row in part),
        }
        totals.append(total)
    return with_speeds(totals)
