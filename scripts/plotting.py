"""The picture of `benchmark.py decode`: tokens per step by prompt, acceptance by position."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

COLORS = ("#0b6e99", "#d1603d", "#5b8c3a", "#7a5195")
GREY = "#666666"
FILE_NAME: dict[str, Any] = {"rotation": 270, "va": "center", "fontsize": 9, "color": GREY}

Row = dict[str, Any]


def check(path: str) -> None:
    """Raise a one-line error, before anything is measured, if the picture could not be drawn."""
    if Path(path).suffix.lower() != ".png":
        raise click.UsageError(f"--plot {path}: expected a file name that ends in .png")
    if not Path(path).resolve().parent.is_dir():
        raise click.UsageError(f"--plot {path}: the directory does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install -e '.[plot]'")


def plot(rows: Sequence[Row], totals: Sequence[Row], path: str, *, title: str) -> None:
    """Draw the acceptance of the speculative modes.

    Args:
      rows: one a prompt and mode, as `evaluation.measure_prompt` gives them, with id and file.
      totals: one a group and mode; those of the group "all" are drawn.
      path: the PNG file.
      title: what was measured where.
    """
    from matplotlib.figure import Figure

    specs = [spec for spec in dict.fromkeys(row["spec"] for row in rows) if spec != "none"]
    colors = {spec: COLORS[index % len(COLORS)] for index, spec in enumerate(specs)}
    names = list(dict.fromkeys((row["file"], row["id"]) for row in rows))
    height = max(3.4, 1.6 + 0.3 * len(names))
    figure = Figure(figsize=(11, height), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_prompts(left, rows, names, colors)
    _draw_positions(right, [t for t in totals if t["group"] == "all"], colors)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=GREY)
    figure.legend(loc="outside lower left", ncols=len(specs) + 1, frameon=False, fontsize=9)
    figure.savefig(path)


def _draw_prompts(
    axes: Any, rows: Sequence[Row], names: Sequence[tuple[str, str]], colors: dict[str, str]
) -> None:
    """Draw a line for each prompt: a dot for the counted part, a ring for the whole text."""
    offsets = {spec: 0.16 * (2 * i - len(colors) + 1) for i, spec in enumerate(colors)}
    for row in rows:
        if row["spec"] not in colors:
            continue
        color = colors[row["spec"]]
        y = names.index((row["file"], row["id"])) + offsets[row["spec"]]
        whole, counted = row["mean_accepted_length"], row["counted_accepted_length"]
        if counted is not None:
            axes.plot([counted, whole], [y, y], color=color, linewidth=1, alpha=0.5)
        if row["periodic_from"] is not None:
            axes.plot(whole, y, "o", color=color, markerfacecolor="white", markersize=5)
        if counted is not None:
            axes.plot(counted, y, "o", color=color, markersize=5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [name for _, name in names])
    for file in dict.fromkeys(file for file, _ in names):
        places = [index for index, name in enumerate(names) if name[0] == file]
        axes.axhline(places[0] - 0.5, color="#bbbbbb", linewidth=0.8)
        middle = (places[0] + places[-1]) / 2
        axes.text(1.01, middle, file, transform=axes.get_yaxis_transform(), **FILE_NAME)
    axes.set_xlim(left=0.9)
    axes.axvline(1, color=GREY, linewidth=0.8)
    for spec, color in colors.items():
        axes.plot(
            [], [], "o", color=color, markersize=5, label=f"{spec}, up to where the text loops"
        )
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="with the part that loops")
    axes.set_title("Tokens per step", loc="left", fontsize=10)
    axes.set_xlabel("mean accepted length (1 = plain decoding)")
    _finish(axes, axis="x")


def _draw_positions(axes: Any, totals: Sequence[Row], colors: dict[str, str]) -> None:
    """Draw the share of steps in which draft token 1, 2, ... was accepted, loops left out."""
    longest = 1
    for total in totals:
        rates = total["acceptance_by_position"]
        if total["spec"] not in colors or not rates:
            continue
        positions = range(1, len(rates) + 1)
        color = colors[total["spec"]]
        axes.plot(positions, rates, "o-", color=color, markersize=4, linewidth=1.5)
        longest = max(longest, len(rates))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_title("Steps that accept draft token n, loops left out", loc="left", fontsize=10)
    axes.set_xlabel("n, position in the draft")
    _finish(axes, axis="y")


def _finish(axes: Any, *, axis: str) -> None:
    axes.grid(axis=axis, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
