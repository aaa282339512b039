"""Settings that every test shares: eight CPU devices, strict promotion, shape checks."""

import importlib.util
import os
from pathlib import Path

from tests.devices import xla_flags

os.environ.setdefault("XLA_FLAGS", xla_flags(8))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    install_import_hook(["jaxspec", "pallas_kernels"], "beartype.beartype")


if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same examples in every run: what fails by chance is found where it is looked for.
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.load_profile("fixed")


def has_gpu() -> bool:
    """Return whether JAX sees an NVIDIA GPU."""
    return jax.default_backend() == "gpu"


@pytest.fixture
def record_gap(record_property):
    """Return a function that takes the gap between the two best logits on a text's way."""
    return lambda gap: record_property("smallest_gap", float(gap))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the smallest gap that the tests of equal tokens met: equality is by margin."""
    gaps = [
        (value, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == "smallest_gap"
    ]
    if gaps:
        gap, name = min(gaps)
        terminalreporter.write_line(
            f"smallest gap between the two best logits in {len(gaps)} tests: {gap:.2e} in {name}"
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Drop compiled programs before Linux refuses their memory maps, which kills the process.

    A program of eight CPU devices takes hundreds of the 65530 maps that a process may have.
    """
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if not (maps.exists() and limit.exists()):
        return
    if maps.read_bytes().count(b"\n") > int(limit.read_text()) // 3:
        jax.clear_caches()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the GPU tests where there is no GPU."""
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
