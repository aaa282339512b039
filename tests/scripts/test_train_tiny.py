"""`scripts/train_tiny.py` as its users call it, but for the training itself."""

from __future__ import annotations

import command
import pytest

pytest.importorskip("optax")

import train_tiny

import jaxspec


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command: (exit code, standard output, standard error)."""
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)

    def run(*args):
        code = command.run(train_tiny.main, [str(argument) for argument in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_help_and_version(run):
    assert run("-h") == run("--help")
    code, out, err = run("--help")
    assert (code, err) == (0, "") and "--out PATH" in out
    assert run("--version") == (0, f"jaxspec, version {jaxspec.__version__}\n", "")


def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path):
    out, missing, broken = tmp_path / "out", tmp_path / "missing.jsonl", tmp_path / "broken.jsonl"
    broken.write_text('{"id": "a"}\n')
    assert run() == (2, "", "error: --out is missing\n")
    for args, reason in [
        (["--steps", "x"], "Invalid value for '--steps': 'x' is not a valid integer range."),
        (["--prompts", missing], f"[Errno 2] No such file or directory: '{missing}'"),
        (["--prompts", broken], f"{broken}, line 1: expected an object with id and prompt"),
    ]:
        assert run("--small", "--out", out, *args) == (2, "", f"error: {reason}\n")
    for flag, value in (("--batch-size", 0), ("--steps", 0), ("--loop-rows", -1), ("--minutes", 0)):
        code, shown, err = run("--small", "--out", out, flag, value)
        assert (code, shown) == (2, "") and "not in the range" in err and err.count("\n") == 1
    code, shown, err = run("--small", "--out", out, "--minutes", "nan")
    assert (code, shown) == (2, "") and "nan is not a finite number" in err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, _, err = run("--small", "--out", tmp_path / "taken")
    assert (code, err) == (2, f"error: {tmp_path}/taken: exists and is not empty\n")
    assert not out.exists()


def test_without_optax(run, monkeypatch):
    monkeypatch.setattr(train_tiny.importlib.util, "find_spec", lambda name: None)
    assert run("--small") == (2, "", "error: training needs optax: pip install -e '.[train]'\n")
