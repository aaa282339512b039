"""`benchmark.py exactness`: speculative texts against plain decoding, token by token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import command
import jax
import meshes
import rich.box
from options import (
    KERNELS,
    PROMPTS,
    Duration,
    dtype_option,
    integers,
    kernel_names,
    model_option,
    out_option,
    prompts_option,
)
from reporting import machine, mesh_sizes, print_table, report
from rich.table import Table

import checkpoints
from jaxspec import Drafter, GenerateConfig, NoDraft, drafters, evaluation, text
from jaxspec.request import check_prompts
from jaxspec.runner import Run, Runner
from jaxspec.stats import first_different_index

Row = dict[str, Any]
SAME_WIDTH, ONE_ROW, ONE_DEVICE = "same width", "one row", "one device"


@dataclasses.dataclass(frozen=True)
class Way:
    """How a text is decoded: by what, with which kernels, and whether on the mesh if there is one.

    `kernels` is None for the default.
    """

    drafter: Drafter
    kernels: str | None
    is_spread: bool = True


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two ways to decode a text. `must_be_equal` is whether a difference is an error."""

    name: str
    against: str
    left: Way
    right: Way
    must_be_equal: bool


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@model_option
@prompts_option
@click.option("--limit", type=click.IntRange(min=1), default=None, help="Most prompts.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=1300)
@dtype_option
@click.option("--kernels", default="default", callback=kernel_names,
              help=f"Implementations to run with, of {', '.join(KERNELS)}.")  # fmt: skip
@meshes.mesh_options
@click.option("--promptlookup", default="7", callback=integers, help="Draft tokens M to try.")
@click.option("--lookahead", help="W,N,G.  [default: the platform's]")
@click.option(
    "--time-limit",
    type=Duration(),
    default=None,
    help="Start no new prompt after so many seconds.",
)
@out_option
def exactness(**flags: Any) -> int:
    """Compare promptlookup and lookahead with plain decoding, texts running on after their end.

    promptlookup must give the tokens of none at the same width of the block; in float32 all modes,
    widths and kernels must agree, and a mesh with one device, which then holds the model too. The
    exit code is 1 where they do not. Elsewhere near ties may fall differently: each difference
    shows the gap of the two best logits in its place.
    """
    started = time.monotonic()
    limit = flags["time_limit"]
    command.enable_compilation_cache()
    files = list(flags["prompts"]) or sorted(map(str, PROMPTS.glob("*.jsonl")))
    prompts = [prompt for file in files for prompt in evaluation.read_prompts(file)]
    prompts = prompts[: flags["limit"]]
    dtype = flags["dtype"] or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    mesh = meshes.make_mesh(flags)
    compared = comparisons(flags, is_float32=dtype == "float32")
    if mesh is not None:
        compared += mesh_comparisons(compared, is_float32=dtype == "float32")
    path = checkpoints.BUNDLED_MODEL if flags["model"] is None else flags["model"]
    checkpoint = checkpoints.open_checkpoint(path)
    ids = [text.encode(checkpoint.tokenizer, prompt.text) for prompt in prompts]
    config = GenerateConfig(max_new_tokens=flags["max_new_tokens"])
    check_prompts(ids, checkpoint.config, config)
    whole = checkpoint.load_model(dtype=dtype)
    models = {True: whole}
    if mesh is not None:
        models = {False: whole, True: checkpoint.load_model(mesh=mesh, dtype=dtype)}
    runners = {
        (kernels, is_spread): Runner(
            model,
            ids,
            dataclasses.replace(config, kernels=kernels),
            whole=whole,
        )
        for kernels in flags["kernels"]
        for is_spread, model in models.items()
    }
    where = machine() | {
        "mesh": mesh_sizes(mesh),
        "model": Path(path).resolve().name,
        "dtype": dtype,
    }
    rows: list[Row] = []
    for index, prompt in enumerate(prompts):
        if limit is not None and time.monotonic() - started > limit:
            click.echo(f"PARTIAL: the time limit was reached after {index} of {len(prompts)}")
            break
        for row in compare(runners, index, compared):
            rows.append({"measure": "exactness", "id": prompt.id, "file": prompt.file} | row)
            report(rows[-1] | where, flags["out"])
    totals = summarize(rows, compared)
    for total in totals:
        report(total | where, flags["out"])
    print_tables(rows, totals)
    return int(any(total["num_errors"] for total in totals))


def comparisons(flags: Row, *, is_float32: bool) -> list[Comparison]:
    """Return what to compare with what."""
    platform = jax.default_backend()
    settings: dict[str, int] = {}
    if flags["lookahead"] is not None:
        names = ("window_size", "ngram_size", "num_candidates")
        try:
            values = map(int, flags["lookahead"].split(","))
            settings = dict(zip(names, values, strict=True))
        except ValueError:
            raise click.UsageError(
                f"--lookahead {flags['lookahead']!r}: expected three integers W,N,G"
            ) from None
    lookahead = drafters.make_drafter("lookahead", platform=platform, **settings)
    result = []
    for kernels in flags["kernels"]:
        plain = Way(NoDraft(), kernels)
        for num_drafts in flags["promptlookup"]:
            name = f"promptlookup {num_drafts}"
            lookup = drafters.make_drafter(
                "promptlookup", platform=platform, num_draft_tokens=num_drafts
            )
            wide = Way(NoDraft(num_padding_rows=num_drafts), kernels)
            result.append(Comparison(name, SAME_WIDTH, Way(lookup, kernels), wide, True))
            result.append(Comparison(name, ONE_ROW, Way(lookup, kernels), plain, is_float32))
        shown = f"{lookahead.window_size},{lookahead.ngram_size},{lookahead.num_candidates}"
        result.append(
            Comparison(f"lookahead {shown}", ONE_ROW, Way(lookahead, kernels), plain, is_float32)
        )
    first, *others = flags["kernels"]
    for kernels in others:
        against = f"kernels {first or 'default'}"
        pair = (Way(NoDraft(), kernels), Way(NoDraft(), first))
        result.append(Comparison("none", against, *pair, is_float32))
    return result


def mesh_comparisons(compared: Sequence[Comparison], *, is_float32: bool) -> list[Comparison]:
    """Return comparisons of every mode on the mesh with none on one device."""
    result = []
    for kernels in dict.fromkeys(comparison.left.kernels for comparison in compared):
        modes = {"none": Way(NoDraft(), kernels)} | {
            comparison.name: comparison.left
            for comparison in compared
            if comparison.left.kernels == kernels
        }
        plain = Way(NoDraft(), kernels, is_spread=False)
        result += [
            Comparison(name, ONE_DEVICE, way, plain, is_float32) for name, way in modes.items()
        ]
    return result


def compare(
    runners: dict[tuple[str | None, bool], Runner],
    index: int,
    compared: Sequence[Comparison],
) -> Iterator[Row]:
    """Yield a row for each comparison on one prompt; every text is decoded once.

    Args:
      runners: by kernels and whether they are on the mesh.
      index: of the prompt.
      compared: what to compare.
    """
    runs: dict[Way, Run] = {}

    def run(way: Way) -> Run:
        if way not in runs:
            runner = runners[way.kernels, way.is_spread]
            runs[way] = runner.run(index, way.drafter, ignore_eos=True)
        return runs[way]

    for comparison in compared:
        left, right = run(comparison.left), run(comparison.right)
        runner = runners[comparison.right.kernels, comparison.right.is_spread]
        position = first_different_index(left.token_ids, right.token_ids)
        row: Row = {
            "mode": comparison.name,
            "against": comparison.against,
            "kernels": comparison.left.kernels or "default",
            "num_tokens": len(left.token_ids),
            "num_equal": len(left.token_ids) if position is None else position,
            "mean_accepted_length": len(left.token_ids) / left.num_steps,
            "equal": position is None,
            "must_be_equal": comparison.must_be_equal,
            "position": position,
            "token_id": None,
            "reference_token_id": None,
            "gap": None,
        }
        if position is not None:
            row |= _difference(runner, index, position, left.token_ids, right.token_ids)
        yield row


def _difference(
    runner: Runner,
    index: int,
    position: int,
    left: Sequence[int],
    right: Sequence[int],
) -> Row:
    """Return the two ids at a difference, and the gap of the two best logits there."""
    prompt = runner.prompts[index]
    gap = evaluation.top2_gap(
        runner.whole, [*prompt, *right], len(prompt) + position, capacity=runner.capacity
    )
    ids = {"token_id": _at(left, position), "reference_token_id": _at(right, position)}
    return ids | {"gap": gap}


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def summarize(rows: Sequence[Row], compared: Sequence[Comparison]) -> list[Row]:
    """Return one row a comparison over all prompts."""
    totals = []
    for comparison in compared:
        kernels = comparison.left.kernels or "default"
        key = (comparison.name, comparison.against, kernels)
        part = [row for row in rows if (row["mode"], row["against"], row["kernels"]) == key]
        gaps = [row["gap"] for row in part if row["gap"] is not None]
        num_different = sum(not row["equal"] for row in part)
        totals.append(
            {
                "measure": "exactness_total",
                "mode": comparison.name,
                "against": comparison.against,
                "kernels": kernels,
                "num_prompts": len(part),
                "num_tokens": sum(row["num_tokens"] for row in part),
                "num_equal": sum(row["num_equal"] for row in part),
                "num_different_texts": num_different,
                "largest_gap": max(gaps, default=None),
                "must_be_equal": comparison.must_be_equal,
                "num_errors": num_different if comparison.must_be_equal else 0,
            }
        )
    return totals


def print_tables(rows: Sequence[Row], totals: Sequence[Row]) -> None:
    """Print every difference, then a line for each comparison."""
    different = [row for row in rows if not row["equal"]]
    if different:
        _print(
            different,
            ("id", "mode", "against", "kernels", "position", "token_id", "reference_token_id",
             "gap"),
        )  # fmt: skip
    _print(
        totals,
        ("mode", "against", "kernels", "num_prompts", "num_tokens", "num_equal",
         "num_different_texts", "largest_gap", "num_errors"),
    )  # fmt: skip


def _print(rows: Sequence[Row], fields: Sequence[str]) -> None:
    table = Table(box=rich.box.SIMPLE_HEAD)
    for field in fields:
        table.add_column(field.replace("num_", "").replace("_", " "), justify="right")
    for row in rows:
        cells = (row[field] for field in fields)
        table.add_row(
            *(
                "-" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell)
                for cell in cells
            )
        )
    print_table(table, width=150)
