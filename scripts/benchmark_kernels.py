"""The kernels command of the benchmark: every op of pallas_kernels against its XLA form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import click
import command
import jax
import jax.numpy as jnp
from device_time import DeviceTime, device_time, launch_gap
from kernel_calls import FOLDERS, OPS, Call, cases_of, check_equal, make_call
from options import out_option
from rates import measure_copy_rate
from reporting import machine, report

import pallas_kernels

# More bytes than any GPU's cache holds: a product that has read as many finds nothing of its own.
CACHE_BYTES = 120 * 10**6
# Constants to try on each op's kernel. None of them changes a result beyond rounding.
BLOCKS, WARPS = (128, 256, 512, 1024, 2048), (1, 2, 4, 8)
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "find_ngram": [dict(block=b, num_warps=w) for b, w in product(BLOCKS, WARPS)],
    "argmax": [
        dict(block=b, num_warps=w)
        for b, w in product((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16))
    ],
    "verify_greedy": [
        dict(tile=t, num_warps=w) for t, w in product((1024, 2048, 4096, 8192), (1, 2, 4, 8, 16))
    ],
    "top_threshold": [
        dict(block=b, tile=t, bits=n, num_warps=w)
        for b, t, n, w in product((2048, 4096, 8192), (64, 128, 256), (3, 4, 5), (2, 4, 8))
    ],
    "block_attention": [
        dict(row_tile=r, key_tile=k, num_warps=w, num_stages=s)
        for r, k, w, s in product((16, 32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
    ],
}
# (block_n, block_k, num_warps, num_stages, num_programs) of a product.
PRODUCTS = ("rms_linear", "rms_swiglu", "linear_residual")
TILINGS = [
    (n, k, w, s, p)
    for n, (k, s), w, p in product(
        (64, 128),
        ((32, 5), (64, 4), (64, 8), (128, 4), (128, 5), (128, 6), (128, 8)),
        (4, 8),
        (1, 64, 128),
    )
]


def variants_of(name: str) -> list[dict[str, Any]]:
    """Return the constants to try on an op's kernel."""
    if name in PRODUCTS:
        tiling = import_module("pallas_kernels.linear.triton").Tiling
        return [
            dict(tiling=tiling(*sizes))
            for sizes in TILINGS
            if sizes[-1] == 1 or name == "linear_residual"
        ]
    return SWEEPS.get(name, [])


@click.command()
@out_option
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
    rows: list[dict[str, Any]] = []
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


def measure_case(
    name: str, case: Any, gap: float, *, sweep: bool, smoke: bool
) -> Iterator[dict[str, Any]]:
    """Time the forms of one op on one case, then variants of its kernel."""
    call = make_call(name, case)
    kernel = "interpret" if smoke else "triton"
    forms: dict[str, Callable[..., Any]] = {
        "xla": partial(call.run, "xla"),
        kernel: partial(call.run, kernel),
    }
    if name == "argmax" and case.num_valid is None:
        forms["jnp"] = lambda _, logits: (jnp.argmax(logits, -1).astype(jnp.int32), ())
    variants = variants_of(name) if sweep else []
    for variant in variants[:1] if smoke else variants:
        label = f"{kernel} " + " ".join(f"{key}={value}" for key, value in variant.items())
        forms[label] = _variant(name, case, variant, smoke)
    expected = None
    for form, run in forms.items():
        try:
            cost, result = measure_form(call, run, smoke)
        except jax.errors.JaxRuntimeError as error:
            if " " not in form:  # only a variant may ask for too much of the device
                raise
            click.echo(f"{name} {case.name} {form}: {str(error).splitlines()[0]}", err=True)
            continue
        expected = result if expected is None else expected
        check_equal(call, result, expected)
        moved = call.num_bytes
        if moved is None:
            moved = sum(x.nbytes for x in jax.tree.leaves((call.arrays, result)))
        yield {
            "op": name,
            "case": case.name,
            "form": form,
            "us": round(cost.total_us(gap), 2),
            "busy_us": round(cost.busy_us, 2),
            "launches": cost.num_launches,
            "bytes": moved,
        }


def _variant(name: str, case: Any, variant: dict[str, Any], smoke: bool) -> Callable[..., Any]:
    """Return a form of the op's kernel with other constants."""
    triton = import_module(f"pallas_kernels.{FOLDERS[name]}.triton")
    settings = case.settings()
    if name == "rms_linear" and settings["out_dtype"] is None:
        settings["out_dtype"] = case.dtype
    op = partial(getattr(triton, name), interpret=smoke, **settings, **variant)

    def attention(counters: Any, *arrays: Any) -> tuple[Any, Any]:
        *out, counters = op(*arrays, counters)
        return out, counters

    def residual(counters: Any, *arrays: Any) -> tuple[Any, Any]:
        y, scaled, sum_squares, counters = op(*arrays, counters)
        return pallas_kernels.PreNorm(y, arrays[3], scaled, sum_squares), counters

    special = {"block_attention": attention, "linear_residual": residual}
    special |= dict.fromkeys(
        ("rms_linear", "rms_swiglu"), lambda counters, *arrays: op(*arrays, counters)
    )
    return special.get(name, lambda state, *arrays: (op(*arrays), state))


def measure_form(call: Call, run: Callable[..., Any], smoke: bool) -> tuple[DeviceTime, Any]:
    """Return what a call costs the device, on average, and its result on the case's arrays.

    The state is handed from call to call, so that it is updated in place. Calls on streamed arrays
    take turns on so many copies of them that each finds its own in memory.
    """
    num_copies = 1
    if call.is_streamed:
        assert call.num_bytes is not None
        num_copies = 2 if smoke else math.ceil(CACHE_BYTES / max(call.num_bytes, 1))
    copies = [call.arrays, *(jax.tree.map(jnp.copy, call.arrays) for _ in range(num_copies - 1))]
    compiled = jax.jit(run, donate_argnums=0)
    state = jax.tree.map(jnp.copy, call.state)
    result, state = compiled(state, *call.arrays)
    checked = result, jax.tree.map(jnp.copy, state)

    def run_all() -> Any:
        nonlocal state
        for arrays in copies:
            result, state = compiled(state, *arrays)
        return result, state

    cost = device_time(run_all)
    kernels = {kernel: us / num_copies for kernel, us in cost.kernels.items()}
    return DeviceTime(cost.busy_us / num_copies, cost.num_launches / num_copies, kernels), checked


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
