"""What a person sees of a decoding: the text as it comes, and a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import reporting
import rich.box
from rich.table import Table

import jaxspec
from jaxspec import text


class LiveText:
    """Prints the rows of a batch one after the other, each as far as it has come."""

    def __init__(
        self,
        tokenizer: Any,
        new_text: Callable[[], text.StopSearch],
        prompt_ids: Sequence[Sequence[int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._texts = [new_text() if tokenizer else None for _ in prompt_ids]
        self._num_seen = [0] * len(prompt_ids)
        self._num_accepted = [0] * len(prompt_ids)
        # What is not printed yet: runs of ids, and whether they were accepted drafts.
        self._pending: list[list[tuple[list[int], bool]]] = [[] for _ in prompt_ids]
        self._row = 0
        self._show_prompt()

    def show(self, generation: jaxspec.Generation, *, show_drafts: bool = False) -> None:
        """Print what is new of the current row, and of the next ones if it has ended."""
        self._collect(generation, show_drafts)
        while self._row < len(self._texts):
            row = self._row
            for ids, is_draft in self._pending[row]:
                click.secho(self._shown(row, ids), nl=False, fg="green" if is_draft else None)
            self._pending[row].clear()
            if generation.finish_reasons[row] is None:
                sys.stdout.flush()
                return
            known = self._texts[row]
            click.echo(known.flush() if known else "")
            self._row += 1
            if self._row < len(self._texts):
                click.echo(f"--- prompt {self._row}")
                self._show_prompt()

    def _shown(self, row: int, ids: Sequence[int]) -> str:
        """Return the text that further ids of a row make certain; ids without a tokenizer."""
        known = self._texts[row]
        if known is None:
            return "".join(f"{token_id} " for token_id in ids)
        start = len(known.text)
        known.push(ids)
        return known.text[start:]

    def _collect(self, generation: jaxspec.Generation, show_drafts: bool) -> None:
        """Split each row's new ids into accepted drafts, which come first in a step, and others."""
        totals = [0] * len(self._texts)
        if show_drafts:
            totals = generation.accepted_by_position.sum(axis=1).tolist()
        for row, ids in enumerate(generation.token_ids):
            fresh, self._num_seen[row] = ids[self._num_seen[row] :], len(ids)
            total = totals[row]
            num_drafts = total - self._num_accepted[row] if show_drafts else 0
            self._num_accepted[row] = total
            self._pending[row] += [(fresh[:num_drafts], True), (fresh[num_drafts:], False)]

    def _show_prompt(self) -> None:
        """Print the prompt that is being continued, on a terminal only."""
        if self._tokenizer and sys.stdout.isatty():
            prompt = text.decode(self._tokenizer, self._prompt_ids[self._row])
            click.secho(prompt, nl=False, dim=True)


def _mesh_of(row: Mapping[str, Any]) -> str:
    """Return the devices of a run as they were asked for, nothing for one device."""
    if row["mesh"] is None:
        return ""
    return ", " + ", ".join(f"{name}={size}" for name, size in row["mesh"].items())


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print what each row took, and how it compares where that was asked."""
    first = rows[0]
    table = Table(
        title=f"{first['model']}, {first['dtype']}, {first['device']}{_mesh_of(first)}",
        caption=(
            f"load model {first['load_seconds']:.1f} s, "
            f"compile or load programs {first['compile_seconds']:.1f} s, "
            + (f"measure {first['measure_seconds']:.1f} s, " if first["measure_seconds"] else "")
            + f"prefill {first['prefill_seconds']:.2f} s, decode {first['decode_seconds']:.2f} s"
        ),
        box=rich.box.SIMPLE_HEAD,
    )
    columns = ["prompt", "spec", "tokens", "steps", "tokens/step", "drafted", "tokens/s", "end"]
    if "equal" in first:
        columns += ["equal", "speed-up"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            str(row["id"]),
            row["spec"],
            str(row["num_tokens"]),
            str(row["num_steps"]),
            f"{row['mean_accepted_length']:.2f}",
            str(row["num_drafted"]),
            f"{row['tokens_per_second']:.1f}",
            row["finish_reason"],
        ]
        if "equal" in row:
            difference = row["first_difference"]
            equal = "yes" if row["equal"] else f"no, from token {difference['position']}"
            cells += [equal, f"{row['speedup']:.2f}x"]
        table.add_row(*cells)
    # A terminal's width is its own; a file's is whatever the table takes.
    width = None if sys.stdout.isatty() else 120
    reporting.print_table(table, width=width)
    for row in rows:
        if row["num_drafted"]:
            click.echo(acceptance_line(row))
        if row.get("first_difference"):
            click.echo(difference_line(row))


def acceptance_line(row: dict[str, Any]) -> str:
    """Return in words what a row's drafts came to, by position and over time."""
    counts, num_steps = row["accepted_by_position"], row["num_steps"]
    shares = " ".join(f"{100 * count / num_steps:.0f}" for count in counts)
    lengths = " ".join(f"{length:.1f}" for length in row["accepted_over_time"])
    line = (
        f"prompt {row['id']}: accepted in % of the steps, by draft position: {shares}; "
        f"tokens a step over time: {lengths}"
    )
    if len(row["num_steps_by_rows"]) > 1:
        steps = ", ".join(f"{count} of {rows}" for rows, count in row["num_steps_by_rows"].items())
        line += f"; steps by rows: {steps}"
    if row["step_costs"]:
        costs = " ".join(f"{cost:.2f}" for cost in row["step_costs"])
        line += f"; cost of a step, none first: {costs}"
    return line


def difference_line(row: dict[str, Any]) -> str:
    """Return in words where a row parts from plain decoding, and how near the choice was."""
    found = row["first_difference"]
    line = (
        f"prompt {row['id']} differs from token {found['position']} on: {found['token_id']}, "
        f"plainly {found['reference_token_id']}"
    )
    if found["top2_ids"] is None or found["reference_top2_ids"] is None:
        return f"{line}; decoded again with logits kept, the runs do not part there"
    for name, prefix in (("here", ""), ("plainly", "reference_")):
        ids, logits = found[f"{prefix}top2_ids"], found[f"{prefix}top2_logits"]
        best = ", ".join(f"{i} {value:.6g}" for i, value in zip(ids, logits, strict=True))
        gap = found[f"{prefix}gap"]
        margin = "no other could be picked" if gap is None else f"gap {gap:.3g}"
        line += f"; two best logits {name}: {best} ({margin})"
    return line
