"""Train the bundled demo model on the Python source installed here: `train_tiny.py --out DIR`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path

import click
import command
import jax
from options import POSITIVE, Duration

import jaxspec
from checkpoints.training.recipe import run
from checkpoints.training.settings import Limits, Recipe
from checkpoints.training.steps import AttentionName, StepConfig
from checkpoints.training.trainer import probe
from jaxspec.evaluation import read_prompts

_PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts" / "python.jsonl"
_SMALL = Recipe(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1024,
    sequence_length=128,
    batch_size=8,
    loop_rows=2,
    step=StepConfig(compute_dtype="float32"),
    sources=("click", "jinja2", "pytest"),
    held_out=("jinja2",),
    num_new_tokens=32,
    max_shard_bytes=200_000,
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the checkpoint.")
@click.option(
    "--minutes",
    type=Duration(),
    default=8.0,
    show_default=True,
    help="Time for everything.",
)
@click.option("--steps", type=POSITIVE, help="Train for so many steps, whatever the time.")
@click.option("--attention", default="auto", type=click.Choice(["auto", "cudnn", "xla"]))
@click.option("--batch-size", type=POSITIVE, help="Windows of a step.")
@click.option(
    "--loop-rows", type=click.IntRange(min=0), help="Windows of a step that are turned into loops."
)
@click.option("--max-bytes", type=POSITIVE, help="Most training text.")
@click.option("--prompts", default=_PROMPTS, type=click.Path(path_type=Path), show_default=True)
@click.option("--small", is_flag=True, help="A miniature model on little text, to try the script.")
@click.option("--probe", "is_probe", is_flag=True, help="Only measure the speed of the step.")
@click.version_option(jaxspec.__version__, prog_name="jaxspec")
def main(
    out: Path | None,
    minutes: float,
    steps: int | None,
    attention: str,
    batch_size: int | None,
    loop_rows: int | None,
    max_bytes: int | None,
    prompts: Path,
    small: bool,
    is_probe: bool,
) -> None:
    """Train, evaluate and export a small Qwen3 for Python."""
    start = time.monotonic()
    if importlib.util.find_spec("optax") is None:
        raise click.UsageError("training needs optax: pip install -e '.[train]'")
    command.enable_compilation_cache()
    recipe = _SMALL if small else Recipe()
    if batch_size is not None:
        recipe = dataclasses.replace(recipe, batch_size=batch_size)
    recipe = dataclasses.replace(recipe, max_bytes=max_bytes)
    if loop_rows is not None:
        recipe = dataclasses.replace(recipe, loop_rows=loop_rows)
    names: tuple[AttentionName, ...] = ("cudnn", "xla")
    if attention != "auto" or jax.default_backend() != "gpu":
        names = ("cudnn",) if attention == "cudnn" else ("xla",)
    if is_probe:
        sizes = [recipe.batch_size, 2 * recipe.batch_size]
        probe(recipe, attention=names, batch_sizes=sizes, say=_say)
        return
    if out is None:
        raise click.UsageError("--out is missing")
    limits = Limits(start, minutes, min(25.0, 10 * minutes), steps)
    summary = run(
        recipe, out, limits=limits, prompts=read_prompts(prompts), attention=names, say=_say
    )
    for row in summary["samples"]:
        _say(f"--- {row['id']}\n{row['text']}")
        _say(json.dumps({name: value for name, value in row.items() if name != "text"}))
    shown = summary["training"] | summary["held_out"] | {"total_seconds": summary["total_seconds"]}
    _say(json.dumps(shown))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    command.leave(command.run(main))
