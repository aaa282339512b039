"""Several processes of one run, on this machine: the same texts, and never a hang."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.devices import free_port, xla_flags

ROOT = Path(__file__).parents[2]
# What README states: a process that is gone ends the others within so many seconds.
STATED_SECONDS = 40
# By these JAX would find a cluster that the tests themselves run in.
CLUSTER = re.compile("KUBERNETES_|SLURM_|OMPI_|PMI")
SAMPLING = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "3")


def start(*args: str, num_devices: int, **options) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not CLUSTER.match(name)}
    environment |= {
        "XLA_FLAGS": xla_flags(num_devices),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    environment |= options.pop("more_environment", {})
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "decode.py"), *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def start_two(*args: str, more: tuple[tuple[str, ...], ...] = ((), ())) -> list[subprocess.Popen]:
    """Start two processes with four devices each."""
    address = f"127.0.0.1:{free_port()}"
    shared = ("--coordinator", address, "--num-processes", "2")
    return [
        start(*args, *shared, "--process-id", str(index), *more[index], num_devices=4)
        for index in (0, 1)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 600) -> list[tuple[int, str, str]]:
    """Return exit code, standard output and standard error of each; kill what goes on."""
    ends = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            ends.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ends


def wait_for_text(processes: list[subprocess.Popen]) -> None:
    """Return once the first process decodes, which is when text comes; kill all if none does."""

    def kill() -> None:
        for process in processes:
            process.kill()

    alarm = threading.Timer(400, kill)
    alarm.start()
    try:
        if not processes[0].stdout.read(1):
            kill()
            pytest.fail(f"no text: {processes[0].communicate()[1]}")
    finally:
        alarm.cancel()


@pytest.mark.parametrize(
    "mesh, args",
    [
        ("data=2,model=4", ("--spec", "promptlookup")),
        ("data=1,model=8", ("--spec", "lookahead", *SAMPLING)),
        ("data=4,model=2", ("--spec", "auto", "--stop", "raise")),
    ],
    ids=["greedy", "sampled", "auto"],
)
def test_two_processes_give_the_texts_of_one(mesh, args):
    prompts = ("--prompt", "def add(a, b):\n", "--prompt", "class A:\n    def __init__(self):\n")
    shown = (*prompts, *args, "--max-new-tokens", "40", "--logprobs", "1", "--json")
    ours = start_two(*shown, "--mesh", mesh)
    (alone,) = finish([start(*shown, num_devices=1)])
    ends = finish(ours)
    assert [code for code, _, _ in (alone, *ends)] == [0, 0, 0], [err for _, _, err in ends]
    # One of them speaks, and nothing but its own objects: libraries' messages go elsewhere.
    assert ends[1][1] == ""
    reports = [[json.loads(line) for line in out.splitlines()] for _, out, _ in (alone, ends[0])]
    assert len(reports[0]) == len(reports[1]) == 2
    for expected, report in zip(*reports, strict=True):
        for name in ("text", "token_ids", "finish_reason"):
            assert report[name] == expected[name]
        differences = zip(report["logprobs"], expected["logprobs"], strict=True)
        assert max(abs(a - b) for a, b in differences) < 1e-4
        assert expected["mesh"] is None
        sizes = dict(part.split("=") for part in mesh.split(","))
        assert report["mesh"] == {name: int(size) for name, size in sizes.items()}


@pytest.fixture
def no_core_files():
    """Let an aborted process be gone at once: a file of its memory may take long to write."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


@pytest.mark.usefixtures("no_core_files")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "how, mesh",
    [(signal.SIGKILL, "data=2,model=4"), (signal.SIGSTOP, "data=1,model=8")],
    ids=["killed", "stopped"],
)
def test_a_process_that_is_gone_ends_the_others(victim, how, mesh):
    args = ("--max-new-tokens", "3500", "--ignore-eos", "--mesh", mesh, "--show-drafts")
    processes = start_two(*args)
    try:
        wait_for_text(processes)
        os.kill(processes[victim].pid, how)
        started = time.monotonic()
        other = processes[1 - victim]
        # Read on: a full pipe would hold it up.
        other.communicate(timeout=STATED_SECONDS)
        assert time.monotonic() - started < STATED_SECONDS
        # JAX aborts it, or it sees for itself that the other is gone.
        assert other.returncode in (-signal.SIGABRT, 3)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_different_prompts_are_refused_by_all():
    more = (("--prompt", "a"), ("--prompt", "b"))
    ends = finish(start_two("--mesh", "data=8", "--json", "--max-new-tokens", "4", more=more))
    for code, out, err in ends:
        assert code == 2 and out == ""
        assert "the processes of this run have different models, prompts or settings" in err
        assert "run one command, with its own --process-id" in err


