"""Measure what jaxspec does on this machine.

`python scripts/benchmark.py kernels` times every op of pallas_kernels at real sizes against its
XLA form, and against the time that the device needs to copy as many bytes.
`python scripts/benchmark.py step` times a decode step of the published model sizes, and what is
around it. `python scripts/benchmark.py decode` compares the drafters on prompts, and
`python scripts/benchmark.py exactness` their tokens. Each measurement prints one JSON line; a table
follows. `python scripts/benchmark.py roofline` measures nothing: it says what a step should take.
"""

import click
import command
from benchmark_decode import decode
from benchmark_exactness import exactness
from benchmark_kernels import kernels
from benchmark_roofline import roofline
from benchmark_step import step

import jaxspec


@click.group(no_args_is_help=False)
@click.version_option(jaxspec.__version__, prog_name="jaxspec")
def main() -> None:
    """Measure jaxspec on this machine."""


main.add_command(kernels)
main.add_command(decode)
main.add_command(step)
main.add_command(exactness)
main.add_command(roofline)


if __name__ == "__main__":
    command.leave(command.run(main))
