"""Where arrays live on a mesh of devices, and how code on one device reaches the others.

A mesh has two axes: `data` splits the rows of the batch, `model` the heads, the feed-forward width
and the vocabulary. The loop runs on every device with that device's part of everything, under one
`jax.shard_map`; so a kernel only ever sees local arrays, and what crosses devices is written down:
the methods of `ModelAxis`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxspec.config import Qwen3Config
from jaxspec.layout import check_count

DATA, MODEL = "data", "model"
# The one table of partition specs, by the name of a parameter, or of a field of state and request.
SPECS: Mapping[str, P] = {
    "embed_tokens": P(MODEL),
    "lm_head": P(MODEL),
    "qkv_proj": P(None, MODEL),
    "o_proj": P(MODEL),
    "gate_up_proj": P(None, None, MODEL),
    "down_proj": P(MODEL),
    "weight": P(),  # of a norm
    "cache": P(DATA, MODEL),
    "eos_ids": P(),
    "step_costs": P(),
}
# Everything else has a leading axis of batch rows.
ROWS = P(DATA)
_MOST_PADDING = 0.02
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def make_mesh(
    data: int = 1, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return a mesh of `data` times `model` devices.

    Neighbours on the `model` axis, which talk in every layer, are neighbours in the list of
    devices: those of one host, as far as they reach.

    Args:
      data: parts that the rows of a batch are split into.
      model: parts that the model is split into.
      devices: what to take them from; None = all devices of all processes.

    Raises:
      ValueError: there are too few devices, or devices of some process would be left out.
    """
    devices = jax.devices() if devices is None else list(devices)
    for name, size in ((DATA, data), (MODEL, model)):
        check_count(f"mesh {name}", size, 1)
    needed, what = data * model, f"mesh data={data}, model={model}"
    if needed > len(devices):
        raise ValueError(f"{what} needs {needed} devices, but there are {len(devices)}")
    chosen = devices[:needed]
    idle = {device.process_index for device in devices} - {
        device.process_index for device in chosen
    }
    if idle:
        raise ValueError(
            f"{what} has {needed} devices, which leaves processes {sorted(idle)} without one: "
            f"expected all {len(devices)}"
        )
    grid = np.array(chosen).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def check_mesh(mesh: object) -> None:
    """Raise a one-line ValueError unless a mesh has the axes `data` and `model`."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, expected a jax.sharding.Mesh")
    if tuple(mesh.axis_names) != (DATA, MODEL):
        raise ValueError(f"mesh has axes {mesh.axis_names}, expected {(DATA, MODEL)}")
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) > 1 and len(processes) < jax.process_count():
        raise ValueError(
            f"mesh has devices of {len(processes)} processes, expected one or all "
            f"{jax.process_count()}"
        )
    if jax.process_index() not in processes:
        raise ValueError(
            f"mesh has no device of process {jax.process_index()}, expected some of each process "
            "that uses it"
        )


def shard_config(config: Qwen3Config, num_shards: int) -> Qwen3Config:
    """Return the shape of the part of a model that one device of the `model` axis holds.

    Key-value heads fewer than devices are held by several of them, each with its share of the query
    heads. The vocabulary is padded, see `vocab_part`.

    Args:
      config: the whole model.
      num_shards: devices of the axis.

    Returns:
      A configuration for its sizes only: it has no end-of-text ids.

    Raises:
      ValueError: the sizes do not divide; both numbers are in the message.
    """
    sizes = {}
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % num_shards:
            raise ValueError(f"{name}={size} is not a multiple of the mesh's model={num_shards}")
        sizes[name] = size // num_shards
    kv_heads = config.num_key_value_heads
    if kv_heads % num_shards and num_shards % kv_heads:
        raise ValueError(
            f"num_key_value_heads={kv_heads} and the mesh's model={num_shards}: neither is a "
            "multiple of the other"
        )
    return dataclasses.replace(
        config,
        **sizes,
        num_key_value_heads=max(kv_heads // num_shards, 1),
        vocab_size=vocab_part(config.vocab_size, num_shards),
        eos_token_ids=(),
        num_valid_tokens=None,
    )


def vocab_part(vocab_size: int, num_shards: int) -> int:
    """Return the ids of one device, padding included.

    Of 128 ids a device, the kernels' blocks of columns are whole; or of 64, 32 and so on, where
    the padding would be more than 2 %.
    """
    unit = math.gcd(vocab_size, 128)
    while unit > 1 and -vocab_size % (unit * num_shards) > _MOST_PADDING * vocab_size:
        unit //= 2
    return -(-vocab_size // (unit * num_shards)) * unit


def shard_ranges(config: Qwen3Config, num_shards: int, index: int) -> dict[str, slice]:
    """Return which part of each axis of the whole parameters one device holds.

    Args:
      config: the whole model.
      num_shards: devices of the `model` axis.
      index: the device's place on it.

    Returns:
      Slices of the axes V (vocabulary, which may end before the device's rows do: the rest is
      padding), K (key-value heads), G (query heads of one of them) and F (feed-forward width).
    """
    shape = shard_config(config, num_shards)
    first = index * shape.vocab_size
    sharing = max(num_shards // config.num_key_value_heads, 1)
    kv_head, place = index // sharing * shape.num_key_value_heads, index % sharing
    groups, inner = shape.num_query_groups, shape.intermediate_size
    return {
        "V": slice(min(first, config.vocab_size), min(first + shape.vocab_size, config.vocab_size)),
        "K": slice(kv_head, kv_head + shape.num_key_value_heads),
        "G": slice(place * groups, (place + 1) * groups),
        "F": slice(index * inner, (index + 1) * inner),
    }


def from_parts(mesh: Mesh, name: str, part: Callable[[int], np.ndarray]) -> jax.Array:
    """Return a parameter of which every device gets its own part, and no other.

    Args:
      mesh: the devices.
      name: of the parameter, as in `SPECS`.
      part: returns the host's copy of the part of a place on the `model` axis; asked once for each
        place that this process has devices of, or once in all if the parts are the same.
    """
    spec = SPECS[name]
    columns = mesh.devices.T if MODEL in spec else mesh.devices.reshape(1, -1)
    arrays = []
    for index, column in enumerate(columns):
        devices = [device for device in column if device.process_index == jax.process_index()]
        if devices:
            value = part(index)
            arrays += [jax.device_put(value, device) for device in devices]
    shape = list(arrays[0].shape)
    if MODEL in spec:
        shape[spec.index(MODEL)] *= len(columns)
    return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), arrays)


def place(mesh: Mesh | None, value: np.ndarray, spec: P = ROWS) -> jax.Array:
    """Return an array of a value that all processes have, on a mesh or the default device."""
    if mesh is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, spec), lambda index: value[index]
    )


def check_alike(*values: object) -> None:
    """Raise a one-line ValueError unless all processes of the run have values of the same text.

    Else they would wait for each other in different places. Addresses in the text do not count.
    """
    texts = [_ADDRESS.sub("", repr(value)) for value in values]
    digest = hashlib.sha256(repr(texts).encode()).digest()
    everywhere = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    if len(np.unique(everywhere, axis=0)) > 1:
        raise ValueError(
            "the processes of this run have different models, prompts or settings: expected the "
            "same in all of them"
        )


def fetch(tree: Any) -> Any:
    """Return a tree of arrays on the host, those of other processes' devices included."""
    for leaf in jax.tree.leaves(tree):
        if not leaf.is_fully_addressable:
            tree = _replicate(leaf.sharding.mesh)(tree)
            break
    return jax.device_get(tree)


