"""Chooses the form of an op: Pallas Triton, the same kernel interpreted, or XLA.

An op is a folder with ``reference.py`` (the XLA form and the specification) and ``triton.py``
(the Pallas form), both with a function of the op's name. ``triton.py`` is imported only when it
runs: the backend is deprecated upstream, and a machine without a GPU never needs it.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args

import jax

Implementation = Literal["triton", "interpret", "xla"]


def _names(implementation: str | None) -> tuple[str, ...]:
    """List the forms to try, best first.

    The platform is the process's default backend, read while tracing. A program that is lowered
    for another platform names its implementation.
    """
    if implementation is None:
        return ("triton", "xla") if jax.default_backend() == "gpu" else ("xla",)
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation={implementation!r} is not one of {get_args(Implementation)}"
        )
    return (implementation,)


def dispatch(package: str, op: str, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` of ``package`` in the form asked for.

    Args:
        package: Dotted name of the op's folder.
        op: Name of the function in both ``reference`` and ``triton``.
        implementation: One form, or None for the best that takes these shapes.
        *args: Arrays of the op.
        **kwargs: Static arguments of the op.

    Raises:
        ValueError: The implementation has no such name.
        NotImplementedError: The form asked for by name does not take these shapes.
    """
    *others, last = _names(implementation)
    for name in others:
        try:
            return _run(package, op, name, *args, **kwargs)
        except NotImplementedError:
            continue
    return _run(package, op, last, *args, **kwargs)


def _run(package: str, op: str, name: str, *args: Any, **kwargs: Any) -> Any:
    if name == "xla":
        return getattr(import_module(f"{package}.reference"), op)(*args, **kwargs)
    return _kernel(package, op, name == "interpret", tuple(kwargs.items()))(*args)


@functools.lru_cache(maxsize=1024)
def _kernel(
    package: str, op: str, interpret: bool, settings: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """Return an op's Pallas form as one function per setting.

    As a jitted function it is traced and lowered once and not at each of its calls, which a model
    makes in every layer: that is most of the time that a loop takes to compile.
    """
    function = getattr(import_module(f"{package}.triton"), op)
    return jax.jit(functools.partial(function, interpret=interpret, **dict(settings)))
