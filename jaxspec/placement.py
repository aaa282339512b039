"""A model as compiled functions take it: its arrays listed, or spread over a mesh of devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.model import Qwen3
from jaxspec.sharding import (
    SPECS,
    ModelAxis,
    check_mesh,
    from_parts,
    model_size,
    shard_config,
    shard_ranges,
)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class FlatModel:
    """A model whose arrays are listed, for functions that are called again and again.

    To pass a module to a compiled function costs some milliseconds, which go into listing its
    arrays in Python; this costs a few hundredths.

    Attributes:
      arrays: the model's parameters.
      structure: what they belong to.
      mesh: the devices that the model is spread over, None = one.
    """

    # Any: JAX puts whatever stands for an array in its place.
    arrays: tuple[Any, ...]
    structure: jax.tree_util.PyTreeDef
    # Any: a Mesh, or an AbstractMesh where a program is lowered for devices that are not there.
    mesh: Any

    @classmethod
    def of(cls, model: Qwen3) -> FlatModel:
        """List a model's arrays."""
        arrays, structure = jax.tree.flatten(model)
        return cls(tuple(arrays), structure, model.mesh)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arrays, and what is known while tracing, for JAX."""
        return self.arrays, (self.structure, self.mesh)

    @classmethod
    def tree_unflatten(cls, known: tuple[Any, ...], arrays: Sequence[Any]) -> FlatModel:
        """Put arrays and structure together, for JAX."""
        return cls(tuple(arrays), *known)


def whole_model(model: Qwen3 | FlatModel) -> Qwen3:
    """Return the model itself."""
    if isinstance(model, FlatModel):
        return jax.tree.unflatten(model.structure, model.arrays)
    return model


def over_mesh(
    function: Callable[..., Any],
    model: Qwen3 | FlatModel,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """Return `function(model, *arrays)` as a function of the arrays, run on the model's devices.

    Each device runs it with its part of model and arrays. The one place where code for one device
    meets a mesh; without a mesh it is a plain call.

    Args:
      function: of a model and arrays; what it returns is parts too.
      model: the model.
      in_specs: partition specs of the arrays, or of the first levels of their trees.
      out_specs: of the result.
    """
    whole = whole_model(model)
    mesh = whole.mesh
    if mesh is None:
        return functools.partial(function, whole)
    arrays, structure = jax.tree.flatten(whole)

    def run(parts: Sequence[jax.Array], *args: Any) -> Any:
        part = jax.tree.unflatten(structure, parts)
        part.mesh, part.axis = None, ModelAxis(model_size(mesh))
        return function(part, *args)

    # A device's arrays need not be what other devices have: no check that they are.
    shared = jax.shard_map(
        run, mesh=mesh, in_specs=(parameter_specs(whole), *in_specs), out_specs=out_specs,
        check_vma=False,
    )  # fmt: skip
    return functools.partial(shared, arrays)


def parameter_specs(model: Qwen3) -> list[P]:
    """Return the partition spec of every parameter, in the order of the model's arrays."""
    return [SPECS[name] for name in parameter_names(model)]


def parameter_names(model: Qwen3) -> list[str]:
    """Return the name, as in the table of partition specs, of every array of a model, in order."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(model)[0]]
    named = [[str(getattr(key, "name", "")) for key in path] for path in paths]
    return [next(name for name in reversed(names) if name in SPECS) for names in named]


def spread(model: Qwen3, mesh: Mesh) -> Qwen3:
    """Return a copy of a whole model that is spread over a mesh.

    Args:
      model: the model, its parameters in this process.
      mesh: the devices, on the axes `data` and `model`.

    Raises:
      ValueError: the model is spread already, or its sizes do not divide by the mesh's.
    """
    check_mesh(mesh)
    if model.mesh is not None:
        raise ValueError("the model is spread over a mesh already")
    shards = model_size(mesh)
    shape = shard_config(model.config, shards)
    arrays, structure = jax.tree.flatten(model)

    def part(name: str, array: jax.Array, index: int) -> np.ndarray:
        value, ranges = np.asarray(array), shard_ranges(model.config, shards, index)
        if name in ("embed_tokens", "lm_head"):
            value = value[ranges["V"]]
            return np.pad(value, ((0, shape.vocab_size - len(value)), (0, 0)))
        if name == "qkv_proj":
            value = value[:, ranges["K"]]
            query, key_value = value[:, :, :-2][:, :, ranges["G"]], value[:, :, -2:]
            return np.concatenate([query, key_value], axis=2)
        if name == "o_proj":
            return value[ranges["K"], ranges["G"]]
        if name == "gate_up_proj":
            return value[:, :, ranges["F"]]
        return value[ranges["F"]] if name == "down_proj" else value

    parts = [
        from_parts(mesh, name, functools.partial(part, name, array))
        for name, array in zip(parameter_names(model), arrays, strict=True)
    ]
    result = jax.tree.unflatten(structure, parts)
    result.mesh = mesh
    return result
