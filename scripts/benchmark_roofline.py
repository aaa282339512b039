"""`benchmark.py roofline`: what steps should take on one device and on several, on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import click
from options import POSITIVE, integers, out_option
from reporting import json_line
from roofline import (
    Setting,
    break_even,
    collectives_us,
    distinct_experts,
    gaps_us,
    held_bytes,
    joining_us,
    kv_bytes,
    layer_all_reduce_us,
    measured_ms,
    measured_part_ms,
    num_launches,
    part_us,
    ridge_rows,
    speed_up,
    step_us,
    weight_bytes,
)
from roofline_figures import H200, ITEMSIZES, SHAPES, shape_of

Row = dict[str, Any]
# Of each table: its columns, as heading, field and form; those of the second part for every width.
_Columns = tuple[tuple[str, str, str], ...]
_GPUS: _Columns = (("shape", "shape", ""), ("tp", "tp", ""))
_BATCH: _Columns = (*_GPUS, ("data", "data", ""), ("batch", "batch", ""))
TABLES: dict[str, tuple[_Columns, _Columns]] = {
    "part": (_GPUS, (("measured ms", "measured_part_ms", ".3f"), ("predicted", "part_ms", ".3f"),
                     ("off", "error", "+.1%"))),
    "steps": ((*_GPUS, ("GB read", "gb_read", ".2f"), ("GB held", "gb_held", ".2f")),
              (("ms", "ms", ".2f"), ("measured", "measured_ms", ".2f"),
               ("speed-up", "speed_up", ".2f"))),
    "split": (_GPUS, (("part ms", "part_ms", ".2f"), ("collectives", "collectives_ms", ".2f"),
                      ("small kernels", "joining_ms", ".2f"), ("gaps", "gaps_ms", ".2f"))),
    "collectives": ((*_GPUS, ("launches", "launches", ""), ("us a launch", "us_a_launch", ".1f")),
                    (("all-reduce us", "all_reduce_us", ".1f"),
                     ("collectives", "collectives_share", ".0%"))),
    "break-even": ((*_BATCH, ("arithmetic as long as memory, rows", "ridge_rows", "")),
                   (("break-even", "break_even", ".2f"),)),
    "batches": (_BATCH, (("ms", "ms", ".2f"), ("speed-up", "speed_up", ".2f"),
                         ("tokens/s of none", "texts_per_second", ".0f"))),
    "experts": ((*_GPUS, ("GB held", "gb_held", ".1f")),
                (("experts", "experts", ".1f"), ("GB read", "gb_read", ".2f"))),
}  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shape", "names", type=click.Choice(SHAPES), multiple=True, default=("8b", "32b"))
@click.option("--tp", default="1,2,4,8", callback=integers, help="GPUs that share the model.")
@click.option("--data", default="1", callback=integers, help="Parts of the batch.")
@click.option("--gpus", type=POSITIVE, default=None, help="Only meshes of so many GPUs in all.")
@click.option("--rows", default="1,8,64", callback=integers, help="Widths of the block.")
@click.option("--batch", default="1", callback=integers, help="Texts decoded at once, in all.")
@click.option("--length", type=POSITIVE, default=512, help="Cached tokens of each text.")
@click.option(
    "--dtype", type=click.Choice(tuple(ITEMSIZES)), default="bfloat16",
    help="Of weights and cache. Arithmetic counts as bfloat16's.",
)  # fmt: skip
@click.option(
    "--table", "tables", type=click.Choice((*TABLES, "hardware")), multiple=True,
    default=("steps", "split", "break-even"), help="What to print.",
)  # fmt: skip
@out_option
def roofline(out: str | None, tables: tuple[str, ...], rows: tuple[int, ...], **flags: Any) -> None:
    """Predict decode steps on H200s. Needs no GPU: nothing is run.

    Prints Markdown tables; --out has every figure. See docs/scaling.md for the model.
    """
    found = [[predict(setting) for setting in group] for group in settings(rows=rows, **flags)]
    if out is not None:
        with open(out, "a", encoding="utf-8") as file:
            file.writelines(json_line(row) + "\n" for group in found for row in group)
    for name in tables:
        lines = hardware_table() if name == "hardware" else table(found, *TABLES[name])
        click.echo(f"\n{name}\n\n" + "\n".join(lines))


def settings(
    *,
    names: Sequence[str],
    tp: Sequence[int],
    data: Sequence[int],
    gpus: int | None,
    rows: Sequence[int],
    batch: Sequence[int],
    length: int,
    dtype: str,
) -> list[list[Setting]]:
    """Return the settings to predict, in groups that differ in rows only.

    Raises:
      ValueError: sizes do not divide, or no mesh has so many GPUs.
    """
    meshes = [(t, d) for t in tp for d in data if gpus in (None, t * d)]
    if not meshes:
        raise ValueError(f"no --tp times --data makes --gpus {gpus}")
    return [
        [
            Setting(shape_of(name), t, d, width, texts, length, ITEMSIZES[dtype])
            for width in rows
        ]
        for name in names
        for texts in batch
        for t, d in meshes
    ]  # fmt: skip


def predict(setting: Setting) -> Row:
    """Return every figure of one setting: ms, us, GB (1e9 bytes) a device and step."""
    us, part_ms, measured = step_us(setting), part_us(setting) / 1e3, measured_part_ms(setting)
    shape = setting.shape
    return {
        "measure": "roofline",
        "shape": shape.name,
        "tp": setting.tp,
        "data": setting.data,
        "rows": setting.rows,
        "batch": setting.batch,
        "length": setting.length,
        "itemsize": setting.itemsize,
        "gb_weights": weight_bytes(setting) / 1e9,
        "gb_kv": kv_bytes(setting) / 1e9,
        "gb_read": (weight_bytes(setting) + kv_bytes(setting)) / 1e9,
        "gb_held": held_bytes(setting) / 1e9,
        "fits": held_bytes(setting) <= H200.memory_bytes,
        "ms": us / 1e3,
        "measured_ms": measured_ms(setting),
        "part_ms": part_ms,
        "measured_part_ms": measured,
        "error": None if measured is None else part_ms / measured - 1,
        "collectives_ms": collectives_us(setting) / 1e3,
        "joining_ms": joining_us(setting) / 1e3,
        "gaps_ms": gaps_us(setting) / 1e3,
        "speed_up": speed_up(setting),
        "all_reduce_us": layer_all_reduce_us(setting),
        "collectives_share": collectives_us(setting) / us,
        "launches": num_launches(setting),
        "us_a_launch": us / num_launches(setting),
        "break_even": break_even(setting),
        "ridge_rows": ridge_rows(setting),
        "texts_per_second": setting.batch / us * 1e6,
        "experts": distinct_experts(shape, setting.num_rows) if shape.experts else None,
    }


def table(groups: Iterable[Sequence[Row]], once: _Columns, by_rows: _Columns) -> list[str]:
    """Return the lines of a Markdown table: a line for each group, its rows side by side.

    Columns of `once` are those of a group's first row.
    """
    groups = list(groups)
    widths = [row["rows"] for row in groups[0]]
    headings = [heading for heading, _, _ in once]
    headings += [
        f"{heading}, {width} row{'s' * (width > 1)}"
        for heading, _, _ in by_rows
        for width in widths
    ]
    lines = [headings, ["---"] * len(headings)]
    for group in groups:
        cells = [_cell(group[0][field], form) for _, field, form in once]
        cells += [_cell(row[field], form) for _, field, form in by_rows for row in group]
        lines.append(cells)
    return _markdown(lines)


def hardware_table() -> list[str]:
    """Return the lines of a Markdown table of the figures that predictions are made of."""
    lines = [["figure", "value", "source"], ["---"] * 3]
    for field in dataclasses.fields(H200):
        lines.append([field.name, f"{getattr(H200, field.name):.4g}", field.metadata["source"]])
    return _markdown(lines)


def _markdown(lines: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
