"""`scripts/decode.py` as its users call it, in this process."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import command
import decode
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import terminal
from flax import nnx

import checkpoints
import jaxspec
from jaxspec import __version__
from tests.jaxspec.models import random_model, score_logits
from tests.tokenizers import byte_tokenizer

KEYS = {
    "id", "text", "token_ids", "num_tokens", "num_steps", "mean_accepted_length",
    "accepted_by_position", "accepted_over_time", "num_drafted", "num_steps_by_rows",
    "finish_reason", "prefill_seconds", "decode_seconds", "tokens_per_second", "compile_seconds",
    "load_seconds", "measure_seconds", "step_costs", "spec", "settings", "model", "device",
    "mesh", "dtype", "version",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a Hugging Face directory with a random model and a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "random-qwen3"
    checkpoints.save(random_model(3, vocab_size=320, tie_word_embeddings=True), path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def run(model_dir, capsys, monkeypatch, tmp_path):
    """Return a function that runs the command: (exit code, standard output, standard error)."""
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)

    def run(*args, model=model_dir):
        capsys.readouterr()
        code = command.run(decode.main, ["--model", str(model), *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_json_of_both_modes_is_equal_but_for_the_steps(run):
    args = ["--prompt", "def f(x):\n", "--max-new-tokens", 40, "--json"]
    (code, out, err), (spec_code, spec_out, _) = run(*args), run(*args, "--spec", "promptlookup")
    (plain,), (spec,) = objects(out), objects(spec_out)
    assert (code, spec_code, err) == (0, 0, "")
    assert set(plain) == set(spec) == KEYS
    assert plain["token_ids"] == spec["token_ids"]
    assert (
        plain["text"]
        == spec["text"]
        == byte_tokenizer().decode(plain["token_ids"], skip_special_tokens=True)
    )
    assert plain["num_steps"] == plain["num_tokens"] == 40
    assert spec["mean_accepted_length"] == spec["num_tokens"] / spec["num_steps"]
    assert len(spec["accepted_by_position"]) == spec["settings"]["num_draft_tokens"] == 7
    assert (plain["spec"], spec["spec"]) == ("none", "promptlookup")
    assert plain["finish_reason"] == "length"
    assert plain["num_drafted"] == 0 and plain["num_steps_by_rows"] == {"1": 40}
    assert spec["num_drafted"] >= sum(spec["accepted_by_position"]) > 0
    assert spec["num_steps_by_rows"] == {"8": spec["num_steps"]}
    assert plain["accepted_over_time"] == [1.0] * 8
    assert len(spec["accepted_over_time"]) == 8 and plain["load_seconds"] > 0
    assert plain["model"] == "random-qwen3" and plain["version"] == __version__
    assert plain["dtype"] == "float32"


def test_several_prompts_make_a_batch_equal_to_each_alone(run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("for i in range(10):\n", encoding="utf-8")
    flags = ["--spec", "promptlookup", "--max-new-tokens", 30, "--json"]
    prompts = [["--prompt", "def f"], ["--prompt-file", file], ["--prompt-ids", "5, 6 7,8"]]
    together = objects(run(*sum(prompts, []), *flags)[1])
    alone = [objects(run(*prompt, *flags)[1])[0] for prompt in prompts]
    assert [row["id"] for row in together] == [0, 1, 2]
    assert [row["token_ids"] for row in together] == [row["token_ids"] for row in alone]


def test_every_flag_reaches_its_setting(run):
    flags = [
        "--spec", "promptlookup", "--num-draft-tokens", 5, "--ngram-size", 4,
        "--min-ngram-size", 2, "--match", "first", "--kernels", "interpret", "--seed", 9,
        "--max-new-tokens", 7, "--max-seq-len", 99, "--dtype", "bfloat16", "--logprobs", 2,
        "--min-new-tokens", 6, "--eos-id", 318, "--eos-id", 319, "--stop", "never",
    ]  # fmt: skip
    code, out, _ = run("--prompt-ids", "1,2,3", *flags, "--json")
    (row,) = objects(out)
    assert code == 0
    expected = {
        "num_draft_tokens": 5, "ngram_size": 4, "min_ngram_size": 2, "match": "first",
        "kernels": "interpret", "seed": 9, "max_new_tokens": 7, "max_seq_len": 99,
        "num_logprobs": 2, "min_new_tokens": 6, "eos_token_ids": [318, 319],
        "stop_strings": ["never"],
    }  # fmt: skip
    assert set(row) == KEYS | {"logprobs", "top_logprobs"}
    assert len(row["logprobs"]) == len(row["top_logprobs"]) == 7
    for token_id, value, best in zip(
        row["token_ids"], row["logprobs"], row["top_logprobs"], strict=True
    ):
        assert best[0] == [token_id, value] and best[0][1] >= best[1][1] and len(best) == 2
    assert expected.items() <= row["settings"].items()
    assert row["dtype"] == "bfloat16" and row["num_tokens"] == 7
    assert len(row["accepted_by_position"]) == 5


def test_text_streams_and_a_table_follows(run):
    args = ["--prompt", "def f(x):\n", "--max-new-tokens", 40, "--spec", "promptlookup"]
    (row,) = objects(run(*args, "--json")[1])
    for flag in ("--stream", "--no-stream"):
        code, out, err = run(*args, flag)
        assert code == 0 and err == ""
        assert out.startswith(row["text"])
        table = out[len(row["text"]) :]
        header, cells = (
            re.search(pattern, table).group().split()
            for pattern in (r"prompt .*tokens/step.*", r" 0 +promptlookup.*")
        )
        shown = dict(zip(header, cells, strict=True))
        assert shown["drafted"] == str(row["num_drafted"])
        assert (shown["tokens"], shown["end"]) == ("40", "length")
        assert shown["tokens/step"] == f"{row['mean_accepted_length']:.2f}"
        assert table.endswith(terminal.acceptance_line(row) + "\n")


def test_compare(run):
    args = ["--prompt", "def f(x):\n", "--max-new-tokens", 30, "--spec", "promptlookup"]
    code, out, _ = run(*args, "--compare", "--json")
    (row,) = objects(out)
    assert code == 0
    assert set(row) == KEYS | {"equal", "speedup", "first_difference"}
    assert row["equal"] is True and row["first_difference"] is None and row["speedup"] > 0
    code, out, _ = run(*args, "--compare")
    assert code == 0 and re.search(r"equal.*speed-up", out) and "yes" in out


def test_compare_exits_with_1_where_a_token_differs(run, monkeypatch):
    original = decode.stats.row_report

    def corrupt(generation, row, **names):
        report = original(generation, row, **names)
        if report["spec"] == "none":
            report["token_ids"] = report["token_ids"][:4] + [0] + report["token_ids"][5:]
        return report

    monkeypatch.setattr(decode.stats, "row_report", corrupt)
    args = ["--prompt", "def f(x):\n", "--max-new-tokens", 30, "--spec", "promptlookup"]
    code, out, _ = run(*args, "--compare", "--json")
    (row,) = objects(out)
    assert code == 1
    assert row["equal"] is False and row["first_difference"]["position"] == 4
    # The logits come from runs that do not differ: what the report says is not theirs.
    assert row["first_difference"]["top2_ids"] is None
    code, out, _ = run(*args, "--compare")
    assert code == 1 and "no, from token 4" in out
    assert f"prompt 0 differs from token 4 on: {row['token_ids'][4]}, plainly 0; " in out
    assert "the runs do not part there" in out


def test_compare_shows_how_near_the_choice_was(run, monkeypatch):
    original, models = jaxspec.stream, {}

    def nudged(model):
        graph, params = nnx.split(model)
        return nnx.merge(graph, jax.tree.map(lambda w: w * 1.1 if w.ndim > 1 else w, params))

    def stream(model, prompts, config, drafter, **options):
        """Decode plainly with another model."""
        if isinstance(drafter, jaxspec.NoDraft):
            model = nudged(model)
        models[type(drafter)] = model
        return original(model, prompts, config, drafter, **options)

    monkeypatch.setattr(decode.jaxspec, "stream", stream)
    ids = [5, 6, 7, 8, 9]
    args = ["--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", 30, "--compare"]
    args += ["--spec", "promptlookup"]
    code, out, _ = run(*args, "--json")
    (row,) = objects(out)
    assert code == 1 and row["equal"] is False
    found = row["first_difference"]
    position, known = found["position"], ids + row["token_ids"][: found["position"]]
    assert found["token_id"] == row["token_ids"][position] == found["top2_ids"][0]
    assert found["reference_token_id"] == found["reference_top2_ids"][0] != found["token_id"]
    line = f"prompt 0 differs from token {position} on: {found['token_id']}, plainly "
    line += f"{found['reference_token_id']}"
    for drafter, prefix, name in (
        (jaxspec.PromptLookup, "", "here"),
        (jaxspec.NoDraft, "reference_", "plainly"),
    ):
        num_valid = models[drafter].config.num_valid_tokens
        logits = np.asarray(
            score_logits(
                models[drafter], jnp.asarray([known]), jaxspec.BlockLayout.linear(len(known))
            )
        )
        logits = logits[0, -1, :num_valid]
        best = np.argsort(-logits, kind="stable")[:2].tolist()
        assert found[f"{prefix}top2_ids"] == best
        np.testing.assert_allclose(found[f"{prefix}top2_logits"], logits[best], atol=1e-4)
        gap = found[f"{prefix}gap"]
        assert gap == pytest.approx(float(logits[best[0]] - logits[best[1]]), abs=1e-4)
        values = found[f"{prefix}top2_logits"]
        line += f"; two best logits {name}: {best[0]} {values[0]:.6g}, {best[1]} {values[1]:.6g}"
        line += f" (gap {gap:.3g})"
    code, out, _ = run(*args)
    assert code == 1 and f"no, from token {position}" in out
    assert out.endswith(line + "\n")


class _Reached(ValueError):
    """Raised with the configuration that reached the library."""


@pytest.mark.parametrize(
    "flags, settings",
    [
        ([], {}),
        (["--ignore-eos"], {"eos_token_ids": ()}),
        (["--eos-id", 5, "--eos-id", 7], {"eos_token_ids": (5, 7)}),
        (["--eos-id", 0], {"eos_token_ids": (0,)}),
        (["--stop", "\n\n", "--stop", "é"], {"stop_strings": ("\n\n", "é")}),
        (["--min-new-tokens", 3], {"min_new_tokens": 3}),
        (["--logprobs", 0], {"num_logprobs": 0}),
        (["--logprobs", 5], {"num_logprobs": 5}),
        (["--seed", 5], {"seed": 5}),
    ],
)
def test_a_flag_sets_its_field_and_no_other(run, monkeypatch, flags, settings):
    reached = []

    def stream(model, prompts, config, drafter, **options):
        reached.append((config, options["tokenizer"]))
        raise _Reached("so far")

    monkeypatch.setattr(decode.jaxspec, "stream", stream)
    code, _, err = run("--prompt", "x", *flags, "--json")
    assert (code, err) == (2, "error: so far\n")
    [(config, tokenizer)] = reached
    assert config == jaxspec.GenerateConfig(**settings)
    assert tokenizer is not None
    _, _, err = run("--prompt", "x", *flags)
    note = "note: --logprobs shows in --json only\n" if "--logprobs" in flags else ""
    assert err == note + "error: so far\n"


STOPPED_ARGS = ["--max-new-tokens", 40, "--prompt"]
STOPS = [
    ("class A:\n", "r p"),
    ("class A:\n", "pr__"),
    ("class A:\n", "r pr____________"),
    ("é漢", ")))\n  "),
    ("é漢", "\n       \n  "),
    ("é漢", "["),
    ("class A:\n", "never"),
]


@pytest.mark.parametrize("spec", ["none", "promptlookup"])
def test_a_stop_string_ends_the_text_and_is_not_shown(run, monkeypatch, spec):
    monkeypatch.setattr(terminal, "print_table", lambda rows: None)
    for prompt, stop in STOPS:
        args = [*STOPPED_ARGS, prompt, "--spec", spec]
        (plain,) = objects(run(*args, "--json")[1])
        (row,) = objects(run(*args, "--stop", stop, "--json")[1])
        is_stopped = stop in plain["text"]
        assert is_stopped == (stop != "never")
        text = plain["text"].split(stop)[0]
        assert row["text"] == text
        assert row["finish_reason"] == ("stop" if is_stopped else "length")
        ids = row["token_ids"]
        assert ids == plain["token_ids"][: len(ids)] and row["num_tokens"] == len(ids)
        if is_stopped:
            assert stop in byte_tokenizer().decode(ids)
            assert stop not in byte_tokenizer().decode(ids[:-1])
        for flags in ([], ["--show-drafts"], ["--no-stream"]):
            code, out, _ = run(*args, "--stop", stop, *flags)
            assert code == 0
            assert out == text + "\n"


def test_rows_of_a_batch_stop_by_themselves(run, monkeypatch):
    monkeypatch.setattr(terminal, "print_table", lambda rows: None)
    args = ["--prompt", "class A:\n", "--prompt", "é漢", "--max-new-tokens", 40]
    stops = ["--stop", "r__", "--stop", ")\n"]
    rows = objects(run(*args, *stops, "--compare", "--json")[1])
    assert [row["finish_reason"] for row in rows] == ["stop", "stop"]
    assert all(row["equal"] for row in rows)
    first, second = (row["text"] for row in rows)
    assert first.endswith("p") and second.endswith(")")
    code, out, _ = run(*args, *stops)
    assert code == 0 and out == f"{first}\n--- prompt 1\n{second}\n"


def test_an_eos_id_ends_the_text_and_is_not_shown(run):
    args = [*STOPPED_ARGS, "é漢", "--json"]
    (plain,) = objects(run(*args)[1])
    eos_id = plain["token_ids"][12]
    (row,) = objects(run(*args, "--eos-id", eos_id)[1])
    end = plain["token_ids"].index(eos_id)
    assert row["finish_reason"] == "eos"
    assert row["token_ids"] == plain["token_ids"][: end + 1]
    assert row["text"] == byte_tokenizer().decode(plain["token_ids"][:end])


def test_what_a_rows_drafts_came_to_in_words():
    row = {
        "id": 2,
        "num_steps": 8,
        "num_drafted": 24,
        "accepted_by_position": [6, 2, 0],
        "accepted_over_time": [1.0, 2.25],
        "num_steps_by_rows": {"4": 8},
        "step_costs": None,
    }
    line = (
        "prompt 2: accepted in % of the steps, by draft position: 75 25 0; "
        "tokens a step over time: 1.0 2.2"
    )
    assert terminal.acceptance_line(row) == line
    row["num_steps_by_rows"] = {"1": 3, "4": 5}
    row["step_costs"] = (1.0, 1.379)
    assert terminal.acceptance_line(row) == (
        line + "; steps by rows: 3 of 1, 5 of 4; cost of a step, none first: 1.00 1.38"
    )


def test_a_difference_in_words():
    found = jaxspec.Difference(7, 3, 4, (3, 4), (1.5, 1.25), 0.25, (4, 3), (2.0, 1.0), None)
    row = {"id": 1, "first_difference": dataclasses.asdict(found)}
    assert terminal.difference_line(row) == (
        "prompt 1 differs from token 7 on: 3, plainly 4; two best logits here: 3 1.5, 4 1.25 "
        "(gap 0.25); two best logits plainly: 4 2, 3 1 (no other could be picked)"
    )


def test_a_flag_that_the_mode_does_not_read_is_named(run):
    code, _, err = run("--prompt", "x", "--max-new-tokens", 2, "--ngram-size", 3)
    assert code == 0 and err == "note: --ngram-size has no effect with --spec none\n"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--spec", "magic"], "'magic' is not one of 'none', 'promptlookup', 'lookahead'"),
        (["--nonsense"], "No such option"),
        (["--max-new-tokens", "0"], "0 is not in the range x>=1"),
        (["--max-new-tokens", "many"], "'many' is not a valid integer"),
        (["--num-draft-tokens", "0", "--spec", "promptlookup"], "0 is not in the range"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--seed", "1", "--seed", "2", "--prompt", "x"], "2 seeds for 1 prompts"),
        (
            ["--spec", "promptlookup", "--num-draft-tokens", "3", "--num-draft-tokens", "5"],
            "--num-draft-tokens is given 2 times: expected one with --spec promptlookup",
        ),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--prompt-file", "missing.txt"], "'missing.txt' does not exist"),
        (["--prompt-ids", "1,x"], "--prompt-ids '1,x': expected integers"),
        (["--prompt-ids", ""], "prompt 0 is empty: expected at least one token"),
        (["--prompt-ids", "5,320"], "prompt 0 holds id 320, expected 0..319"),
        (["--prompt-ids", "-5"], "prompt 0 holds id -5, expected 0..319"),
        (["--prompt", ""], "prompt 0: the prompt is empty"),
        (["--prompt", "x", "--prompt", "\udcff"], "prompt 1: the prompt is not valid UTF-8 text"),
        (["--prompt-ids", "1_0"], "--prompt-ids '1_0': expected integers"),
        (["--kernels", "triton"], "--kernels triton needs a GPU, got 'cpu'"),
        (["--model", ""], "--model is empty: expected a directory or a hub id"),
        (
            ["--spec", "promptlookup", "--num-draft-tokens", "100000000"],
            "block has 100000001 rows, expected at most 4096",
        ),
        (
            ["--spec", "lookahead", "--num-candidates", "3000000000"],
            "rows, expected at most 4096",
        ),
        (["--max-new-tokens", "3000000000"], "max_new_tokens=3000000000 is more than"),
        (["--prompt", "x", "--max-seq-len", "10"], "exceed max_seq_len=10"),
        (["--stop", ""], "stop string 0 is empty: expected at least one character"),
        (
            ["--stop", "a", "--stop", "\udcff"],
            "stop string 1, '\\udcff', is not valid Unicode text",
        ),
        (["--ignore-eos", "--eos-id", "5"], "--ignore-eos and --eos-id contradict each other"),
        (["--eos-id", "320"], "eos_token_ids holds 320, expected 0..319"),
        (["--eos-id", "-1"], "eos_token_ids holds -1, expected 0..319"),
        (["--eos-id", "x"], "'x' is not a valid integer"),
        (["--min-new-tokens", "-1"], "-1 is not in the range x>=0"),
        (
            ["--min-new-tokens", "9", "--max-new-tokens", "8"],
            "min_new_tokens=9 is more than max_new_tokens=8",
        ),
        (["--logprobs", "-1"], "-1 is not in the range 0<=x<=1000"),
        (["--logprobs", "1001"], "1001 is not in the range 0<=x<=1000"),
        (
            ["--logprobs", "295", "--json"],
            "num_logprobs=295 is more than the 294 tokens that there are",
        ),
        (
            ["--spec", "promptlookup", "--ngram-size", "2", "--min-ngram-size", "3"],
            "ngram_size=2 is less than min_ngram_size=3",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, monkeypatch, args, message):
    # Before weights are read, which may take minutes.
    monkeypatch.setattr(checkpoints, "load_weights", lambda *_, **__: pytest.fail("too late"))
    code, out, err = run(*args)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_a_prompt_file_that_is_not_utf8(run, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    code, _, err = run("--prompt-file", file)
    assert code == 2 and "expected UTF-8 text" in err and err.count("\n") == 1


def test_a_model_that_overflows_is_told_and_its_json_is_json(run, tmp_path):
    model = random_model(3, vocab_size=320)
    model.norm.weight[...] *= jnp.inf
    path = tmp_path / "over[bold]flows"
    checkpoints.save(model, path)
    args = ["--prompt-ids", "1,2", "--max-new-tokens", 3]
    code, out, err = run(*args, "--logprobs", 1, "--json", model=path)

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    (row,) = (json.loads(line, parse_constant=refuse) for line in out.splitlines())
    assert code == 0 and row["logprobs"] == [None] * 3
    assert err == (
        "note: log-probabilities that are not finite are null: weights are not finite, or "
        "activations overflow float32\n"
    )
    _, out, _ = run(*args, model=path)
    assert "over[bold]flows, float32" in out


def test_a_missing_model(run, tmp_path):
    code, _, err = run("--prompt", "x", model=tmp_path / "nowhere")
    assert code == 2 and "nowhere" in err and err.count("\n") == 1


def test_text_prompts_need_a_tokenizer(run, tmp_path):
    path = tmp_path / "bare"
    checkpoints.save(random_model(), path)
    assert run("--prompt", "x", model=path)[0] == 2
    code, out, _ = run("--prompt-ids", "1,2", "--max-new-tokens", 3, "--json", model=path)
    assert code == 0 and objects(out)[0]["text"] is None
    code, out, _ = run("--prompt-ids", "1,2", "--max-new-tokens", 3, model=path)
    assert code == 0
    code, _, err = run("--prompt-ids", "1,2", "--stop", "a", model=path)
    assert (code, err) == (
        2,
        "error: --stop needs a tokenizer, which the model directory has not\n",
    )


def test_lookahead_flags_reach_its_settings(run):
    flags = ["--window-size", 3, "--lookahead-ngram-size", 4, "--num-candidates", 2]
    args = ["--prompt", "def f(x):\n", "--max-new-tokens", 30, "--spec", "lookahead", "--json"]
    code, out, err = run(*args, *flags, "--compare")
    (row,) = objects(out)
    assert (code, err) == (0, "") and row["equal"]
    expected = {"window_size": 3, "ngram_size": 4, "num_candidates": 2}
    assert expected.items() <= row["settings"].items()
    assert len(row["accepted_by_position"]) == 3


def test_lookup_and_lookahead_flags_reach_auto(run, monkeypatch):
    reached = []

    def stream(model, prompts, config, drafter, **options):
        reached.append(drafter)
        raise _Reached("so far")

    monkeypatch.setattr(decode.jaxspec, "stream", stream)
    args = ["--prompt", "x", "--json", "--spec", "auto"]
    run(*args)
    widths = ["--num-draft-tokens", 5, "--num-draft-tokens", 2, "--match", "first"]
    run(*args, *widths)
    run(*args, "--num-draft-tokens", 4, "--window-size", 3, "--lookahead-ngram-size", 4)
    assert reached == [
        jaxspec.Auto((3, 7)),
        jaxspec.Auto((2, 5), match="first"),
        jaxspec.Auto((4,), jaxspec.Lookahead(3, 4, 1)),
    ]


def test_what_auto_chose_by_is_told(run):
    args = ["--prompt", "def f(x):\n", "--max-new-tokens", 21, "--spec", "auto", "--compare"]
    code, out, err = run(*args, "--num-draft-tokens", 2, "--json")
    (row,) = objects(out)
    assert (code, err) == (0, "") and row["equal"]
    # The runs that are timed find the costs known: the time is that of the first.
    assert row["measure_seconds"] > 0 and row["compile_seconds"] > 0
    assert len(row["step_costs"]) == 2 and row["step_costs"][0] == 1
    (plain,) = objects(run(*args[:4], "--json")[1])
    assert plain["step_costs"] is None


def test_a_seed_for_each_prompt(run):
    args = ["--max-new-tokens", 20, "--temperature", 1, "--json"]
    prompts = ["--prompt", "def f", "--prompt", "def f"]
    rows = objects(run(*prompts, *args, "--seed", 3, "--seed", 4)[1])
    assert [row["settings"]["seed"] for row in rows] == [3, 4]
    for seed, row in zip((3, 4), rows, strict=True):
        (alone,) = objects(run(*prompts[:2], *args, "--seed", seed)[1])
        assert row["token_ids"] == alone["token_ids"] and alone["settings"]["seed"] == seed
    assert rows[0]["token_ids"] != rows[1]["token_ids"]


@pytest.mark.parametrize("spec", ["none", "promptlookup", "lookahead", "auto"])
def test_show_drafts_colours_what_was_accepted(run, monkeypatch, spec):
    pieces = []
    monkeypatch.setattr(
        terminal.click, "secho", lambda text, nl, fg=None: pieces.append((text, fg))
    )
    args = ["--prompt", "for i in range(3):\n", "--max-new-tokens", 40, "--spec", spec]
    code, out, _ = run(*args, "--show-drafts")
    assert code == 0
    shown = "".join(text for text, _ in pieces)
    (row,) = objects(run(*args, "--json")[1])
    assert shown == row["text"]
    drafted = "".join(text for text, colour in pieces if colour == "green")
    assert bool(drafted) == (sum(row["accepted_by_position"]) > 0)
    assert len(drafted) < len(shown)


def test_version_and_help(run, capsys):
    for flag, text in (("--version", __version__), ("--help", "--spec")):
        assert command.run(decode.main, [flag]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "error, message",
    [
        (MemoryError("no room for embed_tokens"), "error: no room for embed_tokens"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB\nmore"), "out of memory on the"),
        (RuntimeError("Unable to initialize backend 'cuda'"), "JAX cannot use the platform"),
    ],
)
def test_what_a_machine_cannot_do_is_one_line(run, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(decode.jaxspec, "stream", fail)
    code, _, err = run("--prompt", "x")
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_swallowed_interrupt_ends_the_next_chunk(run, monkeypatch):
    monkeypatch.setattr(command, "_was_interrupted", True)
    assert run("--prompt", "x")[0] == 130


def test_interrupt_gives_130(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode.jaxspec, "stream", interrupt)
    code, _, err = run("--prompt", "x")
    assert code == 130 and err.strip() == "interrupted"


PROCESS = """
import sys, threading, time
sys.path.insert(0, {scripts!r})
import click, command

@click.command()
def main():
    {body}

command.leave(command.run(main))
"""


@pytest.mark.parametrize(
    "body, code, err",
    [
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("click.echo('x' * 2**20)", 0, ""),
        ("return 1", 1, ""),
    ],
    ids=["interrupt", "reader_left", "code"],
)
def test_how_a_process_ends(body, code, err):
    """The pipe of standard output is closed from the start."""
    program = PROCESS.format(scripts=str(Path(command.__file__).parent), body=body)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        process.stdout.close()
        assert process.stderr.read().strip() == err
    assert process.returncode == code


def test_the_compilation_cache_is_on_unless_jax_was_told(monkeypatch, tmp_path):
    updates = {}
    monkeypatch.setattr(command.jax.config, "update", updates.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    command.enable_compilation_cache()
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "jaxspec" / "xla")
    updates.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    command.enable_compilation_cache()
    assert updates == {}
