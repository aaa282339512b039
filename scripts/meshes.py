"""Options that spread a run over devices and hosts, and what they make of JAX."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import click
import jax
from jax.sharding import Mesh

from jaxspec import sharding

# A process that is gone is missed after so many seconds without a sign of it; JAX's own 100 leave
# the others waiting in a collective for minutes.
HEARTBEAT_SECONDS = 20
# All processes have to be there within so many seconds.
START_SECONDS = 120
# And a process that ends waits so long for the others to end too.
SHUTDOWN_SECONDS = 20

Command = Callable[..., Any]
POSITIVE = click.IntRange(min=1)


def mesh_options(command: Command) -> Command:
    """Add --mesh, --tp and --dp to a command."""
    for option in (
        click.option("--dp", type=POSITIVE, default=None, help="Short for --mesh data=N."),
        click.option("--tp", type=POSITIVE, default=None, help="Short for --mesh model=N."),
        click.option(
            "--mesh",
            default=None,
            help="Devices to spread over, such as data=2,model=4: rows of the batch over data, "
            "heads, feed-forward width and vocabulary over model.  [default: one device]",
        ),
    ):
        command = option(command)
    return command


def process_options(command: Command) -> Command:
    """Add the options of a run on several hosts to a command."""
    for option in (
        click.option(
            "--distributed",
            is_flag=True,
            help="Join the other processes that Slurm, MPI or Kubernetes started.",
        ),
        click.option("--process-id", type=click.IntRange(min=0), help="Of this process, from 0."),
        click.option("--num-processes", type=POSITIVE, help="Processes of the run."),
        click.option(
            "--coordinator",
            default=None,
            help="host:port of process 0. Every process runs the same command with its own id.",
        ),
    ):
        command = option(command)
    return command


def join_processes(flags: Mapping[str, Any]) -> None:
    """Join the other processes of the run, if the flags say that there are any.

    To be called before anything else asks JAX for a device.

    Raises:
      click.UsageError: the flags do not go together, or the others have other ones.
      ConnectionError: the others cannot be joined. If they do not come in time, the process ends.
    """
    names = ("coordinator", "num_processes", "process_id")
    given = [name for name in names if flags[name] is not None]
    if not given and not flags["distributed"]:
        return
    if given and flags["distributed"]:
        flag = given[0].replace("_", "-")
        raise click.UsageError(f"--distributed and --{flag} contradict each other")
    if given and len(given) < len(names):
        missing = ", ".join("--" + name.replace("_", "-") for name in names if name not in given)
        raise click.UsageError(f"--{given[0].replace('_', '-')} needs {missing} too")
    if given:
        address = flags["coordinator"]
        port = re.fullmatch(r"\S+:([0-9]{1,5})", address)
        if port is None or not 0 < int(port[1]) < 2**16:
            raise click.UsageError(f"--coordinator {address!r}: expected host:port")
        if flags["process_id"] >= flags["num_processes"]:
            raise click.UsageError(
                f"--process-id {flags['process_id']}: expected less than "
                f"--num-processes {flags['num_processes']}"
            )
        _check_address(address.rpartition(":")[0], int(port[1]), flags["process_id"])
    _keep_output_apart()
    # Else JAX catches SIGTERM, by which schedulers end a process.
    jax.config.update("jax_enable_preemption_service", False)
    alarm = threading.Timer(START_SECONDS - 2, _give_up)
    alarm.daemon = True
    alarm.start()
    # JAX waits where Python does not hear of an interrupt.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with warnings.catch_warnings(record=True) as told:
            # Of what is missing to find the others: it belongs into the one line of the error.
            warnings.simplefilter("always")
            jax.distributed.initialize(
                flags["coordinator"],
                flags["num_processes"],
                flags["process_id"],
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                initialization_timeout=START_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
    except ValueError as error:
        reasons = " ".join(f"({warning.message})" for warning in told)
        raise click.UsageError(
            f"--distributed: no other processes were found: {error} {reasons}".rstrip()
        ) from None
    except RuntimeError as error:
        raise ConnectionError(f"the processes of the run did not come together: {error}") from None
    finally:
        signal.signal(signal.SIGINT, handler)
        alarm.cancel()
    # Hosts may know process 0 by different names.
    own = ("process_id", "coordinator")
    shared = {name: value for name, value in flags.items() if name not in own}
    try:
        sharding.check_alike(*sorted(shared.items()))
    except ValueError as error:
        raise click.UsageError(f"{error}: run one command, with its own --process-id") from None


def _check_address(host: str, port: int, process_id: int) -> None:
    """Refuse an address that cannot be: JAX would wait for it, or crash on a port in use."""
    try:
        if process_id > 0:
            socket.getaddrinfo(host.strip("[]"), port)
            return
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
    except OSError as error:
        raise click.UsageError(f"--coordinator {host}:{port}: {error.strerror}") from None


def _give_up() -> None:
    """End a process that waits for others in vain: JAX would abort it with a stack of its own."""
    print(
        f"error: the processes of the run did not come together within {START_SECONDS} seconds",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _keep_output_apart() -> None:
    """Send to standard error what libraries would write to standard output, as Gloo does."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = own


def make_mesh(flags: Mapping[str, Any]) -> Mesh | None:
    """Return the mesh that the flags ask for, None for one device.

    Raises:
      click.UsageError: the flags do not go together, or there are too few devices.
    """
    sizes = {}
    if flags["mesh"] is not None:
        if flags["tp"] is not None or flags["dp"] is not None:
            raise click.UsageError("--mesh and --tp or --dp contradict each other")
        for part in flags["mesh"].split(","):
            match = re.fullmatch(r"\s*(data|model)\s*=\s*([0-9]{1,6})\s*", part)
            if match is None or match[1] in sizes:
                raise click.UsageError(
                    f"--mesh {flags['mesh']!r}: expected data=N,model=M, got {part!r}"
                )
            sizes[match[1]] = int(match[2])
    else:
        flagged = {"data": flags["dp"], "model": flags["tp"]}
        sizes = {name: size for name, size in flagged.items() if size is not None}
    if not sizes:
        if jax.process_count() > 1:
            raise click.UsageError(
                f"--mesh is needed with {jax.process_count()} processes: they have "
                f"{jax.device_count()} devices"
            )
        return None
    try:
        return sharding.make_mesh(**sizes)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
