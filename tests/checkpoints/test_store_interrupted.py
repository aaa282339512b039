"""Conversions that are killed, interrupted or out of disk: the destination is whole or absent."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import checkpoints
from checkpoints import directories, shards
from jaxspec.config import Qwen3Config
from tests.checkpoints.converting import contents, write_checkpoint

ROOT = Path(__file__).parents[2]
NUM_KILLS = 8
# Large enough that writing takes most of the time.
CONFIG = Qwen3Config(4096, 256, 768, 2, 8, 4, 32, 1e-6, 1e4, 256, tie_word_embeddings=False)

# One interpreter imports once and forks a converter for each kill: at shares of the bytes, which
# are sure to fall between the first and the last write, and at moments of the clock. JAX starts
# its threads in the children only.
KILLER = """
    import json, os, shutil, signal, sys, time, warnings
    from pathlib import Path
    import checkpoints, checkpoints.store_writer
    from tests.checkpoints.converting import contents

    warnings.simplefilter("ignore")
    old, new, target = map(Path, sys.argv[1:4])
    to, num_kills = sys.argv[4], int(sys.argv[5])
    states = {"old": contents(old), "new": contents(new)}

    def state():
        if not target.exists():
            return "absent"
        found = contents(target)
        return next((name for name, known in states.items() if known == found), "broken")

    def fork(source, kill_at=2.0):
        # The child kills itself once that share of the bytes is written.
        child = os.fork()
        if child == 0:
            def on_progress(done, total):
                if done >= kill_at * total:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                checkpoints.convert(
                    source, target, to=to, overwrite=True, on_progress=on_progress
                )
            except BaseException:
                os._exit(1)
            os._exit(0)
        return child

    def run(source):
        return os.waitpid(fork(source), 0)[1]

    def killed_at(share):
        return fork(new, share)

    def killed_after(delay):
        child = fork(new)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        return child

    def outcome(child):
        is_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        return [is_killed, len(list(target.parent.glob(".*"))), state()]

    saved = old.with_name("saved")
    assert run(old) == 0
    target.rename(saved)
    begin = time.perf_counter()
    assert run(new) == 0
    seconds = time.perf_counter() - begin
    report = {"absent": [], "old": []}
    for i in range(num_kills):
        for before in report:
            for kill, most in ((killed_at, 1.0), (killed_after, seconds)):
                shutil.rmtree(target, ignore_errors=True)
                if before == "old":
                    shutil.copytree(saved, target)
                assert state() == before
                report[before].append((kill.__name__, *outcome(kill(most * i / (num_kills - 1)))))
    assert run(new) == 0
    print(json.dumps(report | {"last": state(), "left": [p.name for p in target.parent.iterdir()]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_kills_at_any_moment_leave_the_destination_whole(tmp_path, to):
    places = [write_checkpoint(tmp_path / name, CONFIG, seed=i) for i, name in enumerate("ab")]
    target = tmp_path / "place" / "out"
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLER), *places, target, to, str(NUM_KILLS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    for before in ("absent", "old"):
        ends = {"killed_at": [], "killed_after": []}
        for kind, is_killed, num_hidden, state in report[before]:
            ends[kind].append((is_killed, num_hidden > 0, state))
        # While bytes are written nothing is in place yet, and something half-written is beside it.
        assert ends["killed_at"] == [(True, True, before)] * NUM_KILLS
        # At a moment of the clock it may be over, and the new one is in place.
        print(f"{to}, {before}: {ends['killed_after']}")
        assert {state for _, _, state in ends["killed_after"]} <= {before, "new"}
    # The next conversion removes what the killed ones left.
    assert report["last"] == "new" and report["left"] == ["out"]


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """Return a new source and a destination that holds an older conversion."""
    source = write_checkpoint(tmp_path / "source", seed=1)
    checkpoints.convert(write_checkpoint(tmp_path / "older"), tmp_path / "place" / "out")
    return source, tmp_path / "place" / "out"


def assert_untouched(destination: Path) -> None:
    assert contents(destination) == contents(destination.parents[1] / "older")
    assert [path.name for path in destination.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_files_that_cannot_grow(pair, to):
    """A limit on the size of files makes real writes fail, in Python as in TensorStore."""
    source, destination = pair
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError) as raised:
            checkpoints.convert(source, destination, to=to, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(raised.value) == f"[Errno 27] File too large: '{destination}'"
    assert_untouched(destination)


@pytest.fixture
def tiny_disk(tmp_path):
    """Yield a file system of 400 kB, where one can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_full_disk(tmp_path, tiny_disk, monkeypatch, to):
    older = write_checkpoint(tmp_path / "older", dtype="float16")
    destination = tiny_disk / "out"
    checkpoints.convert(older, destination, to=to)
    # What is free at the start need not be free later.
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError) as raised:
        checkpoints.convert(older, destination, to=to, overwrite=True, dtype="float32")
    assert str(raised.value) == f"[Errno 28] No space left on device: '{destination}'"
    assert contents(destination) == contents(older)
    assert [path.name for path in tiny_disk.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError(errno.ENOSPC, "full"), ValueError])
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_whatever_goes_wrong_halfway(pair, to, kind):
    source, destination = pair
    done = []

    def on_progress(*now):
        done.append(now)
        if len(done) == 8:
            raise kind

    with pytest.raises(kind if isinstance(kind, type) else OSError):
        checkpoints.convert(source, destination, to=to, overwrite=True, on_progress=on_progress)
    assert len(done) == 8
    assert_untouched(destination)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_an_interrupt_stops_before_the_next_tensor_but_one(pair, to):
    source, destination = pair
    done = []

    def on_progress(*now):
        done.append(now)
        if len(done) == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        checkpoints.convert(source, destination, to=to, overwrite=True, on_progress=on_progress)
    assert len(done) <= 9
    assert_untouched(destination)


def test_without_an_exchange_in_one_step(pair, monkeypatch):
    source, destination = pair
    monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    checkpoints.convert(source, destination, overwrite=True)
    assert contents(destination) == contents(source)
    assert [path.name for path in destination.parent.iterdir()] == ["out"]


def test_the_old_one_goes_back_if_the_new_one_cannot_take_its_place(pair, monkeypatch):
    source, destination = pair
    monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    real_rename = Path.rename

    def rename(path, target):
        if ".new-" in path.name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError) as raised:
        checkpoints.convert(source, destination, overwrite=True)
    assert str(raised.value) == f"[Errno 5] Input/output error: '{destination}'"
    assert_untouched(destination)


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def beside(destination: Path, role: str, process: int) -> Path:
    return destination.with_name(f".out.{role}-{socket.gethostname()}-0123abcd-{process}")


def test_an_old_one_that_a_killed_writer_moved_aside_comes_back(pair):
    source, destination = pair
    destination.rename(beside(destination, "old", dead_process()))
    with pytest.raises(FileExistsError, match="out: exists and is not an empty directory$"):
        checkpoints.convert(source, destination)
    assert_untouched(destination)
    shutil.copytree(destination, beside(destination, "old", dead_process()))
    checkpoints.convert(source, destination, overwrite=True)
    assert [path.name for path in destination.parent.iterdir()] == ["out"]


def test_an_old_one_moved_aside_outlives_a_place_made_anew_and_a_full_disk(pair, monkeypatch):
    """Until a new checkpoint is in place, the one moved aside may be the only one."""
    source, destination = pair
    destination.rename(beside(destination, "old", dead_process()))
    destination.mkdir()
    with pytest.raises(FileNotFoundError, match="left the old one at .*: rename it back$"):
        checkpoints.load(destination)

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.convert(source, destination, overwrite=True, on_progress=fail)
    assert_untouched(destination)

    # Somebody else's directory has come in its place: neither is lost.
    aside = destination.rename(beside(destination, "old", dead_process()))
    destination.mkdir()
    (destination / "theirs").touch()
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            checkpoints.convert(source, destination, overwrite=overwrite)
    assert contents(aside) == contents(source.parent / "older")
    assert [path.name for path in destination.iterdir()] == ["theirs"]
    (destination / "theirs").unlink()
    checkpoints.convert(source, destination, overwrite=True)
    assert contents(destination) == contents(source) and not aside.exists()


def test_loading_names_an_old_one_that_was_moved_aside(pair):
    source, destination = pair
    destination.with_name(".out.old-notes").mkdir()
    destination.with_name(f".another-{beside(destination, 'old', 1).name}").mkdir()
    gone = destination.rename(destination.with_name("gone"))
    for load in (checkpoints.load, checkpoints.load_model):
        with pytest.raises(FileNotFoundError, match="out: no such directory$"):
            load(destination)
    aside = gone.rename(beside(destination, "old", dead_process()))
    reason = f"no such directory; a killed conversion left the old one at {aside}: rename it back"
    for path in (destination, str(destination)):
        for load in (checkpoints.load, checkpoints.load_model):
            with pytest.raises(FileNotFoundError) as raised:
                load(path)
            assert str(raised.value) == f"{destination}: {reason}"


def test_only_what_dead_writers_to_this_place_left_is_removed(pair):
    source, destination = pair
    dead = dead_process()
    kept = [
        beside(destination, "new", os.getpid()),
        destination.with_name(f".other.new-{socket.gethostname()}-0123abcd-{dead}"),
        destination.with_name(f".out.new-another.host-0123abcd-{dead}"),
        destination.with_name(".out.new"),
        destination.with_name(f".out.new-{socket.gethostname()}-mine"),
    ]
    gone = beside(destination, "new", dead)
    for path in (*kept, gone):
        path.mkdir()
    checkpoints.convert(source, destination, overwrite=True)
    assert {path.name for path in destination.parent.iterdir()} == {
        "out", *(path.name for path in kept)
    }  # fmt: skip


def test_a_place_that_fills_meanwhile(pair, monkeypatch):
    source, destination = pair
    late = destination.with_name("late")
    real_write = shards.write_file

    def write(*arguments):
        real_write(*arguments)
        late.mkdir(exist_ok=True)
        (late / "theirs").touch()

    monkeypatch.setattr(shards, "write_file", write)
    with pytest.raises(FileExistsError) as raised:
        checkpoints.convert(source, late, to="hf")
    assert str(raised.value) == f"{late}: exists and is not an empty directory"
    assert [path.name for path in late.iterdir()] == ["theirs"]
