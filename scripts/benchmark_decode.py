"""`benchmark.py decode`: how the drafters fare on prompts, and which settings suit this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import command
import jax
import meshes
import plotting
import rich.box
from options import PROMPTS, Duration, dtype_option, model_option, out_option, prompts_option
from reporting import machine, mesh_sizes, print_table, report
from rich.table import Table

import checkpoints
from jaxspec import Auto, Drafter, GenerateConfig, drafters, evaluation, text, tuning
from jaxspec.evaluation import Prompt, Row
from jaxspec.request import check_prompts
from jaxspec.runner import Runner


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@model_option
@prompts_option
@click.option(
    "--spec",
    "specs",
    multiple=True,
    type=click.Choice(list(drafters.DRAFTERS)),
    default=list(drafters.DRAFTERS),
    help="Modes to measure; none always is.",
)
@click.option("--promptlookup", help="M,NGRAM,MIN.  [default: the platform's]")
@click.option("--lookahead", help="W,N,G.  [default: the platform's]")
@click.option("--auto", help="Widths M,... to choose among.  [default: the platform's]")
@dtype_option
@meshes.mesh_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256)
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Timed runs of each text.")
@click.option("--sweep", is_flag=True, help="Also try many settings of each mode.")
@click.option("--cost", is_flag=True, help="Also time a step by the rows of its block.")
@click.option(
    "--time-limit", type=Duration(), default=None, help="Stop after about so many seconds."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the acceptance, a PNG file.")
@out_option
def decode(**flags: Any) -> None:
    """Compare the drafters on prompts, one at a time: speed, acceptance, equality with none.

    "counted" is the part of a text before it becomes periodic. A mode wins where it is at least
    1.3 times as fast as none, on the whole text and on that part. On a mesh one device holds the
    whole model too, in float32 as well: it says how close to ties the texts come.
    """
    started = time.monotonic()
    limit = flags["time_limit"]
    if flags["plot"]:
        plotting.check(flags["plot"])
    command.enable_compilation_cache()
    mesh = meshes.make_mesh(flags)
    compared = make_drafters(flags)
    files = list(flags["prompts"]) or sorted(map(str, PROMPTS.glob("*.jsonl")))
    prompts = [prompt for file in files for prompt in evaluation.read_prompts(file)]
    dtype = flags["dtype"] or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    path = checkpoints.BUNDLED_MODEL if flags["model"] is None else flags["model"]
    config = GenerateConfig(max_new_tokens=flags["max_new_tokens"])
    checkpoint = checkpoints.open_checkpoint(path)
    encoded = [text.encode(checkpoint.tokenizer, prompt.text) for prompt in prompts]
    check_prompts(encoded, checkpoint.config, config)
    model = checkpoint.load_model(dtype=dtype)
    spread = model if mesh is None else checkpoint.load_model(mesh=mesh, dtype=dtype)
    runner = Runner(spread, encoded, config, whole=model)
    where = machine() | {
        "mesh": mesh_sizes(mesh),
        "model": Path(path).resolve().name,
        "dtype": dtype,
        "prompts": [Path(file).name for file in files],
        "max_new_tokens": config.max_new_tokens,
    }
    Benchmark(
        runner,
        prompts,
        compared,
        say=lambda row: report(row | where, flags["out"]),
        is_over=lambda: limit is not None and time.monotonic() - started > limit,
    ).run(flags, title=" · ".join(str(where[key]) for key in ("model", "dtype", "device")))


# The fields that a mode's flag sets, in order.
FIELDS = {
    "promptlookup": ("num_draft_tokens", "ngram_size", "min_ngram_size"),
    "lookahead": ("window_size", "ngram_size", "num_candidates"),
    "auto": ("num_draft_tokens",),
}


def make_drafters(flags: dict[str, Any]) -> dict[str, Drafter | Auto]:
    """Return the drafters to compare by mode, "none" first."""
    for spec in FIELDS:
        if flags.get(spec) is not None and spec not in flags["specs"]:
            click.echo(f"note: --{spec} has no effect without --spec {spec}", err=True)
    result: dict[str, Drafter | Auto] = {}
    for spec in dict.fromkeys(("none", *flags["specs"])):
        settings = {}
        if flags.get(spec) is not None:
            try:
                numbers = tuple(map(int, flags[spec].split(",")))
                values = (numbers,) if spec == "auto" else numbers
                settings = dict(zip(FIELDS[spec], values, strict=True))
            except ValueError:
                count = "integers" if spec == "auto" else "three integers"
                message = f"--{spec} {flags[spec]!r}: expected {count} separated by commas"
                raise click.UsageError(message) from None
        result[spec] = drafters.make_drafter(spec, platform=jax.default_backend(), **settings)
    return result


class Benchmark:
    """One run of the benchmark: what to measure, and what was measured so far."""

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Prompt],
        drafters: dict[str, Drafter | Auto],
        *,
        say: Callable[[Row], None],
        is_over: Callable[[], bool],
    ) -> None:
        self.runner, self.prompts, self.drafters = runner, prompts, drafters
        self.say, self.is_over = say, is_over
        self.rows: list[Row] = []
        self.gaps: list[float] = []

    def run(self, flags: dict[str, Any], title: str) -> None:
        """Measure and print what the flags ask for; tables last."""
        self.measure_prompts(flags["repeats"])
        totals = self.summarize()
        costs = self.measure_costs() if flags["cost"] else []
        settings, is_partial = self.sweep(flags["specs"], costs) if flags["sweep"] else ([], False)
        is_partial |= flags["cost"] and len(costs) < len(tuning.BLOCK_ROWS)
        if flags["plot"] and self.rows:
            plotting.plot(self.rows, totals, flags["plot"], title=title)
        if self.rows:
            print_results(self.rows, totals)
            click.echo(
                f"smallest gap between the two best logits, float32: {min(self.gaps):.2g}; "
                f"a win is {evaluation.WIN}x or more, counted too, a loss less than "
                f"{evaluation.LOSS}x; counted: up to where the text becomes periodic"
            )
        if costs:
            print_costs(costs, self.drafters)
        if settings:
            print_sweep(settings)
        if is_partial or len(self.gaps) < len(self.prompts):
            click.echo(
                f"PARTIAL: the time limit was reached after {len(self.gaps)} of "
                f"{len(self.prompts)} prompts, {len(costs)} block sizes of the cost and "
                f"{len(settings)} settings of the sweep"
            )

    def measure_prompts(self, repeats: int) -> None:
        """Measure each prompt with every drafter."""
        wide = evaluation.as_float32(self.runner.whole)
        for index, prompt in enumerate(self.prompts):
            if self.is_over():
                return
            name = {"measure": "prompt", "id": prompt.id, "kind": prompt.kind, "file": prompt.file}
            name["prompt_tokens"] = len(self.runner.prompts[index])
            rows = evaluation.measure_prompt(
                self.runner, index, self.drafters, repeats=repeats, wide=wide
            )
            self.gaps.append(rows[0]["smallest_gap"])
            for row in rows:
                self.rows.append(name | row)
                self.say(self.rows[-1])

    def summarize(self) -> list[Row]:
        """Report totals of each prompt file and of all; return them."""
        totals = []
        for file in [*dict.fromkeys(row["file"] for row in self.rows), None]:
            part = [row for row in self.rows if file in (None, row["file"])]
            is_partial = len(self.gaps) < len(self.prompts)
            name = {"measure": "group", "group": file or "all", "partial": is_partial}
            totals += [name | total for total in evaluation.summarize(part)]
        for total in totals:
            self.say(total)
        return totals

    def measure_costs(self) -> list[Row]:
        """Report the time of a step by the rows of its block."""
        costs = []
        for row in tuning.step_costs(self.runner, tuning.BLOCK_ROWS, is_over=self.is_over):
            costs.append(row)
            self.say({"measure": "cost"} | row)
        return costs

    def sweep(self, specs: Sequence[str], costs: Sequence[Row]) -> tuple[list[Row], bool]:
        """Report every setting, then the fastest of each mode; say whether any is missing."""
        groups = tuning.candidates(specs)
        rows: list[Row] = []
        for row in tuning.sweep(self.runner, groups, is_over=self.is_over):
            if costs:
                row["break_even_length"] = tuning.break_even(costs, row["rows_per_step"])
            rows.append(row)
            self.say({"measure": "sweep"} | row)
        num_lookups = sum(spec == "promptlookup" for group in groups for spec, _ in group)
        is_partial = len(rows) < sum(map(len, groups)) + bool(num_lookups)
        for spec in dict.fromkeys(row["spec"] for row in rows):
            best = max(
                (row for row in rows if row["spec"] == spec),
                key=lambda row: row["tokens_per_second"],
            )
            self.say({"measure": "sweep_best", "partial": is_partial} | best)
        return rows, is_partial


def print_results(rows: Sequence[Row], totals: Sequence[Row]) -> None:
    """Print a line for each prompt and speculative mode, then the totals of the groups."""
    table = _table("prompt", "mode", "tokens", "tok/step", "counted", "tok/s", "speed", "counted",
                   "equal", "verdict")  # fmt: skip
    for row in rows:
        if row["spec"] != "none":
            equal = "yes" if row["equal"] else f"to {row['first_difference']}"
            verdict = row["verdict"]
            if row["loops"] or verdict == "loops":
                start = f"loops from {row['periodic_from']}"
                verdict = start if verdict == "loops" else f"{verdict}, {start}"
            table.add_row(row["id"], *_cells(row), equal, verdict)
    table.add_section()
    for total in totals:
        equal = f"{total['num_equal']}/{total['num_prompts']}"
        note = f", {total['num_loops']} loop" if total["num_loops"] else ""
        name = "all prompts" if total["group"] == "all" else f"all of {total['group']}"
        table.add_row(name, *_cells(total), equal, total["verdict"] + note)
    _print(table)


def _cells(row: Row) -> list[str]:
    counted = row["counted_accepted_length"]
    return [
        row["spec"],
        str(row["num_tokens"]),
        f"{row['mean_accepted_length']:.2f}",
        "-" if counted is None else f"{counted:.2f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f}x",
        "-" if row["counted_speedup"] is None else f"{row['counted_speedup']:.2f}x",
    ]


def print_costs(costs: Sequence[Row], drafters: dict[str, Drafter | Auto]) -> None:
    """Print the time of a step by its rows, and what each drafter must accept to break even."""
    table = _table("rows/step", "ms", "tokens/step to break even")
    for row in costs:
        table.add_row(str(row["rows_per_step"]), f"{row['step_ms']:.3f}", f"{row['relative']:.2f}")
    _print(table)
    for spec, drafter in drafters.items():
        if isinstance(drafter, Auto):
            continue  # It has several widths.
        rows = drafter.layout.num_rows
        needed = tuning.break_even(costs, rows)
        click.echo(f"{spec}: {rows} rows, breaks even at {needed:.2f} tokens/step")


def print_sweep(rows: Sequence[Row]) -> None:
    """Print the settings of the sweep, the fastest first."""
    hidden = ("kernels", "pool_size")
    table = _table("mode", "settings", "rows", "tok/step", "break even", "tok/s", "speed", "equal")
    for row in sorted(rows, key=lambda row: -row["tokens_per_second"]):
        settings = [str(value) for name, value in row["settings"].items() if name not in hidden]
        needed = row.get("break_even_length")
        table.add_row(
            row["spec"],
            ",".join(settings),
            str(row["rows_per_step"]),
            f"{row['mean_accepted_length']:.2f}",
            "-" if needed is None else f"{needed:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['num_equal']}/{row['num_prompts']}",
        )
    _print(table)


def _table(*columns: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD)
    for column in columns:
        is_text = column in ("prompt", "mode", "settings", "verdict")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    print_table(table, width=140)
