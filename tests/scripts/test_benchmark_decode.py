"""`scripts/benchmark.py decode` as its users call it, in this process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
from pathlib import Path

import benchmark
import benchmark_decode
import command
import jax
import plotting
import pytest

import checkpoints
import jaxspec
from jaxspec import evaluation, tuning
from jaxspec.drafters import DRAFTERS, make_drafter
from tests.jaxspec.models import random_model
from tests.tokenizers import byte_tokenizer

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
KEYS = {
    "measure", "id", "kind", "file", "prompt_tokens", "spec", "settings", "num_tokens",
    "num_steps", "mean_accepted_length", "accepted_by_position", "periodic_from", "loops",
    "counted_tokens", "counted_steps", "counted_accepted_length", "counted_by_position", "seconds",
    "all_seconds", "counted_seconds", "equal", "first_difference", "gap_at_difference",
    "tokens_per_second", "speedup", "counted_tokens_per_second", "counted_speedup", "verdict",
    "smallest_gap", "mesh", "device", "jax", "command", "model", "dtype", "prompts",
    "max_new_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a Hugging Face directory with a random model and a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "random-qwen3"
    checkpoints.save(random_model(3, vocab_size=320, num_hidden_layers=1), path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "few.jsonl"
    entries = [{"id": "f", "prompt": "def f(x):\n"}, {"id": "g", "prompt": "for i in range(3):\n"}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


@pytest.fixture
def run(model_dir, capsys, monkeypatch, prompts):
    """Return a function that runs the command: (exit code, standard output, standard error)."""
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)

    def run(*args, model=model_dir, prompts=prompts):
        capsys.readouterr()
        flags = ["--model", str(model), "--max-new-tokens", "40", "--repeats", "1"]
        code = command.run(
            benchmark.main, ["decode", *flags, "--prompts", str(prompts), *map(str, args)]
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def objects(out):
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_rows_groups_and_table(run, tmp_path):
    file = tmp_path / "rows.jsonl"
    code, out, err = run("--out", file)
    assert (code, err) == (0, "")
    rows = objects(out)
    assert rows == objects(file.read_text())
    measured = [row for row in rows if row["measure"] == "prompt"]
    assert [(row["id"], row["spec"]) for row in measured] == [
        (name, spec) for name in "fg" for spec in DRAFTERS
    ]
    for row in measured:
        assert set(row) == KEYS
        assert row["equal"] and row["num_tokens"] == 40 and row["smallest_gap"] > 0
        assert row["model"] == "random-qwen3" and row["dtype"] == "float32"
        assert row["jax"] == jax.__version__ and row["mesh"] is None
        assert row["file"] == row["kind"] == "few" and row["prompts"] == ["few.jsonl"]
    groups = [row for row in rows if row["measure"] == "group"]
    assert [row["group"] for row in groups] == ["few"] * 4 + ["all"] * 4
    assert not any(row["partial"] for row in groups)
    assert "all prompts" in out and "verdict" in out and "PARTIAL" not in out
    assert "smallest gap between the two best logits, float32" in out


def test_ids_of_prompts_are_text(run, tmp_path):
    """Brackets and colons are no markup of the table."""
    ids = ["a[/b]", "list[int] x", ":bug:"]
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": "def f(x):\n"}) + "\n" for i in ids))
    code, out, err = run("--max-new-tokens", 4, prompts=file)
    assert (code, err) == (0, "")
    table = "".join(line for line in out.splitlines() if not line.startswith("{"))
    assert all(i in table for i in ids)


def test_sweep_and_cost(run, monkeypatch):
    monkeypatch.setattr(tuning, "LOOKUP_NGRAMS", ((4, 1),))
    monkeypatch.setattr(tuning, "LOOKUP_DRAFTS", (1, 2))
    monkeypatch.setattr(tuning, "LOOKAHEADS", ((2, 3, 2),))
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (1, 4))
    code, out, err = run("--sweep", "--cost")
    assert (code, err) == (0, "")
    rows = objects(out)
    sweep = [row for row in rows if row["measure"] == "sweep"]
    assert len(sweep) == 4 and all(row["break_even_length"] > 0 for row in sweep)
    best = [row for row in rows if row["measure"] == "sweep_best"]
    assert [row["spec"] for row in best] == ["promptlookup", "lookahead"]
    assert not any(row["partial"] for row in best)
    assert [row["rows_per_step"] for row in rows if row["measure"] == "cost"] == [1, 4]
    num_rows = make_drafter("lookahead", platform=jax.default_backend()).layout.num_rows
    assert f"lookahead: {num_rows} rows, breaks even at" in out


def test_decoding_on_a_mesh(run, monkeypatch):
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (1, 4))
    flags = ("--mesh", "data=2,model=2", "--spec", "promptlookup", "--cost")
    code, out, err = run(*flags)
    assert (code, err) == (0, "")
    rows = objects(out)
    assert all(row["mesh"] == {"data": 2, "model": 2} for row in rows)
    measured = [row for row in rows if row["measure"] == "prompt"]
    assert [row["spec"] for row in measured] == ["none", "promptlookup"] * 2
    assert all(row["equal"] and row["num_tokens"] == 40 for row in measured)
    assert all(row["smallest_gap"] > 0 for row in measured)
    assert [row["rows_per_step"] for row in rows if row["measure"] == "cost"] == [1, 4]


def test_a_difference_on_a_mesh_has_a_gap(run, monkeypatch):
    real = benchmark_decode.Runner.run

    def changed(self, index, drafter, **options):
        result = real(self, index, drafter, **options)
        if isinstance(drafter, jaxspec.NoDraft):
            return result
        ids = [*result.token_ids[:5], (result.token_ids[5] + 1) % 320, *result.token_ids[6:]]
        return dataclasses.replace(result, token_ids=ids)

    monkeypatch.setattr(benchmark_decode.Runner, "run", changed)
    code, out, _ = run("--tp", 2, "--spec", "promptlookup")
    rows = [row for row in objects(out) if row.get("id") and row["spec"] == "promptlookup"]
    assert code == 0 and [row["first_difference"] for row in rows] == [5, 5]
    assert all(row["gap_at_difference"] > 0 for row in rows)


def test_a_time_limit_stops_with_what_there_is(run):
    code, out, err = run("--sweep", "--spec", "promptlookup", "--time-limit", 0.001)
    assert (code, err) == (0, "") and objects(out) == []
    assert "PARTIAL: the time limit was reached after 0 of 2 prompts" in out


def test_settings_of_the_modes(run):
    flags = ["--spec", "promptlookup", "--promptlookup", "2,5,3", "--time-limit", 100]
    code, out, _ = run(*flags)
    row = next(row for row in objects(out) if row["spec"] == "promptlookup")
    assert code == 0 and {row["spec"] for row in objects(out)} == {"none", "promptlookup"}
    expected = {"num_draft_tokens": 2, "ngram_size": 5, "min_ngram_size": 3}
    assert row["settings"] == row["settings"] | expected


def test_settings_of_a_mode_that_is_not_measured(run):
    code, _, err = run("--promptlookup", "3,2,1", "--spec", "none", "--time-limit", 0.001)
    assert code == 0
    assert err == "note: --promptlookup has no effect without --spec promptlookup\n"


def test_version(capsys):
    assert command.run(benchmark.main, ["--version"]) == 0
    assert capsys.readouterr().out == f"jaxspec, version {jaxspec.__version__}\n"


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="no matplotlib")
def test_the_plot(run, tmp_path):
    file = tmp_path / "plot.png"
    assert run("--spec", "promptlookup", "--plot", file)[0] == 0
    data = file.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:4] == b"\x89PNG" and width > 1000 and height > 300 and len(data) > 10_000


@pytest.mark.parametrize(
    "args, message",
    [
        (["--spec", "magic"], "'magic' is not one of 'none', 'promptlookup'"),
        (["--max-new-tokens", "0"], "0 is not in the range x>=1"),
        (["--max-new-tokens", "4000"], "exceed max_seq_len=2048"),
        (["--promptlookup", "3,x,1"], "--promptlookup '3,x,1': expected three integers"),
        (["--promptlookup", "3,2"], "expected three integers"),
        (["--lookahead", "1,1,1"], "ngram_size=1 is not at least 2"),
        (["--tp", "2", "--mesh", "model=2"], "--mesh and --tp or --dp contradict each other"),
        (["--tp", "3"], "num_attention_heads=4 is not a multiple of the mesh's model=3"),
        (["--plot", "plot.svg"], "expected a file name that ends in .png"),
        (["--plot", "nowhere/plot.png"], "the directory does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, args, message):
    code, out, err = run(*args)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_bad_files(run, tmp_path):
    code, _, err = run(prompts=tmp_path / "missing.jsonl")
    assert code == 2 and "missing.jsonl' does not exist" in err and err.count("\n") == 1
    broken = tmp_path / "broken.jsonl"
    broken.write_text("[]")
    code, _, err = run(prompts=broken)
    assert code == 2 and "line 1: expected an object" in err and err.count("\n") == 1
    code, _, err = run(model=tmp_path / "nowhere")
    assert code == 2 and "nowhere" in err and err.count("\n") == 1


def test_a_plot_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda name: None)
    code, out, err = run("--plot", tmp_path / "plot.png")
    assert code == 2 and out == ""
    assert err == "error: --plot needs matplotlib: pip install -e '.[plot]'\n"


def test_the_prompts_of_the_tree():
    for name in ("python", "edits"):
        prompts = evaluation.read_prompts(PROMPTS / f"{name}.jsonl")
        assert len(prompts) == len({prompt.id for prompt in prompts}) == 8
        assert all(350 <= len(prompt.text) <= 1600 for prompt in prompts)
    assert {prompt.kind for prompt in prompts} == {"edit", "repeat", "table", "docstring"}
