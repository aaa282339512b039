"""Convert a Qwen3 checkpoint: Hugging Face directory or hub id -> Orbax, or back.

python scripts/convert.py SRC DST
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import command
import jax
import rich.console
from click.core import ParameterSource
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import checkpoints
import jaxspec


class Size(click.ParamType):
    """A number of bytes, such as 5GB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the bytes."""
        try:
            return value if isinstance(value, int) else checkpoints.parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--to", type=click.Choice(["orbax", "hf"]), default="orbax", help="Format of DST.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default=None,
    help="Of the written weights.  [default: as stored]",
)
@click.option("--max-shard-size", type=Size(), default="5GB", help="hf: most bytes in one file.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
@click.version_option(jaxspec.__version__, prog_name="jaxspec")
def main(
    source: str,
    destination: str,
    to: checkpoints.Format,
    dtype: str | None,
    max_shard_size: int,
    overwrite: bool,
) -> None:
    """Convert SRC (Hugging Face directory, converted directory or hub id) and write it to DST."""
    start = time.perf_counter()
    console = rich.console.Console(stderr=True)
    columns = [TextColumn("convert"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("convert", total=None)
        written = checkpoints.convert(
            source,
            destination,
            to=to,
            dtype=dtype,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    source_of = click.get_current_context().get_parameter_source
    if to != "hf" and source_of("max_shard_size") is not ParameterSource.DEFAULT:
        click.echo("note: --max-shard-size has no effect without --to hf", err=True)
    click.echo(
        f"{written.directory}: {written.num_tensors} tensors, {written.num_bytes / 1e6:.1f} MB, "
        f"{' and '.join(written.dtypes)}, in {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    # Orbax asks JAX for its devices, and a conversion must not take a GPU's memory.
    jax.config.update("jax_platforms", "cpu")
    command.leave(command.run(main))
