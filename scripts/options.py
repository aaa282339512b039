"""Options that are lists: `1,8,16` and `triton,xla`."""

from __future__ import annotations

import click

KERNELS = ("default", "triton", "interpret", "xla")


def integers(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Return the integers, at least 1 each, of an option's value."""
    del context, option
    numbers = []
    for part in value.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise click.BadParameter(
                f"expected integers of at least 1 with commas between, got {part!r} in {value!r}"
            )
        numbers.append(int(part))
    return tuple(dict.fromkeys(numbers))


def kernel_names(
    context: click.Context, option: click.Parameter, value: str
) -> tuple[str | None, ...]:
    """Return the kernel implementations of an option's value, None for the default."""
    del context, option
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in KERNELS:
            raise click.BadParameter(
                f"expected some of {', '.join(KERNELS)} with commas between, got {name!r}"
            )
    return tuple(None if name == "default" else name for name in names)
