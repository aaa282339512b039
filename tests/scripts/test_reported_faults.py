"""What went wrong in the commands of other decoders, tried on `scripts/decode.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import command
import decode
import pytest

import checkpoints
from tests.jaxspec.models import random_model
from tests.tokenizers import byte_tokenizer

PROMPT = "for i in range(3):\n    print(i)\n"
SPECS = ["none", "promptlookup", "lookahead"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """Return a random model that knows no EOS, with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "endless"
    checkpoints.save(random_model(3, vocab_size=320, num_hidden_layers=1), path)
    byte_tokenizer().save_pretrained(path)
    change_json(path / "tokenizer_config.json", eos_token=None)
    return path


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def run(model_dir, capsys, monkeypatch):
    """Return a function that runs the command and returns what it prints as JSON."""
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)

    def run(*args: object, model: Path = model_dir) -> list[dict]:
        capsys.readouterr()
        flags = ["--model", str(model), "--max-new-tokens", "24", "--json", *map(str, args)]
        code = command.run(decode.main, flags)
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return [json.loads(line) for line in captured.out.splitlines()]

    return run


def test_a_seed_changes_sampled_text_only_and_in_every_mode_alike(run):
    texts = {}
    for spec in SPECS:
        for seed in (0, 1):
            flags = ["--prompt", PROMPT, "--spec", spec, "--temperature", 1, "--seed", seed]
            texts[spec, seed] = run(*flags)[0]["token_ids"]
    for spec in SPECS:
        assert texts[spec, 0] == texts["none", 0] != texts["none", 1] == texts[spec, 1]
    greedy = [run("--prompt", PROMPT, "--seed", seed)[0]["token_ids"] for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    assert greedy[0] not in texts.values()


def test_every_sampling_flag_reaches_its_setting(run):
    settings = {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 5,
    }  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    (row,) = run("--prompt-ids", "5,6,7", *flags)
    assert settings.items() <= row["settings"].items()


def test_the_second_eos_id_of_the_files_ends_a_text(run, model_dir, tmp_path):
    """Prompts of a batch end at different steps; the EOS is an id, but no text."""
    prompts = ["--prompt", PROMPT, "--prompt", "def f(x):", "--spec", "promptlookup"]
    endless = run(*prompts)
    assert [row["finish_reason"] for row in endless] == ["length"] * 2
    eos_id = endless[0]["token_ids"][4]
    ended = tmp_path / "ended"
    checkpoints.convert(model_dir, ended, to="hf")
    change_json(ended / "config.json", eos_token_id=319)
    change_json(ended / "generation_config.json", eos_token_id=[319, eos_id])
    rows = run(*prompts, model=ended)
    for row, whole in zip(rows, endless, strict=True):
        ids = whole["token_ids"]
        end = ids.index(eos_id) + 1 if eos_id in ids else len(ids)
        assert row["token_ids"] == ids[:end] and row["num_tokens"] == end
        assert row["finish_reason"] == ("eos" if eos_id in ids else "length")
        text_ids = ids[:end][: -1 if eos_id in ids else None]
        assert row["text"] == byte_tokenizer().decode(text_ids, skip_special_tokens=True)
        assert row["mean_accepted_length"] == end / row["num_steps"]
    assert rows[0]["finish_reason"] == "eos"


def test_another_process_gives_the_same_tokens(run, model_dir):
    flags = ["--prompt", PROMPT, "--spec", "promptlookup", "--temperature", "1", "--seed", "1"]
    (row,) = run(*flags)
    result = subprocess.run(
        [sys.executable, decode.__file__, "--model", model_dir, "--max-new-tokens=24", "--json"]
        + flags,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert (result.returncode, result.stderr) == (0, "")
    other = json.loads(result.stdout)
    assert other["token_ids"] == row["token_ids"] and other["text"] == row["text"]
    assert other["num_steps"] == row["num_steps"]
