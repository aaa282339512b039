"""The tables of `benchmark.py step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rich.box
from reporting import print_table
from rich.table import Table

Row = dict[str, Any]
# Of each measure: the heading of a column, the field, and how it is written.
_NAME = (
    ("shape", "shape", ""), ("part of", "part_of", ""), ("batch", "batch", ""),
    ("rows", "rows", ""),
)  # fmt: skip
_PLACE = (("capacity", "capacity", ""), ("length", "length", ""), ("kernels", "kernels", ""))
_MS = (("ms", "ms", ".3f"), ("min", "ms_min", ".3f"), ("max", "ms_max", ".3f"))
_COLUMNS: dict[str, Sequence[tuple[str, str, str]]] = {
    "copy_rate": (("copy GB/s", "gb_per_second", ".0f"),),
    "read_rate": (("read GB/s", "gb_per_second", ".0f"),),
    "product_rate": (("product TFLOP/s", "teraflops", ".0f"),),
    "step": (
        *_NAME, *_PLACE, *_MS, ("GB/s", "gb_per_second", ".0f"),
        ("of copy", "share_of_copy", ".1%"), ("of read", "share_of_read", ".1%"),
        ("of read, K/V", "share_of_read_with_kv", ".1%"), ("compile s", "compile_seconds", ".1f"),
    ),
    "throughput": (
        *_NAME, ("drafter", "drafter", ""), *_PLACE, ("new tokens", "num_tokens", ""),
        ("s", "seconds", ".3f"), ("min", "seconds_min", ".3f"), ("max", "seconds_max", ".3f"),
        ("tokens/s", "tokens_per_second", ".0f"), ("decoding", "decode_tokens_per_second", ".0f"),
        ("tokens/step", "mean_accepted_length", ".2f"),
    ),
    "load": (
        ("model", "model", ""), ("dtype", "dtype", ""), ("s", "seconds", ".2f"),
        ("bytes", "model_bytes", ""), ("peak of a device", "peak_bytes_per_device", ""),
        ("share", "share", ".1%"),
    ),
    "overhead": (
        *_NAME, ("drafter", "drafter", ""), *_PLACE, *_MS, ("forward", "forward_ms", ".3f"),
        ("overhead us", "overhead_us", ".1f"), ("tokens/step", "mean_accepted_length", ".2f"),
    ),
    "sampling": (
        *_NAME, ("settings", "settings", ""), ("kernels", "kernels", ""), *_MS,
        ("greedy", "plain_ms", ".3f"), ("added us", "added_us", ".1f"), ("ratio", "ratio", ".3f"),
    ),
    "auto": (
        *_NAME, *_PLACE, *_MS, ("none", "plain_ms", ".3f"), ("added us", "added_us", ".1f"),
        ("ratio", "ratio", ".3f"), ("compile s", "compile_seconds", ".1f"),
    ),
    "compile": (
        *_NAME, ("drafter", "drafter", ""), ("kernels", "kernels", ""), ("program", "program", ""),
        ("lower s", "lower_seconds", ".2f"), ("compile s", "compile_seconds", ".2f"),
    ),
    "ttft": (
        *_NAME[:1], ("prompt", "prompt_tokens", ""), ("chunk", "chunk_size", ""),
        ("kernels", "kernels", ""), *_MS, ("prefill", "prefill_ms", ".3f"),
        ("products", "products_ms", ".3f"), ("ratio", "ratio", ".2f"),
    ),
    "peer": (
        *_NAME[:1], ("peer", "peer", ""), ("rows", "rows", ""), ("capacity", "capacity", ""),
        ("length", "length", ""), *_MS, ("GB/s", "gb_per_second", ".0f"),
        ("tokens/s", "tokens_per_second", ".1f"), ("tokens/step", "mean_accepted_length", ".2f"),
        ("compile s", "compile_seconds", ".1f"),
    ),
    "profile": (
        *_NAME, *_PLACE, ("wall us", "wall_us", ".1f"), ("busy us", "busy_us", ".1f"),
        ("gaps us", "gap_us", ".1f"), ("kernels", "kernels_per_step", ".1f"),
        ("collectives us", "collective_us", ".1f"), ("least", "collective_us_min", ".1f"),
    ),
}  # fmt: skip
_KERNEL_COLUMNS = (
    ("count", "count", ".1f"), ("us each", "us_each", ".2f"), ("us a step", "us_per_step", ".1f"),
    ("gaps after, us", "gap_us_per_step", ".1f"), ("kernel", "kernel", ""), ("op", "op", ""),
)  # fmt: skip


def rounded(value: Any) -> Any:
    """Return a row with its floats cut to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def name_of(row: Row) -> str:
    """Return which measurement a row is of, in a few words."""
    names = (
        "measure",
        "model",
        "shape",
        "part_of",
        "rows",
        "settings",
        "drafter",
        "peer",
        "program",
        "kernels",
    )
    return " ".join(str(row[name]) for name in names if row.get(name) is not None)


def print_tables(rows: Sequence[Row]) -> None:
    """Print a table for each sort of measurement, and the failures."""
    good = [row for row in rows if "error" not in row]
    for measure, columns in _COLUMNS.items():
        chosen = [row for row in good if row["measure"] == measure]
        if chosen:
            _print(measure.replace("_", " "), columns, chosen)
    for row in good:
        if row["measure"] == "profile":
            _print(f"{name_of(row)}: {row['num_names']} names", _KERNEL_COLUMNS, row["kernel_rows"])
    for row in rows:
        if "error" in row:
            print(f"failed: {name_of(row)}: {row['error']}", flush=True)


def _print(title: str, columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> None:
    table = Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for heading, field, _ in columns:
        is_name = field in ("kernel", "op")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=True,
                         overflow="ellipsis", max_width=64 if is_name else None)  # fmt: skip
    for row in rows:
        table.add_row(*(_cell(row.get(field), form) for _, field, form in columns))
    print_table(table, width=150)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
