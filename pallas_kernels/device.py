"""What the kernels that were tuned for Hopper ask of a GPU."""

import jax

# Compute capability of the first GPUs with room for the kernels' tiles: Hopper.
HOPPER = 9.0


def require_hopper(interpret: bool) -> None:
    """Refuse to compile a kernel for a GPU that has no room for its tiles.

    Raises:
        NotImplementedError: The process's GPU is older than Hopper. Without a GPU a kernel is only
            lowered or interpreted, and nothing is refused.
    """
    if interpret or jax.default_backend() != "gpu":
        return
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is not None and float(capability) < HOPPER:
        raise NotImplementedError(f"compute capability {capability} is below {HOPPER}")
