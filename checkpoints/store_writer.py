"""Writes the weights of a converted checkpoint with Orbax, one tensor in memory at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.safetensors_io import TensorToWrite


def write_store(
    folder: Path, tensors: Sequence[TensorToWrite], on_written: Callable[[int], None]
) -> None:
    """Write an Orbax PyTree checkpoint {name: array} in the layout that `store` maps.

    Args:
      folder: directory to create.
      tensors: what to write.
      on_written: called with the bytes of each tensor that has been written.

    Raises:
      OSError: a file cannot be written.
      ValueError: a tensor cannot be produced.
    """
    handler = ocp.PyTreeCheckpointHandler(
        # One file per array, uncompressed: what `store` maps. OCDBT would gather chunks in memory
        # until a data file is full, and a compressor needs a second copy of each tensor.
        use_ocdbt=False,
        use_zarr3=False,
        use_compression=False,
        # Bounds what Orbax's own handlers would have in flight; ours has one tensor.
        save_concurrent_gb=1,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (TensorToWrite, _OneByOne(on_written)),
            # Not used, but Orbax warns where it is missing.
            (jax.Array, ocp.type_handlers.ArrayHandler()),
        ),
    )
    tree = {tensor.name: tensor for tensor in tensors}
    try:
        with _without_warnings_of_orbax(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
    except ValueError as error:
        raise _as_os_error(error) from None


class _Uncopied(np.ndarray):
    """An array of which a deep copy is the array itself.

    Orbax copies what it saves, lest the caller change it meanwhile; nobody changes ours.
    """

    def __deepcopy__(self, memo: dict[int, Any] | None) -> _Uncopied:
        return self


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Saves `TensorToWrite` leaves as Orbax saves numpy arrays, each before the next is produced.

    Orbax starts to write all leaves of a tree at once and has no limit for numpy arrays.
    """

    def __init__(self, on_written: Callable[[int], None]) -> None:
        super().__init__()
        self._on_written = on_written

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Write the leaves; nothing is left to wait for."""
        args = args or [ocp.SaveArgs() for _ in values]
        for tensor, info, arg in zip(values, infos, args, strict=True):
            await self._write(tensor, info, arg)
            self._on_written(tensor.num_bytes)
            # An interrupt reaches a coroutine only where it waits for the event loop.
            await asyncio.sleep(0)
        return []

    async def _write(self, tensor: TensorToWrite, info: Any, arg: Any) -> None:
        # Its own frame, so that the array is gone before the next one is produced.
        array = tensor.produce().view(_Uncopied)
        for commit in await super().serialize([array], [info], [arg]):
            commit.result()


@contextlib.contextmanager
def _without_warnings_of_orbax() -> Iterator[None]:
    """Drop what Orbax logs below errors, such as that there are no OCDBT parts to merge."""

    def is_kept(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def _as_os_error(error: ValueError) -> Exception:
    """Return TensorStore's error, a ValueError of several lines, as what it is."""
    message = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'", message)
    if code:
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if re.match(r"[A-Z_]+: ", message):
        return OSError(message)
    return error
