"""CPU devices for the tests, in this process and in those that tests start."""


def xla_flags(num_devices: int) -> str:
    """Return XLA's flags for so many CPU devices.

    Many devices on few cores may wait for each other for long: XLA would abort after 40 seconds.
    """
    return (
        f"--xla_force_host_platform_device_count={num_devices} "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    )
