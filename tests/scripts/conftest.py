"""Fixtures of several files."""

from __future__ import annotations

import json

import benchmark
import command
import pytest


@pytest.fixture
def run_step(capsys, monkeypatch):
    """Return a function that runs `benchmark.py step` with a tiny model.

    It returns the exit code, the rows, standard output and standard error.
    """
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)

    def run_step(*args):
        capsys.readouterr()
        flags = ["--shape", "tiny", "--rows", "2", "--capacity", "128", "--length", "40"]
        flags += ["--steps", "4", "--runs", "2", "--jobs", "1"]
        code = command.run(benchmark.main, ["step", *flags, *map(str, args)])
        captured = capsys.readouterr()
        rows = [json.loads(line) for line in captured.out.splitlines() if line.startswith("{")]
        return code, rows, captured.out, captured.err

    return run_step
