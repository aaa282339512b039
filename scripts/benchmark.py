"""Measure what jaxspec does on this machine.

`python scripts/benchmark.py kernels` times every op of pallas_kernels at real sizes against its
XLA form, and against the time that the device needs to copy as many bytes.
`python scripts/benchmark.py step` times a decode step of the published model sizes, and what is
around it. `python scripts/benchmark.py decode` compares the drafters on prompts, and
`python scripts/benchmark.py exactness` their tokens. Each measurement prints one JSON line; a table
follows.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import click
import command
import jax
import jax.numpy as jnp
import numpy as np
from benchmark_decode import decode
from benchmark_exactness import exactness
from benchmark_step import step
from device_time import device_time, launch_gap
from rates import measure_copy_rate
from reporting import machine, report

import jaxspec
import pallas_kernels

OPS = ("find_ngram", "argmax", "argmax_partial", "verify_greedy")
# Constants to try on each op's kernel. None of them changes a result.
BLOCKS, WARPS = (128, 256, 512, 1024, 2048), (1, 2, 4, 8)
SWEEPS: dict[str, list[dict[str, int]]] = {
    "find_ngram": [dict(block=b, num_warps=w) for b, w in product(BLOCKS, WARPS)],
    "argmax": [
        dict(block=b, num_warps=w)
        for b, w in product((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16))
    ],
    "argmax_partial": [],  # swept as a part of argmax
    "verify_greedy": [
        dict(tile=t, num_warps=w) for t, w in product((1024, 2048, 4096, 8192), (1, 2, 4, 8, 16))
    ],
}


@click.group()
@click.version_option(jaxspec.__version__, prog_name="jaxspec")
def main() -> None:
    """Measure jaxspec on this machine."""


main.add_command(decode)
main.add_command(step)
main.add_command(exactness)


@main.command()
@click.option("--out", type=click.Path(dir_okay=False), help="Append the JSON lines to a file.")
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="Only this op.")
@click.option("--sweep", is_flag=True, help="Also try block sizes and warps on each kernel.")
@click.option("--smoke", is_flag=True, help="Tiny sizes, kernels interpreted: runs anywhere.")
def kernels(out: str | None, ops: tuple[str, ...], sweep: bool, smoke: bool) -> None:
    """Time every kernel against its XLA form.

    A time is what a call keeps the device busy, by its profiler, and one gap for every kernel that
    it launches, as between dependent kernels of one program.
    """
    if not smoke and jax.default_backend() != "gpu":
        raise click.UsageError(f"kernels need a GPU, not {jax.default_backend()!r}; try --smoke")
    command.enable_compilation_cache()
    where = machine()
    rows = []
    copy_rate = measure_copy_rate(num_bytes=2**20 if smoke else 8 * 10**9)
    rows.append({"op": "device_copy", "gb_per_second": round(copy_rate / 1e9, 1)})
    gap = launch_gap(num_launches=4 if smoke else 200)
    rows.append({"op": "launch_gap", "us": round(gap, 2)})
    reduce = partial(
        pallas_kernels.argmax_reduce, implementation="interpret" if smoke else "triton"
    )
    smallest = device_time(jax.jit(reduce), jnp.ones((1, 4)), jnp.zeros((1, 4), jnp.int32))
    rows.append({"op": "smallest_launch", "us": round(smallest.total_us(gap), 2)})
    for row in rows:
        report(row | where, out)
    for name in ops or OPS:
        for case in cases_of(name, smoke):
            for row in measure_case(name, case, gap, sweep=sweep, smoke=smoke):
                row["copy_us"] = round(row["bytes"] / copy_rate * 1e6, 2)
                rows.append(row)
                report(row | where, out)
    print_table(rows)


def cases_of(name: str, smoke: bool) -> list[Any]:
    """Return an op's benchmark cases, or one small case."""
    cases = import_module(f"pallas_kernels.{name.removesuffix('_partial')}.cases").CASES
    return [cases[2]] if smoke else [case for case in cases if case.is_benchmark]


def measure_case(
    name: str, case: Any, gap: float, *, sweep: bool, smoke: bool
) -> Iterator[dict[str, Any]]:
    """Time the forms of one op on one case, then variants of its kernel."""
    op = partial(getattr(pallas_kernels, name), **case.settings())
    arrays = [jnp.asarray(x) for x in case.arrays()]
    if hasattr(case, "dtype"):
        arrays = [arrays[0].astype(case.dtype)]
    kernel = "interpret" if smoke else "triton"
    forms: dict[str, Callable[..., Any]] = {
        "xla": partial(op, implementation="xla"),
        kernel: partial(op, implementation=kernel),
    }
    if name == "argmax" and case.num_valid is None:
        forms["jnp"] = lambda logits: jnp.argmax(logits, -1).astype(jnp.int32)
    variants = (SWEEPS[name][:1] if smoke else SWEEPS[name]) if sweep else []
    triton = import_module(f"pallas_kernels.{name.removesuffix('_partial')}.triton")
    for variant in variants:
        label = f"{kernel} " + " ".join(f"{key}={value}" for key, value in variant.items())
        forms[label] = partial(getattr(triton, name), interpret=smoke, **case.settings(), **variant)
    expected = None
    for form, run in forms.items():
        try:
            compiled = jax.jit(run)
            cost = device_time(compiled, *arrays)
            result = compiled(*arrays)
        except jax.errors.JaxRuntimeError as error:
            if " " not in form:  # only a variant may ask for too much of the device
                raise
            click.echo(f"{name} {case.name} {form}: {str(error).splitlines()[0]}", err=True)
            continue
        expected = result if expected is None else expected
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        num_bytes = sum(x.nbytes for x in [*arrays, *jax.tree.leaves(result)])
        yield {
            "op": name,
            "case": case.name,
            "form": form,
            "us": round(cost.total_us(gap), 2),
            "busy_us": round(cost.busy_us, 2),
            "launches": cost.num_launches,
            "bytes": num_bytes,
        }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line a case: the forms side by side, and the fastest variant of the kernel."""
    columns = (
        "op",
        "case",
        "kernel us",
        "xla us",
        "jnp us",
        "xla/kernel",
        "launches",
        "copy us",
        "best",
    )
    click.echo("\n" + "  ".join(f"{name:>12}" for name in columns))
    cases = dict.fromkeys((row["op"], row["case"]) for row in rows if "case" in row)
    for op, case in cases:
        forms = {row["form"]: row for row in rows if (row["op"], row.get("case")) == (op, case)}
        xla, kernel, *others = forms.values()
        variants = [row for row in others if row["form"] != "jnp"]
        best = min(variants, key=lambda row: row["us"]) if variants else None
        cells = [
            op,
            case,
            kernel["us"],
            xla["us"],
            forms["jnp"]["us"] if "jnp" in forms else "-",
            round(xla["us"] / kernel["us"], 2) if kernel["us"] else "-",
            f"{kernel['launches']:g}/{xla['launches']:g}",
            kernel["copy_us"],
            f"{best['us']} {best['form']}" if best else "-",
        ]
        click.echo("  ".join(f"{cell!s:>12}" for cell in cells))


if __name__ == "__main__":
    sys.exit(command.run(main))
