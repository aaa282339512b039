"""`scripts/convert.py` as its users call it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import command
import convert
import huggingface_hub
import pytest

import checkpoints
from tests.checkpoints.converting import contents, write_checkpoint
from tests.helpers import make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("source") / "model", max_shard_bytes=20_000)
    make_tokenizer(path)
    return path


@pytest.fixture
def run(capsys):
    """Return a function that runs the command: (exit code, standard output, standard error)."""

    def run(*args):
        capsys.readouterr()
        code = command.run(convert.main, [str(argument) for argument in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_there_and_back(run, source, tmp_path):
    code, out, err = run(source, tmp_path / "converted")
    assert (code, err) == (0, "")
    line = rf"{tmp_path}/converted: 25 tensors, 0\.1 MB, bfloat16, in \d+\.\d s\n"
    assert re.fullmatch(line, out)
    code, _, err = run(
        tmp_path / "converted", tmp_path / "back", "--to", "hf", "--max-shard-size", "20KB"
    )
    assert (code, err) == (0, "")
    assert contents(tmp_path / "back") == contents(source) == contents(tmp_path / "converted")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


def test_dtype_and_overwrite(run, source, tmp_path):
    run(source, tmp_path / "out")
    code, out, _ = run(source, tmp_path / "out", "--dtype", "float32", "--overwrite")
    assert code == 0 and ", float32, in " in out
    model, tokenizer = checkpoints.load(tmp_path / "out")
    assert model.dtype == "float32" and len(tokenizer) == 21
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["{source}", "{source}"], "{source}: source and destination are the same directory"),
        (["{tmp}/none", "{tmp}/out"], "{tmp}/none: no such directory"),
        (["{source}", "{tmp}"], "{tmp}: exists and is not an empty directory"),
        (
            ["{source}", "{tmp}", "--overwrite"],
            "{tmp}: has no config.json, so it is no checkpoint and is not overwritten",
        ),
        (["{source}"], "Missing argument 'DST'."),
        (
            ["{source}", "{tmp}/out", "--to", "gguf"],
            "Invalid value for '--to': 'gguf' is not one of 'orbax', 'hf'.",
        ),
        (
            ["{source}", "{tmp}/out", "--max-shard-size", "5X"],
            "Invalid value for '--max-shard-size': '5X' is no size such as 5GB, 300MB or 1000000",
        ),
        (
            ["{source}", "{tmp}/out", "--max-shard-size", "0"],
            "max_shard_bytes=0 is not at least 1",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, source, tmp_path, args, reason):
    (tmp_path / "taken").touch()
    values = {"source": source, "tmp": tmp_path}
    code, out, err = run(*(argument.format(**values) for argument in args))
    assert (code, out, err) == (2, "", f"error: {reason.format(**values)}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(errno.ENOSPC, "full"), 2, "error: [Errno 28] No space left on device: '{out}'\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_disk_full_and_interrupts(run, source, tmp_path, monkeypatch, error, code, line):
    def fail(*_):
        raise error

    run(source, tmp_path / "out")
    monkeypatch.setattr("checkpoints.conversion.write_weights", fail)
    result = run(source, tmp_path / "out", "--to", "hf", "--overwrite")
    assert result == (code, "", line.format(out=tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(source)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_hub_that_cannot_be_reached(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("someone/model", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: someone/model: no such directory here, and the Hugging Face hub cannot be reached "
        "(no route to host): check the network, or "
    )
    assert len(err.splitlines()) == 1


def test_a_terminal_gets_a_progress_bar(source, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert command.run(convert.main, [str(source), str(tmp_path / "out")]) == 0
    num_bytes = sum(len(raw) for _, _, raw in contents(source).values())
    shown = f"{num_bytes / 1000:.1f}/{num_bytes / 1000:.1f} kB"
    assert "convert" in sys.stderr.getvalue() and shown in sys.stderr.getvalue()


def test_in_its_own_process_it_prints_one_line(source, tmp_path):
    result = subprocess.run(
        [sys.executable, "scripts/convert.py", source, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 1


def test_decode_takes_a_converted_directory(source, tmp_path, capsys, monkeypatch):
    import decode

    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)
    checkpoints.convert(source, tmp_path / "converted")
    outputs = []
    for path in (source, tmp_path / "converted"):
        args = ["--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--json", "--model", str(path)]
        assert command.run(decode.main, args) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert outputs[1]["model"] == "converted"
