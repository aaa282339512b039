"""`scripts/benchmark.py exactness` as its users call it, in this process."""

from __future__ import annotations

import json

import benchmark
import benchmark_exactness
import command
import pytest

import checkpoints
from jaxspec.runner import Run
from tests.jaxspec.models import random_model
from tests.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a Hugging Face directory with a random model and a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "random-qwen3"
    checkpoints.save(random_model(3, vocab_size=320, num_hidden_layers=1), path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def run(model_dir, capsys, monkeypatch, tmp_path):
    """Return a function that runs the command: (exit code, rows, standard output and error)."""
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)
    file = tmp_path / "few.jsonl"
    entries = [{"id": "f", "prompt": "def f(x):\n"}, {"id": "g", "prompt": "for i in range(3):\n"}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def run(*args):
        capsys.readouterr()
        flags = ["--model", model_dir, "--prompts", file, "--max-new-tokens", "24", *args]
        code = command.run(benchmark.main, ["exactness", *map(str, flags)])
        captured = capsys.readouterr()
        rows = [json.loads(line) for line in captured.out.splitlines() if line.startswith("{")]
        return code, rows, captured.out, captured.err

    return run


def test_float32_is_exact_with_all_kernels(run, tmp_path):
    file = tmp_path / "rows.jsonl"
    flags = ("--kernels", "default,xla", "--promptlookup", "3", "--lookahead", "1,2,1")
    code, rows, out, err = run(*flags, "--out", file)
    assert (code, err) == (0, "")
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    totals = [row for row in rows if row["measure"] == "exactness_total"]
    names = [(row["mode"], row["against"], row["kernels"]) for row in totals]
    assert names == [
        ("promptlookup 3", "same width", "default"),
        ("promptlookup 3", "one row", "default"),
        ("lookahead 1,2,1", "one row", "default"),
        ("promptlookup 3", "same width", "xla"),
        ("promptlookup 3", "one row", "xla"),
        ("lookahead 1,2,1", "one row", "xla"),
        ("none", "kernels default", "xla"),
    ]
    for row in totals:
        assert row["num_tokens"] == row["num_equal"] == 48 and row["num_prompts"] == 2
        assert row["must_be_equal"] and row["num_errors"] == 0 and row["dtype"] == "float32"
    texts = [row for row in rows if row["measure"] == "exactness"]
    assert len(texts) == 14 and all(row["equal"] and row["gap"] is None for row in texts)
    assert "different texts" in out


def test_a_mesh_is_compared_with_one_device(run, monkeypatch):
    real, places = benchmark_exactness.Runner.run, {}

    def changed(self, index, drafter, **options):
        result = real(self, index, drafter, **options)
        place = places.get(self.model.mesh is None)
        if index == 0 or place is None:
            return result
        ids = [*result.token_ids[:place], 7, *result.token_ids[place + 1 :]]
        return Run(ids, result.num_steps, result.accepted_by_position, 0.0)

    monkeypatch.setattr(benchmark_exactness.Runner, "run", changed)
    flags = ("--mesh", "data=2,model=2", "--promptlookup", "3", "--lookahead", "1,2,1")
    code, rows, out, err = run(*flags)
    assert (code, err) == (0, "")
    assert all(row["mesh"] == {"data": 2, "model": 2} for row in rows)
    totals = [row for row in rows if row["measure"] == "exactness_total"]
    modes = ["promptlookup 3", "lookahead 1,2,1"]
    assert [(row["mode"], row["against"]) for row in totals] == [
        (modes[0], "same width"), (modes[0], "one row"), (modes[1], "one row"),
        ("none", "one device"), (modes[0], "one device"), (modes[1], "one device"),
    ]  # fmt: skip
    for row in totals:
        assert row["num_tokens"] == row["num_equal"] == 48 and row["must_be_equal"]

    places[True] = 5  # where the text of one device differs
    code, rows, _, _ = run(*flags)
    assert code == 1
    found = [(row["against"], row["position"]) for row in rows if not row.get("equal", True)]
    assert found == [("one device", 5)] * 3
    assert all(row["gap"] > 0 for row in rows if not row.get("equal", True))


def test_a_difference_has_its_place_ids_and_gap(run, monkeypatch):
    real = benchmark_exactness.Runner.run
    places = {3: 5, 0: 6}  # where the texts of none differ, by the rows fed besides

    def changed(self, index, drafter, **options):
        result = real(self, index, drafter, **options)
        place = places.get(getattr(drafter, "num_padding_rows", None))
        if index == 0 or place is None:
            return result
        ids = [*result.token_ids[:place], 7, *result.token_ids[place + 1 :]]
        return Run(ids, result.num_steps, result.accepted_by_position, 0.0)

    monkeypatch.setattr(benchmark_exactness.Runner, "run", changed)
    monkeypatch.setattr(
        benchmark_exactness,
        "comparisons",
        lambda flags, is_float32, real=benchmark_exactness.comparisons: real(
            flags, is_float32=False
        ),
    )
    code, rows, out, err = run("--promptlookup", "3", "--lookahead", "1,2,1")
    assert (code, err) == (1, "")
    texts = [row for row in rows if row["measure"] == "exactness"]
    assert [row["position"] for row in texts] == [None] * 3 + [5, 6, 6]
    for row in texts[3:]:
        assert row["num_equal"] == row["position"] and not row["equal"]
        assert row["reference_token_id"] == 7 != row["token_id"] and row["gap"] > 0
    totals = [row for row in rows if row["measure"] == "exactness_total"]
    assert [row["num_errors"] for row in totals] == [1, 0, 0]
    assert [row["num_different_texts"] for row in totals] == [1, 1, 1]
    assert "reference token id" in out


def test_a_time_limit_stops_with_what_there_is(run):
    code, rows, out, _ = run("--time-limit", 1e-9, "--limit", 1)
    assert code == 0 and "PARTIAL: the time limit was reached after 0 of 1" in out
    assert all(row["num_prompts"] == 0 for row in rows)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--kernels", "cuda"], "interpret, xla with commas between, got 'cuda'"),
        (["--promptlookup", "3,y"], "expected integers of at least 1 with commas between, got 'y'"),
        (["--lookahead", "1,2"], "--lookahead '1,2': expected three integers W,N,G"),
        (["--lookahead", "1,1,1"], "ngram_size=1 is not at least 2"),
        (["--max-new-tokens", "4000"], "exceed max_seq_len=2048"),
        (["--mesh", "rows=2"], "--mesh 'rows=2': expected data=N,model=M, got 'rows=2'"),
        (["--dp", "16"], "mesh data=16, model=1 needs 16 devices, but there are"),
        (["--limit", "0"], "0 is not in the range x>=1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, args, message):
    code, rows, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err
