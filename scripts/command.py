"""What the scripts share: one-line errors, exit codes, the compilation cache."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click
import jax

EXIT_BAD_INPUT = 2
EXIT_LOST_PROCESS = 3
EXIT_INTERRUPTED = 130
# What JAX says of a collective whose other side is gone.
_LOST = re.compile(
    r"unavailable|deadline|connection|connect |heartbeat|gloo|nccl|peer|socket|aborted",
    re.IGNORECASE,
)


def run(command: click.Command, args: Sequence[str] | None = None) -> int:
    """Run a click command and return its exit code.

    Bad input, and input too large for the memory, prints one line on standard error and gives 2;
    an interrupt gives 130, another process of the run that is gone 3. With JAXSPEC_DEBUG set,
    errors of values keep their traceback.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
    try:
        signal.signal(signal.SIGINT, _interrupt)
    except ValueError:
        pass  # Not in the main thread: whoever runs there handles signals.
    try:
        code = command.main(args=args, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader left (`| head`), to which click's answer is SystemExit: nothing to report, and
        # nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_distributed():
            leave(0, at_once=True)  # the others are in the midst of it
        return 0
    except click.ClickException as error:
        message = error.format_message()
    except (ValueError, OSError, NotImplementedError) as error:
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        message = str(error)
    except MemoryError as error:
        message = str(error) or "out of memory on this machine"
    except jax.errors.JaxRuntimeError as error:
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        if "RESOURCE_EXHAUSTED" not in str(error):
            if not (is_distributed() and _LOST.search(str(error))):
                raise
            reason = " ".join(str(error).split())[:200]
            print(f"error: lost another process of the run: {reason}", file=sys.stderr)
            return EXIT_LOST_PROCESS
        message = (
            "out of memory on the device: expected to fit, got "
            + str(error).splitlines()[0]
            + "; try fewer prompts, a smaller --max-new-tokens, or a smaller --dtype"
        )
    except RuntimeError as error:
        if "backend" not in str(error).lower():
            raise
        message = f"JAX cannot use the platform asked for: {error}"
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_BAD_INPUT


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """Leave Python with an exit code.

    After an interrupt at once: programs that still compile or run in other threads would crash
    Python while it shuts down. So too with other processes after an error: they are not there, or
    would be waited for.
    """
    if at_once or code == EXIT_INTERRUPTED or (code > 1 and is_distributed()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


_was_interrupted = False


def _interrupt(signal_number: int, frame: object) -> None:
    global _was_interrupted
    _was_interrupted = True
    raise KeyboardInterrupt


def is_distributed() -> bool:
    """Return whether this is one of several processes of a run."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if there was one; a library's callback may have swallowed it."""
    if _was_interrupted:
        raise KeyboardInterrupt


def enable_compilation_cache() -> None:
    """Keep compiled programs between runs, unless JAX was told where (or not) to keep them."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or "JAX_ENABLE_COMPILATION_CACHE" in os.environ:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "jaxspec" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
