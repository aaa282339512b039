"""Settings that every test shares: eight CPU devices, strict promotion, shape checks."""

import importlib.util
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    install_import_hook(["jaxspec", "pallas_kernels"], "beartype.beartype")


def has_gpu() -> bool:
    """Return whether JAX sees an NVIDIA GPU."""
    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the GPU tests where there is no GPU."""
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
