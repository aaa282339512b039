"""CPU devices and ports for the tests, in this process and in those that tests start."""

import os
import random
import socket


def xla_flags(num_devices: int) -> str:
    """Return XLA's flags for so many CPU devices.

    Many devices on few cores may wait for each other for long: XLA would abort after 40 seconds.
    """
    return (
        f"--xla_force_host_platform_device_count={num_devices} "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    )


def free_port() -> int:
    """Return a port that nobody listens at, of those that this test worker alone draws from.

    Below the ports that Linux gives to connections by itself: nobody else takes it meanwhile.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    while True:
        port = 20_000 + 1000 * worker + random.SystemRandom().randrange(1000)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port
