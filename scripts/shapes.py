"""Models of the published Qwen3 sizes with random weights, for measurements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxspec import Qwen3, Qwen3Config
from jaxspec.placement import parameter_names
from jaxspec.sharding import MODEL, SPECS, model_size, shard_config

# Hidden size, layers, query heads, kv heads, feed-forward size, tied embeddings; then the width of
# a head and the rows of the vocabulary where they are not Qwen3's. "bundled" is the demo model.
_SIZES: dict[str, tuple[int, ...]] = {
    "0.6b": (1024, 28, 16, 8, 3072, True),
    "1.7b": (2048, 28, 16, 8, 6144, True),
    "4b": (2560, 36, 32, 8, 9728, True),
    "8b": (4096, 36, 32, 8, 12288, False),
    "14b": (5120, 40, 40, 8, 17408, False),
    "32b": (5120, 64, 64, 8, 25600, False),
    "bundled": (320, 8, 8, 4, 768, True, 64, 8192),
    "tiny": (48, 2, 4, 2, 96, False, 16, 320),
}
SHAPES = tuple(_SIZES)


def config_of(shape: str) -> Qwen3Config:
    """Return the configuration of a shape, as in the released `config.json`."""
    hidden, layers, heads, kv_heads, inner, is_tied, *rest = _SIZES[shape]
    head_dim, vocab_size = rest or (128, 151936)
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=bool(is_tied),
    )


def random_array(
    key: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    std: float = 1.0,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Return normal numbers, made in place on the devices that are to hold them."""
    return _random_program(sharding)(key, shape=shape, dtype=dtype, std=std)


@functools.lru_cache(maxsize=16)
def _random_program(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    def normal(
        key: jax.Array, *, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, std: float
    ) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)

    return jax.jit(normal, static_argnames=("shape", "dtype", "std"), out_shardings=sharding)


def random_model(
    config: Qwen3Config, dtype: jax.typing.DTypeLike, seed: int = 0, *, mesh: Mesh | None = None
) -> Qwen3:
    """Return a model with random matrices (standard deviation 0.02) and norms of 1.

    Every parameter is made by one program where it belongs: no second copy, nothing on the host,
    and on a mesh no more of it on a device than the device's part. Parts that devices hold
    together, of a key-value head say, differ: the model is for timing.

    Args:
      config: the whole model.
      dtype: of the parameters.
      seed: of the numbers.
      mesh: devices to spread it over, None = the default device.

    Raises:
      ValueError: the sizes do not divide by the mesh's.
    """
    shards = model_size(mesh)
    shape = config if mesh is None else shard_config(config, shards)
    model = nnx.eval_shape(lambda: Qwen3(shape, dtype=dtype, rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(model)
    key = jax.random.key(seed)
    values = []
    for index, (name, leaf) in enumerate(zip(parameter_names(model), leaves, strict=True)):
        spec, size = SPECS[name], list(leaf.shape)
        if MODEL in spec:
            size[spec.index(MODEL)] *= shards
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        if leaf.ndim > 1:
            part = jax.random.fold_in(key, index)
            value = random_array(
                part, shape=tuple(size), dtype=leaf.dtype, std=0.02, sharding=sharding
            )
        else:
            value = jnp.ones(tuple(size), leaf.dtype, device=sharding)
        values.append(value)
    model = jax.tree.unflatten(structure, values)
    model.config, model.mesh = config, mesh
    return model


def _own_sizes(tree: Any) -> list[tuple[int, ...]]:
    """Return the shape of one device's part of every array."""
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree)]


def weight_bytes(model: Qwen3) -> int:
    """Return the bytes of weights that a step reads: all but an embedding that is no head.

    On a mesh those that one device reads, which are those of its own part.
    """
    total = sum(map(math.prod, _own_sizes(model)))
    if model.lm_head is not None:
        total -= sum(map(math.prod, _own_sizes(model.embed_tokens)))
    return total * model.dtype.itemsize


def product_operations(model: Qwen3, num_tokens: int) -> int:
    """Return the operations of the products of a prefill and its first token, on one device.

    Two for each multiply and add: those of the layers for all tokens but the last, and one row of
    the head.
    """
    layers = sum(math.prod(size) for size in _own_sizes(model.layers) if len(size) > 1)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    return 2 * (layers * (num_tokens - 1) + math.prod(_own_sizes(head)[0]))


def key_value_bytes(
    config: Qwen3Config, num_tokens: int, itemsize: int, *, num_shards: int = 1
) -> int:
    """Return the bytes of the keys and values of so many tokens.

    Args:
      config: the whole model.
      num_tokens: of all texts whose rows one device has.
      itemsize: bytes of a number.
      num_shards: devices that share the model; the bytes are those of one of them.
    """
    heads = shard_config(config, num_shards).num_key_value_heads
    return 2 * config.num_hidden_layers * heads * config.head_dim * num_tokens * itemsize