@pytest.mark.parametrize(
    "more",
    [
        (("--mesh", "data=2,model=4"), ("--mesh", "data=4,model=2")),
        (("--mesh", "model=8"), ("--mesh", "model=8", "--dtype", "bfloat16")),
        (("--mesh", "model=8", "--compare"), ("--mesh", "model=8")),
    ],
    ids=["mesh", "dtype", "compare"],
)
def test_different_flags_are_refused_by_all(more):
    for code, out, err in finish(start_two("--json", "--max-new-tokens", "4", more=more)):
        assert code == 2 and out == "" and "different models, prompts or settings" in err


@pytest.mark.parametrize("index", ["0", "1"])
def test_a_process_that_stays_alone_gives_up(index):
    address = f"127.0.0.1:{free_port()}"
    program = (
        "import sys, command, decode, meshes; meshes.START_SECONDS = 8; "
        "command.leave(command.run(decode.main, sys.argv[1:]))"
    )
    args = ("--coordinator", address, "--num-processes", "2", "--process-id", index, "--tp", "2")
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ((code, out, err),) = finish([process], timeout=120)
    assert code == 2 and out == ""
    assert "did not come together within 8 seconds" in err


def test_a_port_in_use_is_refused():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        args = ("--coordinator", address, "--num-processes", "2", "--process-id", "0")
        ((code, out, err),) = finish([start(*args, num_devices=2)])
    assert code == 2 and out == "" and f"--coordinator {address}: Address already in use" in err


def test_what_is_missing_to_find_a_cluster_is_said_in_the_same_line():
    ((code, out, err),) = finish(
        [start("--distributed", num_devices=1, more_environment={"KUBERNETES_SERVICE_HOST": "x"})]
    )
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1
    assert "--distributed: no other processes were found" in err
    if importlib.util.find_spec("kubernetes") is None:
        assert "pip install jax[k8s]" in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_can_be_ended(how):
    port = free_port()
    args = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2")
    process = start(*args, "--process-id", "0", "--tp", "2", num_devices=2)
    # It waits once it listens.
    for _ in range(3000):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(how)
    ((code, out, _),) = finish([process], timeout=60)
    assert code == -how and out == ""


def test_a_run_can_be_terminated():
    processes = start_two("--mesh", "model=8", "--max-new-tokens", "3500", "--ignore-eos")
    wait_for_text(processes)
    processes[0].terminate()
    ((code, _, _), _) = finish(processes, timeout=STATED_SECONDS)
    assert code == -signal.SIGTERM


def test_a_reader_that_leaves_ends_the_run():
    processes = start_two("--mesh", "model=8", "--max-new-tokens", "3500", "--ignore-eos")
    wait_for_text(processes)
    processes[0].stdout.close()
    started = time.monotonic()
    try:
        for process in processes:
            process.wait(timeout=STATED_SECONDS)
        assert time.monotonic() - started < STATED_SECONDS
        assert processes[0].returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.stderr.close()
        processes[1].stdout.close()


@pytest.mark.parametrize(
    "args, message",
    [
        (("--tp", "4"), "mesh data=1, model=4 has 4 devices, which leaves processes [1] without"),
        ((), "--mesh is needed with 2 processes: they have 8 devices"),
    ],
    ids=["idle", "none"],
)
def test_a_mesh_that_does_not_fit_the_processes(args, message):
    for code, out, err in finish(start_two(*args, "--json")):
        assert code == 2 and out == "" and message in err


@pytest.mark.parametrize(
    "args, message",
    [
        (("--coordinator", "a:1"), "--coordinator needs --num-processes, --process-id too"),
        (("--process-id", "1"), "--process-id needs --coordinator, --num-processes too"),
        (
            ("--coordinator", "nowhere", "--num-processes", "2", "--process-id", "0"),
            "--coordinator 'nowhere': expected host:port",
        ),
        (
            ("--coordinator", "a:99999", "--num-processes", "2", "--process-id", "0"),
            "--coordinator 'a:99999': expected host:port",
        ),
        (
            ("--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"),
            "--process-id 2: expected less than --num-processes 2",
        ),
        (("--distributed", "--process-id", "1"), "--distributed and --process-id contradict"),
        (
            ("--coordinator", "nowhere.invalid:80", "--num-processes", "2", "--process-id", "1"),
            "--coordinator nowhere.invalid:80: ",
        ),
        (("--distributed",), "--distributed: no other processes were found"),
        (("--mesh", "data=2,model=2,data=1"), "expected data=N,model=M, got 'data=1'"),
        (("--mesh", "rows=2"), "expected data=N,model=M, got 'rows=2'"),
        (("--mesh", "data=2", "--tp", "2"), "--mesh and --tp or --dp contradict each other"),
        (("--tp", "16"), "mesh data=1, model=16 needs 16 devices, but there are 2"),
        (("--mesh", "data=0"), "mesh data=0 is not at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_flags_that_do_not_go_together(args, message):
    ((code, out, err),) = finish([start(*args, num_devices=2)])
    assert code == 2 and out == ""
    assert message in err and len(err.strip().splitlines()) == 1
