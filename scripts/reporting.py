"""What the benchmarks share: a measurement is a JSON line that says where it was made."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import click
import jax
from jax.sharding import Mesh


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


def report(row: dict[str, Any], out: str | None) -> None:
    """Print a measurement as a JSON line, and append it to a file."""
    line = json.dumps(row)
    click.echo(line)
    if out is not None:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")
