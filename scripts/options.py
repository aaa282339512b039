"""Options that commands share, and those that are lists: `1,8,16` and `triton,xla`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

POSITIVE = click.IntRange(min=1)


class Duration(click.FloatRange):
    """A finite number above zero: of nan a range says nothing, and no clock passes it."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts"


def _not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return a model's directory or id, which an unset variable of a shell would leave empty."""
    del context, option
    if value == "":
        raise click.UsageError("--model is empty: expected a directory or a hub id")
    return value


model_option = click.option(
    "--model",
    default=None,
    callback=_not_empty,
    help="HF directory, converted directory or hub id.  [default: the bundled model]",
)
prompts_option = click.option(
    "--prompts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="JSON lines with id and prompt.  [default: all of benchmarks/prompts]",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default=None,
    help="Of weights and activations.  [default: float32 on CPU, bfloat16 on GPU]",
)


def _in_a_folder(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return a file's path, whose folder has to be there."""
    del context, option
    folder = None if value is None else Path(value).absolute().parent
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise click.BadParameter(f"expected a file in a folder to write to, got {value!r}")
    return value


out_option = click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True),
    callback=_in_a_folder,
    help="Append the JSON lines to a file.",
)
KERNELS = ("default", "triton", "interpret", "xla")


def integers(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Return the integers, at least 1 each, of an option's value."""
    del context, option
    numbers = []
    for part in value.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise click.BadParameter(
                f"expected integers of at least 1 with commas between, got {part!r} in {value!r}"
            )
        numbers.append(int(part))
    return tuple(dict.fromkeys(numbers))


def kernel_names(
    context: click.Context, option: click.Parameter, value: str
) -> tuple[str | None, ...]:
    """Return the kernel implementations of an option's value, None for the default."""
    del context, option
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in KERNELS:
            raise click.BadParameter(
                f"expected some of {', '.join(KERNELS)} with commas between, got {name!r}"
            )
    return tuple(None if name == "default" else name for name in names)
