"""`benchmark.py step`: a decode step of the published sizes, against what the device could do."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import command
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import peers
import step_tables
from first_token import compile_prefill, measure_first_token, profile_prefill
from jax.sharding import Mesh
from options import KERNELS, POSITIVE, Duration, dtype_option, integers, kernel_names, out_option
from rates import measure_copy_rate, measure_product_rate, measure_read_rate
from reporting import machine, mesh_sizes, report
from shapes import SHAPES, config_of, key_value_bytes, random_model, weight_bytes
from step_bench import Bench, Program
from step_measures import measure_added, measure_overhead, measure_step, profile_step
from throughput import measure_load, measure_throughput

from jaxspec import Drafter, GenerateConfig, Lookahead, NoDraft, PromptLookup, Qwen3
from jaxspec.drafters import make_drafter
from jaxspec.request import capacity_for
from jaxspec.sharding import data_size, model_size, shard_config

Row = dict[str, Any]
ROWS = "1,8,16,56,64,84,120,128"
# The first is what Qwen3's card recommends in thinking mode.
SAMPLING_SETTINGS: tuple[Row, ...] = (
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.6},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 0.6, "min_p": 0.05},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    {"num_logprobs": 5},
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shape", "shapes", type=click.Choice(SHAPES), multiple=True, default=("8b",))
@click.option(
    "--part-of",
    default="1",
    callback=integers,
    help="Time what one of so many devices that share the model does, alone and on one device: a "
    "step of theirs without what they say to each other. Several with commas.",
)
@click.option("--rows", default=ROWS, callback=integers, help="Widths of the block to time.")
@click.option("--batch", type=POSITIVE, default=1, help="Texts decoded at once.")
@click.option("--capacity", type=POSITIVE, default=2048, help="Slots of text and cache.")
@click.option("--length", type=POSITIVE, default=512, help="Known tokens at the start.")
@click.option("--steps", type=POSITIVE, default=128, help="Steps of one timed call.")
@click.option("--runs", type=POSITIVE, default=7, help="Timed calls; figures are medians.")
@click.option(
    "--kernels",
    default="default",
    callback=kernel_names,
    help=f"Implementations to compare, of {', '.join(KERNELS)}.",
)
@dtype_option
@click.option("--step/--no-step", "is_timed", default=True, help="Time the steps of --rows.")
@click.option(
    "--profile",
    is_flag=True,
    help="Also list kernels by device time: of a step; with --ttft of prefill.",
)
@click.option("--overhead", is_flag=True, help="Also time the drafters' loops less the forward.")
@click.option(
    "--sampling", is_flag=True, help="Also time what sampling settings add to promptlookup's step."
)
@click.option("--auto", is_flag=True, help="Also time the steps that auto chooses among.")
@click.option("--compile", "is_cold", is_flag=True, help="Also compile cold: no cache is used.")
@click.option("--ttft", is_flag=True, help="Also time prefill and first step of a prompt.")
@click.option("--prompt-tokens", type=POSITIVE, default=4096, help="Of the prompt of --ttft.")
@click.option(
    "--throughput",
    type=POSITIVE,
    default=None,
    help="Also decode so many prompts of --length tokens at once, --steps new tokens each.",
)
@click.option(
    "--load",
    type=click.Path(exists=True, file_okay=False),
    default=None,
    help="Also load the weights of a directory: time, and memory of a device.",
)
@meshes.mesh_options
@click.option("--peers", "has_peers", is_flag=True, help="Also time transformers on PyTorch.")
@click.option(
    "--jobs",
    type=POSITIVE,
    default=None,
    help="Programs compiled side by side.  [default: 1 with --compile, else up to 4]",
)
@click.option(
    "--time-limit",
    type=Duration(),
    default=None,
    help="Start nothing new after so many seconds; transformers is stopped then.",
)
@out_option
def step(**flags: Any) -> int:
    """Time a decode step of random models, in the product's own loop.

    "of copy" and "of read" compare with the time that the device takes to copy or to read as many
    bytes as the step reads weights. On a mesh bytes, rates and shares are those of one device. A
    measurement that fails is a row with "error", and makes the exit code 1.
    """
    if flags["length"] + flags["steps"] > flags["capacity"]:
        raise click.UsageError(
            f"--length {flags['length']} and --steps {flags['steps']}: expected at most "
            f"--capacity {flags['capacity']} together, got {flags['length'] + flags['steps']}"
        )
    if any(flags[name] is not None for name in ("mesh", "tp", "dp")):
        for name, flag in (("overhead", "--overhead"), ("has_peers", "--peers")):
            if flags[name]:
                raise click.UsageError(f"{flag} is of one device: leave out --mesh, --tp and --dp")
        if flags["part_of"] != (1,):
            raise click.UsageError("--part-of is of one device: leave out --mesh, --tp and --dp")
    if flags["has_peers"]:
        for name in ("torch", "transformers"):
            if importlib.util.find_spec(name) is None:
                raise click.UsageError(f"--peers needs {name}, which is not installed")
        # Before JAX starts: it would take most of the memory for itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    mesh = meshes.make_mesh(flags)
    for shape in flags["shapes"]:
        for num_shards in (model_size(mesh), *flags["part_of"]):
            try:
                shard_config(config_of(shape), num_shards)
            except ValueError as error:
                raise click.UsageError(f"--shape {shape}: {error}") from None
    if not flags["is_cold"]:
        command.enable_compilation_cache()
    elif jax.config.jax_compilation_cache_dir is not None:
        jax.config.update("jax_enable_compilation_cache", False)
    return StepBenchmark(flags, mesh).run()


class StepBenchmark:
    """One run of the benchmark: what to measure, and what was measured so far."""

    def __init__(self, flags: Row, mesh: Mesh | None) -> None:
        self.flags, self.rows, self.num_skipped = flags, [], 0
        self.mesh = mesh
        self.started = time.monotonic()
        self.where = {"mesh": mesh_sizes(mesh)} | machine()
        self.is_gpu = jax.default_backend() == "gpu"
        self.dtype = flags["dtype"] or ("bfloat16" if self.is_gpu else "float32")
        self.rates: dict[str, float] = {}

    def run(self) -> int:
        """Measure what the flags ask for, print the tables, and return the exit code."""
        names = ("batch", "capacity", "length")
        common = {name: self.flags[name] for name in names} | {"dtype": self.dtype}
        if self.flags["load"] is not None:
            # First of all: what comes before would be part of the peak of memory.
            name = {"measure": "load", "model": Path(self.flags["load"]).resolve().name}
            path, dtype = self.flags["load"], jnp.dtype(self.dtype)
            self.measure(name | {"dtype": self.dtype}, measure_load, path, dtype, self.mesh)
        if self.flags["has_peers"]:
            for shape in self.flags["shapes"]:
                self.measure_peers({"shape": shape} | common)
        self.measure_rates()
        for shape in self.flags["shapes"]:
            for part_of in self.flags["part_of"]:
                self.measure_shape({"shape": shape, "part_of": part_of} | common)
                gc.collect()  # the weights, before those of the next shape are made
        step_tables.print_tables(self.rows)
        if self.num_skipped:
            click.echo(f"PARTIAL: the time limit left {self.num_skipped} measurements out")
        return int(any("error" in row for row in self.rows))

    def say(self, row: Row) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        report(step_tables.rounded(row) | self.where, self.flags["out"])

    def attempt(self, label: Row, function: Callable[[], Any]) -> Any:
        """Return the function's result; None where it fails, which is reported, or is too late."""
        limit = self.flags["time_limit"]
        if limit is not None and time.monotonic() - self.started > limit:
            self.num_skipped += 1
            return None
        try:
            return function()
        except Exception as error:  # whatever it was: the rest is worth measuring
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.say(label | {"error": message})
            click.echo(f"{step_tables.name_of(label)}: {message}", err=True)
            return None

    def measure(self, label: Row, function: Callable[..., Row], *args: Any, **options: Any) -> None:
        """Report a row: the label and what the function returns."""
        row = self.attempt(label, lambda: function(*args, **options))
        if row is not None:
            self.say(label | row)

    def measure_rates(self) -> None:
        """Report what the device copies, reads and multiplies in a second."""
        num_bytes = 8 * 10**9 if self.is_gpu else 2**24
        rates: dict[str, Callable[[], float]] = {
            "copy_rate": lambda: measure_copy_rate(num_bytes),
            "read_rate": lambda: measure_read_rate(num_bytes),
        }
        if self.flags["ttft"]:
            size = 8192 if self.is_gpu else 256
            rates["product_rate"] = lambda: measure_product_rate(size, jnp.dtype(self.dtype))
        for name, measure in rates.items():
            rate = self.attempt({"measure": name}, measure)
            if rate is not None:
                self.rates[name] = rate
                unit = "teraflops" if name == "product_rate" else "gb_per_second"
                self.say({"measure": name, unit: rate / (1e12 if unit == "teraflops" else 1e9)})

    def measure_peers(self, label: Row) -> None:
        """Report transformers' times of a shape, made in a process of its own."""
        label = {"measure": "peer"} | label
        limit = self.flags["time_limit"]
        left = None if limit is None else limit - (time.monotonic() - self.started)

        def measure() -> None:
            for row in peers.run_apart(label | {"num_steps": self.flags["steps"]}, left):
                if "error" in row:
                    click.echo(f"{step_tables.name_of(label | row)}: {row['error']}", err=True)
                self.say(label | row)

        self.attempt(label, measure)

    def measure_shape(self, label: Row) -> None:
        """Report all that is asked about one shape."""
        started = time.perf_counter()
        config, dtype = config_of(label["shape"]), jnp.dtype(self.dtype)

        def make_model() -> Qwen3:
            config_of_part = shard_config(config, label["part_of"])
            return jax.block_until_ready(random_model(config_of_part, dtype, mesh=self.mesh))

        model = self.attempt({"measure": "model"} | label, make_model)
        if model is None:
            return
        config = model.config
        num_bytes = weight_bytes(model)
        seconds = time.perf_counter() - started
        self.say({"measure": "model", "weight_bytes": num_bytes, "seconds": seconds} | label)
        if self.flags["throughput"] is not None:
            # Before the bench has a cache, which would be in the way of these texts'.
            self.measure_texts(model, label)
        # Of the device that has most of the texts.
        texts = -(-self.flags["batch"] // data_size(self.mesh))
        kv_bytes = key_value_bytes(
            config,
            texts * self.flags["length"],
            dtype.itemsize,
            num_shards=model_size(self.mesh),
        )
        label = label | {"weight_bytes": num_bytes, "kv_bytes": kv_bytes}
        bench = Bench(
            model,
            batch_size=self.flags["batch"],
            capacity=self.flags["capacity"],
            length=self.flags["length"],
        )
        if self.flags["is_timed"] or self.flags["profile"] or self.flags["is_cold"]:
            widths = [NoDraft(num_padding_rows=rows - 1) for rows in self.flags["rows"]]
            self.measure_loops(bench, label, widths, self.measure_width)
        if self.flags["overhead"]:
            drafters = [PromptLookup(7), Lookahead(7, 5, 7)]
            self.measure_loops(bench, label, drafters, self.measure_drafter)
        for kernels in self.flags["kernels"]:
            if self.flags["sampling"]:
                self.measure_sampling(bench, label | {"kernels": kernels or "default"}, kernels)
            if self.flags["auto"]:
                self.measure_arms(bench, label | {"kernels": kernels or "default"}, kernels)
            self.measure_prefill(bench, label | {"kernels": kernels or "default"}, kernels)

    def measure_texts(self, model: Qwen3, label: Row) -> None:
        """Report the tokens per second of many texts at once."""
        num_prompts, steps = self.flags["throughput"], self.flags["steps"]
        capacity = capacity_for(self.flags["length"] + steps)
        label = {"measure": "throughput"} | label | {"batch": num_prompts, "capacity": capacity}
        for kernels in self.flags["kernels"]:
            for spec in ("none", "promptlookup"):
                drafter = make_drafter(spec, platform=jax.default_backend())
                name = {"rows": drafter.layout.num_rows, "kernels": kernels or "default"}
                self.measure(
                    label | name | {"drafter": spec},
                    measure_throughput,
                    model,
                    drafter,
                    num_prompts=num_prompts,
                    prompt_tokens=self.flags["length"],
                    new_tokens=steps,
                    kernels=kernels,
                    num_runs=self.flags["runs"],
                )

    def measure_loops(
        self,
        bench: Bench,
        label: Row,
        drafters: Iterable[Drafter],
        measure: Callable[[Bench, Row, Program], None],
    ) -> None:
        """Compile the loops of drafters, some side by side, and measure each."""
        jobs = self.flags["jobs"] or (
            1 if self.flags["is_cold"] else min(4, max(1, (os.cpu_count() or 1) // 2))
        )
        wanted = []
        for drafter in drafters:
            for kernels in self.flags["kernels"]:
                name = {"rows": drafter.layout.num_rows, "kernels": kernels or "default"}
                spec = "none" if isinstance(drafter, NoDraft) else type(drafter).__name__.lower()
                wanted.append((label | name | {"drafter": spec}, drafter, kernels))
        for start in range(0, len(wanted), jobs):
            batch = wanted[start : start + jobs]
            with ThreadPoolExecutor(jobs) as pool:
                programs = list(pool.map(lambda entry: self.compiled(bench, *entry), batch))
            for (name, _, _), program in zip(batch, programs, strict=True):
                if program is not None:
                    measure(bench, name, program)

    def compiled(
        self, bench: Bench, label: Row, drafter: Drafter, kernels: str | None
    ) -> Program | None:
        """Return the compiled loop, or None where it does not compile."""
        label = {"measure": "compile", "program": "run_steps"} | label
        program = self.attempt(label, lambda: bench.compile(drafter, kernels))
        if program is not None and self.flags["is_cold"]:
            times = (program.lower_seconds, program.compile_seconds)
            self.say(label | dict(zip(("lower_seconds", "compile_seconds"), times, strict=True)))
        return program

    def measure_width(self, bench: Bench, label: Row, program: Program) -> None:
        """Report the time of a step of one width, and its kernels."""
        steps = self.flags["steps"]
        if self.flags["is_timed"]:
            name = {"measure": "step"} | label
            options = {"num_steps": steps, "num_runs": self.flags["runs"]}
            self.measure(name, lambda: self.timed_step(bench, label, program, **options))
        if self.flags["profile"]:
            name = {"measure": "profile"} | label
            self.measure(name, profile_step, bench, program, num_steps=min(steps, 8))

    def timed_step(self, bench: Bench, label: Row, program: Program, **options: int) -> Row:
        """Return the time of a step, and its shares of the device's rates."""
        row = measure_step(bench, program, **options)
        return row | self.shares(label, row["ms"])

    def shares(self, label: Row, milliseconds: float) -> Row:
        """Return bytes per second of a step, and its shares of the device's rates."""
        weights, both = label["weight_bytes"], label["weight_bytes"] + label["kv_bytes"]
        result = {"gb_per_second": weights / milliseconds / 1e6}
        result["gb_per_second_with_kv"] = both / milliseconds / 1e6
        for name, rate in self.rates.items():
            if name != "product_rate":
                share = f"share_of_{name.removesuffix('_rate')}"
                result[share] = weights / rate / milliseconds * 1e3
                result[f"{share}_with_kv"] = both / rate / milliseconds * 1e3
        return result

    def measure_drafter(self, bench: Bench, label: Row, program: Program) -> None:
        """Report what a drafter's loop costs beside the forward."""
        name = {"measure": "overhead"} | label
        options = {"num_steps": self.flags["steps"], "num_runs": self.flags["runs"]}
        self.measure(name, measure_overhead, bench, program, **options)

    def measure_sampling(self, bench: Bench, label: Row, kernels: str | None) -> None:
        """Report what settings of sampling, and log-probabilities, add to a step of 8 rows."""
        drafter = PromptLookup(7)
        label = {"measure": "sampling", "rows": drafter.layout.num_rows} | label
        plain = self.attempt(label, lambda: bench.compile(drafter, kernels))
        for settings in SAMPLING_SETTINGS if plain is not None else ():
            config = GenerateConfig(**settings)
            name = label | {"settings": " ".join(f"{key} {settings[key]}" for key in settings)}
            self.measure_against(name, bench, drafter, kernels, plain, config)

    def measure_arms(self, bench: Bench, label: Row, kernels: str | None) -> None:
        """Report the steps that `Auto` chooses among, beside those of plain decoding."""
        drafter = make_drafter("auto", platform=jax.default_backend())
        label = {"measure": "auto"} | label
        plain = self.attempt(label, lambda: bench.compile(NoDraft(), kernels))
        chosen = self.attempt(label, lambda: bench.compile(drafter, kernels))
        if plain is None or chosen is None:
            return
        for index, arm in enumerate(drafter.arms):
            costs = np.full(len(drafter.arms), 1e6)
            costs[index] = 1e-6
            request = bench.with_step_costs(chosen.request, costs)
            forced = dataclasses.replace(chosen, request=request)
            options = {"num_steps": self.flags["steps"], "num_runs": self.flags["runs"]}
            self.measure(
                label | {"rows": arm.layout.num_rows, "compile_seconds": chosen.compile_seconds},
                measure_added, bench, forced, plain, **options,
            )  # fmt: skip

    def measure_against(
        self,
        label: Row,
        bench: Bench,
        drafter: Drafter,
        kernels: str | None,
        plain: Program,
        config: GenerateConfig,
    ) -> None:
        """Report what a configuration adds to the step of a program."""
        program = self.attempt(label, lambda: bench.compile(drafter, kernels, config))
        if program is not None:
            options = {"num_steps": self.flags["steps"], "num_runs": self.flags["runs"]}
            self.measure(label, measure_added, bench, program, plain, **options)

    def measure_prefill(self, bench: Bench, label: Row, kernels: str | None) -> None:
        """Report compilation of the prefill, and the time to the first token."""
        if self.flags["is_cold"]:
            name = {"measure": "compile", "program": "prefill"} | label
            self.measure(name, compile_prefill, bench, kernels)
        if self.flags["ttft"] and "product_rate" in self.rates:
            self.measure(
                {"measure": "ttft"} | label,
                measure_first_token,
                bench.model,
                prompt_tokens=self.flags["prompt_tokens"],
                kernels=kernels,
                product_rate=self.rates["product_rate"],
                num_runs=self.flags["runs"],
            )
        if self.flags["ttft"] and self.flags["profile"]:
            self.measure(
                {"measure": "profile", "program": "prefill"} | label,
                profile_prefill,
                bench.model,
                prompt_tokens=self.flags["prompt_tokens"],
                kernels=kernels,
            )
