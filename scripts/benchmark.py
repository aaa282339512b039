"""Measure what jaxspec does on this machine.

`python scripts/benchmark.py kernels` times every op of pallas_kernels at real sizes against its
XLA form, and against the time that the device needs to copy as many bytes. Each measurement
prints one JSON line; a table follows.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

OPS = ("find_ngram", "argmax", "argmax_partial", "verify_greedy")
# Constants to try on each op's kernel. None of them changes a result.
BLOCKS, WARPS = (128, 256, 512, 1024, 2048), (1, 2, 4, 8)
SWEEPS: dict[str, list[dict[str, int]]] = {
    "find_ngram": [
        *(dict(block=b, num_warps=w, one_launch_capacity=0) for b, w in product(BLOCKS, WARPS)),
        *(
            dict(block=b, num_warps=w, one_launch_capacity=4096)
            for b, w in product((512, 1024, 2048, 4096), (4, 8, 16))
        ),
    ],
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
def main() -> None:
    """Measure jaxspec on this machine."""


@main.command()
@click.option("--out", type=click.Path(dir_okay=False), help="Append the JSON lines to a file.")
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="Only this op.")
@click.option("--sweep", is_flag=True, help="Also try block sizes and warps on each kernel.")
@click.option("--smoke", is_flag=True, help="Tiny sizes, kernels interpreted: runs anywhere.")
def kernels(out: str | None, ops: tuple[str, ...], sweep: bool, smoke: bool) -> None:
    """Time every kernel against its XLA form.

    A time is the median over runs of a loop of calls inside one jit: what each call adds to it.
    """
    if not smoke and jax.default_backend() != "gpu":
        raise click.UsageError(f"kernels need a GPU, not {jax.default_backend()!r}; try --smoke")
    timer = Timer(num_loops=2, chain=1, num_runs=1) if smoke else Timer()
    machine = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "command": " ".join(["benchmark.py", *sys.argv[1:]]),
    }
    rows = []
    copy_rate = measure_copy_rate(num_bytes=2**20 if smoke else 8 * 10**9)
    rows.append({"op": "device_copy", "gb_per_second": round(copy_rate / 1e9, 1)})
    rows.append({"op": "empty_launch", "us": timer.launch()})
    for row in rows:
        report(row | machine, out)
    for name in ops or OPS:
        for case in cases_of(name, smoke):
            for row in measure_case(timer, name, case, sweep=sweep, smoke=smoke):
                row["copy_us"] = round(row["bytes"] / copy_rate * 1e6, 2)
                rows.append(row)
                report(row | machine, out)
    print_table(rows)


class Timer:
    """Times calls that follow one another in a loop on the device, as decoding makes them."""

    def __init__(self, num_loops: int = 50, chain: int = 4, num_runs: int = 9) -> None:
        self.num_loops = num_loops
        self.chain = chain
        self.num_runs = num_runs

    def call(self, function: Callable[..., Any], arrays: list[jax.Array]) -> tuple[float, Any]:
        """Return microseconds of one call, launches and gaps included, and the call's result.

        The time is what twice as many calls in the loop's body cost more, so the loop itself
        does not count.
        """
        short, result = self._loop(function, arrays, self.chain)
        long, _ = self._loop(function, arrays, 2 * self.chain)
        return round((long - short) / self.chain / self.num_loops * 1e6, 2), result

    def launch(self) -> float:
        """Return microseconds of the smallest operation, its launch included."""
        return self.call(lambda x: jnp.sort(x), [jnp.ones((2,))])[0]

    def _loop(self, function: Callable[..., Any], arrays: Any, chain: int) -> tuple[float, Any]:
        """Time a loop whose body makes `chain` calls, none of which may leave it or be shared.

        The barrier makes each call's inputs depend on the result before it, at no cost.
        """

        def body(_: Any, carry: Any) -> Any:
            arrays, result = carry
            for _ in range(chain):
                arrays, _ = jax.lax.optimization_barrier((arrays, result))
                result = function(*arrays)
            return arrays, result

        @jax.jit
        def loop(*arrays: jax.Array) -> Any:
            shapes = jax.eval_shape(function, *arrays)
            result = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return jax.lax.fori_loop(0, self.num_loops, body, (arrays, result))[1]

        result = jax.block_until_ready(loop(*arrays))
        seconds = []
        for _ in range(self.num_runs):
            start = time.perf_counter()
            jax.block_until_ready(loop(*arrays))
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds), result


def measure_copy_rate(num_bytes: int, num_runs: int = 9) -> float:
    """Return bytes per second, read and written, of a copy on the device."""
    copy = jax.jit(jnp.copy)
    array = jnp.ones((num_bytes // 4,), jnp.float32)
    jax.block_until_ready(copy(array))
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        jax.block_until_ready(copy(array))
        seconds.append(time.perf_counter() - start)
    return 2 * array.nbytes / statistics.median(seconds)


def cases_of(name: str, smoke: bool) -> list[Any]:
    """Return an op's benchmark cases, or one small case."""
    cases = import_module(f"pallas_kernels.{name.removesuffix('_partial')}.cases").CASES
    return [cases[2]] if smoke else [case for case in cases if case.is_benchmark]


def measure_case(
    timer: Timer, name: str, case: Any, *, sweep: bool, smoke: bool
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
        if variant.get("one_launch_capacity", 4096) and getattr(case, "capacity", 0) > 4096:
            continue
        label = f"{kernel} " + " ".join(f"{key}={value}" for key, value in variant.items())
        forms[label] = partial(getattr(triton, name), interpret=smoke, **case.settings(), **variant)
    expected = None
    for form, run in forms.items():
        try:
            us, result = timer.call(run, arrays)
        except jax.errors.JaxRuntimeError as error:
            if " " not in form:  # only a variant may ask for too much of the device
                raise
            click.echo(f"{name} {case.name} {form}: {str(error).splitlines()[0]}", err=True)
            continue
        expected = result if expected is None else expected
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        num_bytes = sum(x.nbytes for x in [*arrays, *jax.tree.leaves(result)])
        yield {"op": name, "case": case.name, "form": form, "us": us, "bytes": num_bytes}


def report(row: dict[str, Any], out: str | None) -> None:
    """Print a measurement as a JSON line, and append it to a file."""
    line = json.dumps(row)
    click.echo(line)
    if out is not None:
        with open(out, "a") as file:
            file.write(line + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line a case: the forms side by side, and the fastest variant of the kernel."""
    columns = ("op", "case", "kernel us", "xla us", "jnp us", "xla/kernel", "copy us", "best")
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
            kernel["copy_us"],
            f"{best['us']} {best['form']}" if best else "-",
        ]
        click.echo("  ".join(f"{cell!s:>12}" for cell in cells))


if __name__ == "__main__":
    main()
