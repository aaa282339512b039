"""Models of the published Qwen3 sizes with random weights, for measurements."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec import Qwen3, Qwen3Config

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


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "std"))
def random_array(
    key: jax.Array, *, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, std: float = 1.0
) -> jax.Array:
    """Return normal numbers, made on the device and in place."""
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


def random_model(config: Qwen3Config, dtype: jax.typing.DTypeLike, seed: int = 0) -> Qwen3:
    """Return a model with random matrices (standard deviation 0.02) and norms of 1.

    Every parameter is made by one program on the device: no second copy, nothing on the host.
    """
    model = nnx.eval_shape(lambda: Qwen3(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    leaves, structure = jax.tree.flatten(parameters)
    key = jax.random.key(seed)
    values = [
        random_array(jax.random.fold_in(key, index), shape=leaf.shape, dtype=leaf.dtype, std=0.02)
        if len(leaf.shape) > 1
        else jnp.ones(leaf.shape, leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]
    return nnx.merge(graph, jax.tree.unflatten(structure, values))


def weight_bytes(model: Qwen3) -> int:
    """Return the bytes of weights that a step reads: all but an embedding that is no head."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    return total if model.lm_head is None else total - model.embed_tokens[...].nbytes


def matrix_parameters(model: Qwen3) -> int:
    """Return the number of weights in the layers' products."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.layers) if leaf.ndim > 1)


def key_value_bytes(config: Qwen3Config, num_tokens: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of so many tokens."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * num_tokens * itemsize