@functools.lru_cache(maxsize=16)
def _replicate(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


@dataclasses.dataclass(frozen=True)
class ModelAxis:
    """The devices that share a model, as seen from the code that runs on one of them.

    With one device every method returns its argument, and no program has a collective.

    Attributes:
      size: number of devices.
    """

    size: int = 1

    @property
    def index(self) -> Array | int:
        """Return the place of this device, i32."""
        return jax.lax.axis_index(MODEL) if self.size > 1 else 0

    def sum(self, x: Array) -> Array:
        """Return the sum of the devices' arrays."""
        return jax.lax.psum(x, MODEL) if self.size > 1 else x

    def gather(self, x: Array, axis: int) -> Array:
        """Return the devices' arrays side by side, in the order of their places."""
        if self.size == 1:
            return x
        return jax.lax.all_gather(x, MODEL, axis=axis, tiled=True)

    def spread_rows(self, x: Array, num_columns: int) -> Array:
        """Turn some columns of all rows into all columns of some rows.

        What needs whole rows, filters of logits say, so is shared among the devices too.

        Args:
          x: [R, V'], this device's columns.
          num_columns: V, columns of all devices together that are no padding.

        Returns:
          [R', V], this device's rows; the last device's may be padding.
        """
        if self.size == 1:
            return x
        x = jnp.pad(x, ((0, -x.shape[0] % self.size), (0, 0)))
        whole = jax.lax.all_to_all(x, MODEL, split_axis=0, concat_axis=1, tiled=True)
        return whole[:, :num_columns]

    def own_rows(self, x: Array) -> Array:
        """Return this device's rows, [R', ...], of an array [R, ...] that all devices have."""
        if self.size == 1:
            return x
        num_own = -(-x.shape[0] // self.size)
        more = [(0, num_own * self.size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return jax.lax.dynamic_slice_in_dim(jnp.pad(x, more), self.index * num_own, num_own)

    def collect_rows(self, x: Array, num_rows: int) -> Array:
        """Return all devices' rows, [R, ...], given this device's, [R', ...]."""
        return x if self.size == 1 else self.gather(x, axis=0)[:num_rows]


ONE_DEVICE = ModelAxis()


def model_size(mesh: Mesh | AbstractMesh | None) -> int:
    """Return the devices that share a model."""
    return 1 if mesh is None else mesh.shape[MODEL]


def spans_processes(mesh: Mesh | None) -> bool:
    """Return whether several processes have devices of a mesh."""
    return mesh is not None and mesh.is_multi_process


def data_size(mesh: Mesh | None) -> int:
    """Return the parts that the rows of a batch are split into."""
    return 1 if mesh is None else mesh.shape[DATA]
