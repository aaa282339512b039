"""Directories that appear, or take the place of another, complete or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def written_beside(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new directory that takes the place of `directory` if the body succeeds.

    Everything is on the disk before it takes the place, and the old directory goes after that: a
    writer that is killed leaves the old one (or none), and beside it a hidden directory that the
    next writer to the same place removes. Only where the file system cannot exchange two
    directories in one step (renameat2 with RENAME_EXCHANGE) is there a moment, between two
    renames, at which a kill leaves nothing in the place and the old one aside: the next writer to
    that place on this host puts it back, and `left_aside` finds it.

    Args:
      directory: must not exist or be empty, or with `overwrite` be any directory; parent
        directories are created.
      overwrite: replace a directory that is not empty.

    Raises:
      FileExistsError: the directory exists and is not empty, and `overwrite` is False.
      NotADirectoryError: with `overwrite`, a file is in its place.
      OSError: a file cannot be written, or the disk is full.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    _clean_up_after_killed_writers(directory)
    if overwrite and directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory}: not a directory")
    if not overwrite and not _is_free(directory):
        raise FileExistsError(f"{directory}: exists and is not an empty directory")
    temporary = _beside(directory, "new")
    try:
        # `mkdir`, not `mkdtemp`: the latter's directories are private to the user.
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        if overwrite and directory.exists():
            _swap(temporary, directory)
        else:
            _rename(temporary, directory)
        _sync_directory(directory.parent)
        # Now that the place is taken: what other writers moved aside is of no use any more.
        for path in _left_behind(directory, "old"):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise _renamed(error, temporary, directory) from None
    finally:
        # After a swap this is the old directory.
        shutil.rmtree(temporary, ignore_errors=True)


def left_aside(directory: Path) -> Path | None:
    """Return what a writer moved aside, on any host, in order to replace `directory`; or None."""
    pattern = glob.escape(f".{directory.name}.old-") + "*-????????-[0-9]*"
    return next((path for path in directory.parent.glob(pattern) if path.is_dir()), None)


def _renamed(error: OSError, temporary: Path, directory: Path) -> OSError:
    """Return the error with the name that the user knows in place of the temporary one."""
    is_about_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    is_about_file = str(error.filename).startswith(str(temporary))
    if error.errno is None or not (is_about_disk or is_about_file):
        return error
    return type(error)(error.errno, os.strerror(error.errno), str(directory))


def _is_free(directory: Path) -> bool:
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def _prefix(directory: Path, role: str) -> str:
    return f".{directory.name}.{role}-{socket.gethostname()}-"


def _beside(directory: Path, role: str) -> Path:
    name = f"{_prefix(directory, role)}{secrets.token_hex(4)}-{os.getpid()}"
    return directory.with_name(name)


def _left_behind(directory: Path, role: str) -> list[Path]:
    """Return what writers on this host that no longer run left beside `directory`."""
    prefix = _prefix(directory, role)
    found = []
    for path in directory.parent.iterdir():
        token, _, process = path.name.removeprefix(prefix).partition("-")
        if path.name.startswith(prefix) and len(token) == 8 and process.isdecimal():
            if not _is_running(int(process)):
                found.append(path)
    return found


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _clean_up_after_killed_writers(directory: Path) -> None:
    for path in _left_behind(directory, "old"):
        # Killed between the two renames of `_swap`: the old directory goes back, unless something
        # else has come there since.
        if _is_free(directory):
            path.rename(directory)
    for path in _left_behind(directory, "new"):
        shutil.rmtree(path, ignore_errors=True)


def _rename(temporary: Path, directory: Path) -> None:
    try:
        temporary.rename(directory)
    except OSError as error:
        # Somebody else has filled it meanwhile; an empty one is replaced.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise FileExistsError(f"{directory}: exists and is not an empty directory") from None


def _swap(temporary: Path, directory: Path) -> None:
    """Exchange both; where the system cannot do so in one step, the old one moves aside first."""
    if _exchange(temporary, directory):
        return
    aside = _beside(directory, "old")
    directory.rename(aside)
    try:
        temporary.rename(directory)
    except BaseException:
        aside.rename(directory)
        raise
    # Under this name it is removed, now or after a kill, and never put back.
    aside.rename(temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories in one step; return False where that is not possible.

    Source: renameat2(2); Python has no call for it.
    """
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, TypeError, AttributeError):
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def _sync(directory: Path) -> None:
    """Have everything below written to the disk, files before the directories that name them."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync_file(Path(folder, name))
        _sync_directory(Path(folder))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    # Some network file systems refuse this; they order renames by themselves.
    with contextlib.suppress(OSError):
        _sync_file(path)
