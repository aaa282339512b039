"""Continue prompts with Qwen3, speculatively or not: the output is that of plain decoding.

python scripts/decode.py --spec promptlookup
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import command
import jax
import meshes
import terminal
from options import model_option
from reporting import json_line

import checkpoints
import jaxspec
from jaxspec import drafters, stats, text
from jaxspec.request import check_prompts, eos_ids_of

DEFAULT_PROMPT = '''class Matrix:
    """A dense matrix of floats, stored row by row."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        self.num_rows = len(self.rows)
        self.num_columns = len(self.rows[0]) if self.rows else 0
        for row in self.rows:
            if len(row) != self.num_columns:
                raise ValueError("all rows must have the same length")

    def __add__(self, other):
        if self.num_rows != other.num_rows or self.num_columns != other.num_columns:
            raise ValueError("matrices must have the same shape")
        return Matrix(
            [a + b for a, b in zip(left, right)]
            for left, right in zip(self.rows, other.rows)
        )

    def __sub__(self, other):
'''

# Flags that set a field of the drafter of a mode: the flag's parameter and the field.
LOOKUP_FLAGS = {
    "num_draft_tokens": "num_draft_tokens",
    "ngram_size": "ngram_size",
    "min_ngram_size": "min_ngram_size",
    "match": "match",
}
LOOKAHEAD_FLAGS = {
    "window_size": "window_size",
    "lookahead_ngram_size": "ngram_size",
    "num_candidates": "num_candidates",
}
DRAFTER_FLAGS = {
    "promptlookup": LOOKUP_FLAGS,
    "lookahead": LOOKAHEAD_FLAGS,
    "auto": LOOKUP_FLAGS | LOOKAHEAD_FLAGS,
}


Drafting = jaxspec.Drafter | jaxspec.Auto
SAMPLING_FLAGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@model_option
@click.option(
    "--spec",
    type=click.Choice(list(drafters.DRAFTERS)),
    default="none",
    help="How to draft; auto chooses every step.",
)
@click.option(
    "--prompt",
    multiple=True,
    help="Text to continue; several make a batch, in this order: all --prompt, all --prompt-file, "
    "all --prompt-ids.",
)
@click.option(
    "--prompt-file",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="File with one prompt; several make a batch; - reads standard input.",
)
@click.option("--prompt-ids", multiple=True, help="Prompt as token ids, such as 9707,11,1879.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256)
@click.option(
    "--min-new-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens before which no end of text and no stop string counts.",
)
@click.option(
    "--stop",
    multiple=True,
    help="String that ends a text, which is cut before it; repeatable. "
    "Special tokens have no text: for those see --eos-id.",
)
@click.option("--eos-id", type=int, multiple=True, help="Ids that end a text.  [default: model's]")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end of text.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 1000),
    default=None,
    help="Add log-probabilities of the tokens and so many alternatives to --json.",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(min=1),
    default=None,
    help="Longest prompt + output.  [default: the model's max_position_embeddings]",
)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(min=1),
    multiple=True,
    help="promptlookup, auto: tokens drafted a step; for auto repeatable, the widths it chooses "
    "among.  [default: 7 on CPU, 15 on GPU; auto: 3 and 7, 7 and 15]",
)
@click.option(
    "--ngram-size",
    type=click.IntRange(min=1),
    default=None,
    help="promptlookup, auto: longest suffix looked up.  [default: 16]",
)
@click.option(
    "--min-ngram-size",
    type=click.IntRange(min=1),
    default=None,
    help="promptlookup, auto: shortest suffix looked up.  [default: 1]",
)
@click.option(
    "--match",
    type=click.Choice(["first", "last"]),
    default=None,
    help="promptlookup, auto: which of equally long matches.  [default: last]",
)
@click.option(
    "--window-size",
    type=click.IntRange(min=1),
    default=None,
    help="lookahead, auto: columns of the window; with auto each of these three adds lookahead "
    "to what it chooses among.  [default: 1 on CPU, 7 on GPU]",
)
@click.option(
    "--lookahead-ngram-size",
    type=click.IntRange(min=2),
    default=None,
    help="lookahead, auto: tokens of an n-gram.  [default: 2 on CPU, 7 on GPU]",
)
@click.option(
    "--num-candidates",
    type=click.IntRange(min=0),
    default=None,
    help="lookahead, auto: n-grams verified a step.  [default: 1 on CPU, 7 on GPU]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default=None,
    help="Of weights and activations.  [default: float32 on CPU, bfloat16 on GPU]",
)
@click.option(
    "--kernels",
    type=click.Choice(["auto", "triton", "interpret", "xla"]),
    default="auto",
    help="Kernel implementation.",
)
@click.option(
    "--temperature", type=float, default=0.0, help="Divides the logits before a draw; 0: greedy."
)
@click.option("--top-k", type=int, default=0, help="Draw among the k best; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Draw among the best of this mass; 1: all.")
@click.option("--min-p", type=float, default=0.0, help="Least share of the best's; 0: all.")
@click.option("--repetition-penalty", type=float, default=1.0, help="1: off.")
@click.option("--presence-penalty", type=float, default=0.0, help="0: off.")
@click.option("--frequency-penalty", type=float, default=0.0, help="0: off.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    multiple=True,
    default=[0],
    help="Of random streams: one for all prompts, or repeated, one for each.",
)
@meshes.mesh_options
@meshes.process_options
@click.option("--stream/--no-stream", default=True, help="Show text as it comes.")
@click.option("--show-drafts", is_flag=True, help="Colour accepted draft tokens as they come.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@click.option("--compare", is_flag=True, help="Also decode plainly; exit 1 if a token differs.")
@click.version_option(jaxspec.__version__, prog_name="jaxspec")
def main(**flags: Any) -> int:
    """Continue prompts with Qwen3; speculation changes the time, not the text."""
    command.enable_compilation_cache()
    meshes.join_processes(flags)
    prompts = read_prompts(flags["prompt"], flags["prompt_file"], flags["prompt_ids"])
    if flags["kernels"] == "triton" and jax.default_backend() != "gpu":
        raise click.UsageError(f"--kernels triton needs a GPU, got {jax.default_backend()!r}")
    drafter = make_drafter(flags)
    platform = jax.default_backend()
    dtype = flags["dtype"] or ("float32" if platform == "cpu" else "bfloat16")
    model_path = checkpoints.BUNDLED_MODEL if flags["model"] is None else flags["model"]
    config = make_config(flags)
    mesh = meshes.make_mesh(flags)
    started = time.perf_counter()
    checkpoint = checkpoints.open_checkpoint(model_path)
    if config.stop_strings and checkpoint.tokenizer is None:
        raise click.UsageError("--stop needs a tokenizer, which the model directory has not")
    # What cannot be run is refused before weights are read, which may take minutes.
    prompt_ids = encode_prompts(checkpoint.tokenizer, prompts)
    check_prompts(prompt_ids, checkpoint.config, config)
    model = checkpoint.load_model(mesh=mesh, dtype=dtype)
    load_seconds = time.perf_counter() - started
    decoder = Decoder(
        model,
        checkpoint.tokenizer,
        prompt_ids,
        config,
        name=Path(model_path).resolve().name,
        dtype=dtype,
        load_seconds=load_seconds,
    )
    return report(decoder, flags, drafter)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """One model and one set of prompts, to be decoded by one drafter or two."""

    model: jaxspec.Qwen3
    tokenizer: Any
    prompt_ids: Sequence[Sequence[int]]
    config: jaxspec.GenerateConfig
    name: str
    dtype: str
    load_seconds: float

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text and are not shown."""
        return eos_ids_of(self.model.config, self.config)

    def run(
        self,
        spec: str,
        drafter: Drafting,
        *,
        live: bool,
        show_drafts: bool = False,
    ) -> list[dict[str, Any]]:
        """Decode the prompts and return a report a row; `live` prints text as it comes."""
        screen = None
        if live and is_speaker():
            screen = terminal.LiveText(self.tokenizer, self.search, self.prompt_ids)
        # Which tokens were drafts is read off the counts after every single step.
        steps_per_chunk = (1 if show_drafts else 8) if live else None
        for generation in self._stream(self.config, drafter, steps_per_chunk):
            if screen:
                screen.show(generation, show_drafts=show_drafts)
        return [
            stats.row_report(
                generation,
                row,
                spec=spec,
                drafter=drafter,
                config=self.config,
                text=self.text_of(ids) if self.tokenizer else None,
                model=self.name,
                dtype=self.dtype,
                version=jaxspec.__version__,
                load_seconds=self.load_seconds,
                mesh=self.model.mesh,
            )
            for row, ids in enumerate(generation.token_ids)
        ]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of emitted ids, cut before a stop string."""
        return text.decode_until_stop(
            self.tokenizer,
            ids,
            self.config.stop_strings,
            eos_ids=self.eos_ids,
            min_new_tokens=self.config.min_new_tokens,
        )[0]

    def search(self) -> text.StopSearch:
        """Return what turns the ids of a row into its text."""
        return text.StopSearch(
            self.tokenizer,
            self.config.stop_strings,
            eos_ids=self.eos_ids,
            min_new_tokens=self.config.min_new_tokens,
        )

    def differences(self, drafter: Drafting) -> list[Any]:
        """Decode with a drafter and without, keep logits, and return where each row differs."""
        num_logprobs = max(2, self.config.num_logprobs or 0)
        config = dataclasses.replace(self.config, num_logprobs=num_logprobs)
        runs = [[*self._stream(config, each, None)][-1] for each in (drafter, jaxspec.NoDraft())]
        return [jaxspec.first_difference(*runs, row) for row in range(len(self.prompt_ids))]

    def _stream(
        self,
        config: jaxspec.GenerateConfig,
        drafter: Drafting,
        steps_per_chunk: int | None,
    ) -> Iterator[jaxspec.Generation]:
        for generation in jaxspec.stream(
            self.model,
            self.prompt_ids,
            config,
            drafter,
            tokenizer=self.tokenizer,
            steps_per_chunk=steps_per_chunk,
        ):
            command.raise_if_interrupted()
            yield generation


def is_speaker() -> bool:
    """Return whether this process prints: of several, which all have the same texts, one does."""
    return jax.process_index() == 0


def report(decoder: Decoder, flags: dict[str, Any], drafter: Drafting) -> int:
    """Decode as the flags say, print the outcome, return the exit code."""
    spec, as_json = flags["spec"], flags["as_json"]
    live = flags["stream"] and not as_json
    rows = decoder.run(spec, drafter, live=live, show_drafts=flags["show_drafts"])
    if flags["compare"]:
        # Both are timed alike: in one go, and not as the first run, which compiles and warms up.
        decoder.run("none", jaxspec.NoDraft(), live=False)
        timed = decoder.run(spec, drafter, live=False)
        references = decoder.run("none", jaxspec.NoDraft(), live=False)
        is_equal = [
            a["token_ids"] == b["token_ids"] for a, b in zip(timed, references, strict=True)
        ]
        found = [None] * len(rows) if all(is_equal) else decoder.differences(drafter)
        for row, timed_row, reference, place in zip(rows, timed, references, found, strict=True):
            first = {name: row[name] for name in ("compile_seconds", "measure_seconds")}
            row |= timed_row | first
            row |= stats.comparison(row, reference, place)
    if not is_speaker():
        pass
    elif as_json:
        for row in rows:
            click.echo(json_line(row, ensure_ascii=False))
        if any(not math.isfinite(value) for row in rows for value in row.get("logprobs", ())):
            click.echo(
                "note: log-probabilities that are not finite are null: weights are not finite, or "
                f"activations overflow {rows[0]['dtype']}",
                err=True,
            )
    else:
        if not live:
            for row in rows:
                click.echo(row["text"] if row["text"] is not None else row["token_ids"])
        terminal.print_table(rows)
    return 0 if all(row.get("equal", True) for row in rows) else 1


def make_config(flags: dict[str, Any]) -> jaxspec.GenerateConfig:
    """Return what the flags ask for."""
    if flags["ignore_eos"] and flags["eos_id"]:
        raise click.UsageError("--ignore-eos and --eos-id contradict each other")
    if flags["logprobs"] is not None and not flags["as_json"]:
        click.echo("note: --logprobs shows in --json only", err=True)
    for name in ("top_k", "top_p", "min_p"):
        if flags["temperature"] == 0 and flags[name] not in (0, 1.0 if name == "top_p" else 0):
            flag = name.replace("_", "-")
            click.echo(f"note: --{flag} has no effect with --temperature 0", err=True)
    eos_ids = () if flags["ignore_eos"] else flags["eos_id"] or None
    return jaxspec.GenerateConfig(
        max_new_tokens=flags["max_new_tokens"],
        min_new_tokens=flags["min_new_tokens"],
        max_seq_len=flags["max_seq_len"],
        eos_token_ids=eos_ids,
        stop_strings=flags["stop"],
        num_logprobs=flags["logprobs"],
        seed=flags["seed"][0] if len(flags["seed"]) == 1 else flags["seed"],
        **{name: flags[name] for name in SAMPLING_FLAGS},
        kernels=None if flags["kernels"] == "auto" else flags["kernels"],
    )


def read_prompts(
    texts: Sequence[str], files: Sequence[str], ids: Sequence[str]
) -> list[str | list[int]]:
    """Return the prompts of the flags, texts or ids; a built-in one without any."""
    prompts: list[str | list[int]] = [*texts]
    for file in files:
        if file == "-" and sys.stdin is None:
            raise click.UsageError("--prompt-file -: standard input is closed")
        try:
            with click.open_file(file, encoding="utf-8") as stream:
                prompts.append(stream.read())
        except UnicodeDecodeError as error:
            raise click.UsageError(
                f"--prompt-file {file}: expected UTF-8 text, {error.reason}"
            ) from None
    for flag in ids:
        parts = flag.replace(",", " ").split()
        if not all(re.fullmatch(r"-?[0-9]{1,18}", part) for part in parts):
            raise click.UsageError(
                f"--prompt-ids {flag!r}: expected integers separated by commas or spaces"
            )
        prompts.append([int(part) for part in parts])
    return prompts or [DEFAULT_PROMPT]


def encode_prompts(tokenizer: Any, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the ids of every prompt; an error says which one it is about."""
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(text.encode(tokenizer, prompt) if isinstance(prompt, str) else prompt)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return encoded


def make_drafter(flags: dict[str, Any]) -> Drafting:
    """Return the drafter that the flags ask for; say which flags the mode does not read."""
    spec = flags["spec"]
    fields = DRAFTER_FLAGS.get(spec, {})
    given = {name: flags[name] for name in DRAFTER_FLAGS["auto"] if flags[name] not in (None, ())}
    for name in given:
        if name not in fields:
            flag = name.replace("_", "-")
            click.echo(f"note: --{flag} has no effect with --spec {spec}", err=True)
    if flags["show_drafts"] and (flags["as_json"] or not flags["stream"]):
        click.echo("note: --show-drafts has no effect with --json or --no-stream", err=True)
    if "num_draft_tokens" in given:
        widths = given["num_draft_tokens"]
        if spec == "promptlookup" and len(widths) > 1:
            raise click.UsageError(
                f"--num-draft-tokens is given {len(widths)} times: expected one with --spec {spec}"
            )
        given["num_draft_tokens"] = tuple(sorted(set(widths))) if spec == "auto" else widths[0]
    if spec != "auto":
        return drafter_of(spec, given, fields)
    settings = {}
    if given.keys() & LOOKAHEAD_FLAGS.keys():
        settings["lookahead"] = drafter_of("lookahead", given, LOOKAHEAD_FLAGS)
    return drafter_of("auto", given, LOOKUP_FLAGS, **settings)


def drafter_of(
    spec: str, given: dict[str, Any], fields: dict[str, str], **settings: Any
) -> Drafting:
    """Return a mode's drafter with the fields that its flags were given for, and more settings."""
    settings |= {fields[name]: value for name, value in given.items() if name in fields}
    return drafters.make_drafter(spec, platform=jax.default_backend(), **settings)


if __name__ == "__main__":
    command.leave(command.run(main))
