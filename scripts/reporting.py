"""What the scripts print: JSON lines, those of a measurement with where it was made; tables."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import jax
import rich.console
from jax.sharding import Mesh
from rich.table import Table


def machine() -> dict[str, Any]:
    """Return the device, jax's version and the command, which every measurement names."""
    return {
        "device": device_name(),
        "jax": jax.__version__,
        "command": " ".join(["benchmark.py", *sys.argv[1:]]),
    }


def mesh_sizes(mesh: Mesh | None) -> dict[str, int] | None:
    """Return the devices on each axis of a mesh, None for one device."""
    return None if mesh is None else dict(mesh.shape)


def device_name() -> str:
    """Return the name of the GPU, or that of the processor."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "cpu"


def json_line(row: Mapping[str, Any], *, ensure_ascii: bool = True) -> str:
    """Return an object as a line of JSON, which has no NaN and no infinity: they become null."""
    return json.dumps(_finite(row), ensure_ascii=ensure_ascii, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(table: Table, *, width: int | None) -> None:
    """Print a table whose cells and title stand as they are: brackets and colons are text."""
    rich.console.Console(width=width, markup=False, emoji=False).print(table)


def report(row: dict[str, Any], out: str | None) -> None:
    """Print a measurement as a JSON line, and append it to a file."""
    line = json_line(row)
    click.echo(line)
    if out is not None:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")
