"""Which settings decode fastest here: a sweep over drafters, and what a step costs by its rows."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxspec.drafters import Drafter, Lookahead, NoDraft, PromptLookup
from jaxspec.runner import Run, Runner
from jaxspec.stats import first_periodic_position, settings_of

LOOKUP_DRAFTS = (1, 2, 3, 4, 5, 7, 10, 15)
LOOKUP_NGRAMS = ((16, 1), (16, 2), (3, 3))
LOOKAHEADS = (
    (1, 2, 1), (2, 3, 2), (3, 3, 3), (4, 3, 4), (5, 3, 5), (2, 4, 2), (4, 4, 4), (7, 4, 7),
    (4, 5, 4), (7, 5, 7), (10, 5, 10), (15, 5, 15), (7, 7, 7),
)  # fmt: skip
BLOCK_ROWS = (1, 2, 4, 8, 12, 16, 21, 32, 56, 84, 120)
_LEAST_BUDGET = 16

Row = dict[str, Any]


def candidates(specs: Sequence[str]) -> list[list[tuple[str, Drafter]]]:
    """Return groups of (mode, drafter) to try, the likely best first."""
    groups: list[list[tuple[str, Drafter]]] = []
    if "promptlookup" in specs:
        for ngram_size, min_ngram_size in LOOKUP_NGRAMS:
            lookups = [PromptLookup(drafts, ngram_size, min_ngram_size) for drafts in LOOKUP_DRAFTS]
            groups.append([("promptlookup", lookup) for lookup in lookups])
    if "lookahead" in specs:
        groups.insert(1, [("lookahead", Lookahead(*settings)) for settings in LOOKAHEADS])
    return groups


def sweep(
    runner: Runner,
    groups: Sequence[Sequence[tuple[str, Drafter]]],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Decode all prompts with every drafter once and yield a row each.

    Each text is decoded only up to where that of `none` becomes periodic: what loops is drafted
    too easily, and would choose too many drafts. Ratios are of total tokens over total time, to
    a pass of `none` right before the group. The best prompt lookup is tried with the other
    `match` at the end.

    Args:
      runner: holds the prompts.
      groups: (mode, drafter) to try.
      is_over: asked between drafters; the sweep stops when it says so.
    """
    if is_over():
        return
    texts = _decode_all(runner, NoDraft(), [None] * len(runner.prompts))
    budgets = [max(first_periodic_position(run.token_ids), _LEAST_BUDGET) for run in texts]
    lookups = []
    for group in groups:
        for row, drafter in _sweep_group(runner, group, budgets, is_over):
            if isinstance(drafter, PromptLookup):
                lookups.append((row["tokens_per_second"], drafter))
            yield row
    if lookups:
        best = max(lookups, key=lambda entry: entry[0])[1]
        other = dataclasses.replace(best, match="first" if best.match == "last" else "last")
        for row, _ in _sweep_group(runner, [("promptlookup", other)], budgets, is_over):
            yield row


def _sweep_group(
    runner: Runner,
    group: Sequence[tuple[str, Drafter]],
    budgets: Sequence[int],
    is_over: Callable[[], bool],
) -> Iterator[tuple[Row, Drafter]]:
    # Compiling takes most of a sweep's time; programs of one batch compile side by side.
    batch_size = min(os.cpu_count() or 1, 8)
    plain: list[Run] = []
    for start in range(0, len(group), batch_size):
        batch = group[start : start + batch_size]
        if is_over():
            return
        with ThreadPoolExecutor(batch_size) as pool:
            list(pool.map(lambda entry: runner.run(0, entry[1], max_steps=2), batch))
        plain = plain or _decode_all(runner, NoDraft(), budgets)
        for spec, drafter in batch:
            if is_over():
                return
            runs = _decode_all(runner, drafter, budgets)
            yield _sweep_row(spec, drafter, runs, plain), drafter


def _decode_all(runner: Runner, drafter: Drafter, budgets: Sequence[int | None]) -> list[Run]:
    return [runner.run(index, drafter, budget=budget) for index, budget in enumerate(budgets)]


def _sweep_row(spec: str, drafter: Drafter, runs: Sequence[Run], plain: Sequence[Run]) -> Row:
    num_tokens = sum(len(run.token_ids) for run in runs)
    num_steps = sum(run.num_steps for run in runs)
    speed = num_tokens / sum(run.seconds for run in runs)
    plain_speed = sum(len(run.token_ids) for run in plain) / sum(run.seconds for run in plain)
    return {
        "spec": spec,
        "settings": settings_of(drafter),
        "rows_per_step": drafter.layout.num_rows,
        "num_tokens": num_tokens,
        "num_steps": num_steps,
        "mean_accepted_length": num_tokens / num_steps,
        "num_equal": sum(a.token_ids == b.token_ids for a, b in zip(runs, plain, strict=True)),
        "num_prompts": len(runs),
        "tokens_per_second": speed,
        "speedup": speed / plain_speed,
    }


def step_costs(
    runner: Runner,
    block_rows: Sequence[int],
    *,
    num_steps: int = 64,
    repeats: int = 5,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Time a step by the rows of its block, T, and yield a row each.

    `relative` is t(T) / t(1): the tokens that a step of T rows must emit to be worth its time,
    the drafter's own work not counted. The sizes take turns, so that drift hits all alike.

    Args:
      runner: holds the prompts; the first one is decoded.
      block_rows: values of T, 1 first.
      num_steps: steps of one timed loop, cut to the configuration's budget.
      repeats: timed loops; the time is their median.
      is_over: asked between measurements.
    """
    num_steps = min(num_steps, runner.config.max_new_tokens)

    def seconds(num_rows: int) -> float:
        drafter = NoDraft(num_padding_rows=num_rows - 1)
        run = runner.run(0, drafter, budget=num_steps, ignore_eos=True)
        return run.seconds / num_steps

    times: dict[int, list[float]] = {}
    for num_rows in block_rows:
        if is_over():
            break
        seconds(num_rows)
        times[num_rows] = []
    for turn in range(repeats):
        if turn and is_over():
            break
        for num_rows, column in times.items():
            column.append(seconds(num_rows))
    medians = {num_rows: statistics.median(column) for num_rows, column in times.items()}
    for num_rows, median in medians.items():
        relative = median / medians[block_rows[0]]
        yield {"rows_per_step": num_rows, "step_ms": median * 1e3, "relative": relative}


def break_even(costs: Sequence[Mapping[str, Any]], num_rows: int) -> float:
    """Return the tokens that a step of so many rows must emit, between measured costs linearly."""
    rows = [cost["rows_per_step"] for cost in costs]
    return float(np.interp(num_rows, rows, [cost["relative"] for cost in costs]))
