"""Qwen3 in Flax NNX: (block tokens, cached length, cache, layout) -> logits, the block's K/V.

Modules only declare parameters and compute; they hold no state and are passed to `jax.jit` as
arguments.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.attention import attend
from jaxspec.cache import KeyValue, KVCache
from jaxspec.config import Qwen3Config
from jaxspec.layout import BlockLayout


def _einsum(spec: str, *operands: jax.Array, out_dtype: jax.typing.DTypeLike | None = None):
    """Contract with float32 accumulation; float32 operands use full float32 products.

    A GPU's default for float32 operands is TF32, which is no float32.
    """
    is_float32 = all(x.dtype == jnp.float32 for x in operands)
    precision = jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=out_dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in the cast order of transformers.

    Statistics in float32, the normalised value cast back to the input's dtype, then the weight.
    """

    def __init__(self, width: int, *, eps: float, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...]
        return (wide * scale).astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def rope_frequencies(config: Qwen3Config) -> np.ndarray:
    """Return the H / 2 rotary frequencies in radians per position, float32.

    Source: transformers `modeling_rope_utils.py`, default and YaRN; Peng et al. 2023.
    """
    half = config.head_dim // 2
    exponent = np.arange(half, dtype=np.float32) * 2 / config.head_dim
    plain = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    yarn = config.rope_scaling
    if yarn is None:
        return plain

    def index_of(num_rotations: float) -> float:
        """Frequency index that turns `num_rotations` times over the original context."""
        wavelength = yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = index_of(yarn.beta_fast), index_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    return (plain / np.float32(yarn.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def rope_tables(
    config: Qwen3Config, positions: Int[Array, "B T"], dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Return cos and sin for 0-based positions, computed in float32 and cast to `dtype`."""
    frequencies = jnp.asarray(rope_frequencies(config))
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    scale = config.rope_scaling.cos_sin_scale if config.rope_scaling else 1.0
    return (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T H2"], sin: Float[Array, "B T H2"]
) -> Float[Array, "B T *heads H"]:
    """Rotate the pairs (k, k + H/2) of every head: the half-rotation form, not interleaved."""
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with per-head q/k norms before RoPE.

    Parameters: `qkv_proj [D, K, G+2, H]` (the G query heads of a kv head, its key, its value: so
    that one split over K shards all three), `o_proj [K, G, H, D]`, `q_norm`, `k_norm` `[H]`.
    """

    def __init__(self, config: Qwen3Config, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        width, kv_heads = config.hidden_size, config.num_key_value_heads
        groups, head_dim = config.num_query_groups, config.head_dim
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_hidden_layers))
        self.qkv_proj = nnx.Param(
            init(rngs.params(), (width, kv_heads, groups + 2, head_dim), dtype)
        )
        self.o_proj = nnx.Param(out_init(rngs.params(), (kv_heads, groups, head_dim, width), dtype))
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cos: Float[Array, "B T H2"],
        sin: Float[Array, "B T H2"],
        num_cached: Int[Array, "B"],
        cache: KeyValue | None,
        layout: BlockLayout,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return the attention output and the block's own keys and values, `[B, K, T, H]`."""
        qkv = _einsum("BTD,DKXH->BTKXH", x, self.qkv_proj[...])
        query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        query = rotate(self.q_norm(query), cos, sin)
        key = rotate(self.k_norm(key), cos, sin)
        block = (key.swapaxes(1, 2), value.swapaxes(1, 2))
        out = attend(query, num_cached, layout, cache=cache, block=block)
        return _einsum("BTKGH,KGHD->BTD", out, self.o_proj[...]), block


class FeedForward(nnx.Module):
    """SwiGLU block. Parameters: `gate_up_proj [D, 2, F]`, `down_proj [F, D]`."""

    def __init__(self, config: Qwen3Config, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_hidden_layers))
        self.gate_up_proj = nnx.Param(init(rngs.params(), (width, 2, inner), dtype))
        self.down_proj = nnx.Param(out_init(rngs.params(), (inner, width), dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate_up = _einsum("BTD,DXF->BTXF", x, self.gate_up_proj[...])
        hidden = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return _einsum("BTF,FD->BTD", hidden, self.down_proj[...])


class DecoderLayer(nnx.Module):
    """One transformer layer, pre-norm."""

    def __init__(self, config: Qwen3Config, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cos: Float[Array, "B T H2"],
        sin: Float[Array, "B T H2"],
        num_cached: Int[Array, "B"],
        cache: KeyValue | None,
        layout: BlockLayout,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        with jax.named_scope("attention"):
            normed = self.input_layernorm(x)
            attended, kv = self.self_attn(normed, cos, sin, num_cached, cache, layout)
            x = x + attended
        with jax.named_scope("feed_forward"):
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x, kv


class Qwen3(nnx.Module):
    """A dense Qwen3 decoder.

    Source: transformers `modeling_qwen3.py`; ours processes a block of rows under a static
    layout and fuses qkv and gate+up.

    Args:
      config: the model's shape.
      dtype: of parameters and activations.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        init = nnx.initializers.normal(0.02)
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(init(rngs.params(), shape, dtype))
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        # [V, D] as the embedding is, so that tied and untied heads are one code path.
        self.lm_head = (
            None if config.tie_word_embeddings else nnx.Param(init(rngs.params(), shape, dtype))
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of parameters and activations."""
        return self.embed_tokens[...].dtype

    def __call__(
        self,
        block_tokens: Int[Array, "B T"],
        num_cached: Int[Array, "B"],
        cache: KVCache | None,
        layout: BlockLayout,
    ) -> tuple[Float[Array, "B R V"], KVCache]:
        """Run one block of rows through the model.

        Args:
          block_tokens: ids of the rows; ids outside 0..V-1 are clipped (unused rows).
          num_cached: live cache slots per row of the batch = position of the block's row 0.
          cache: the KV cache, or None: the block is then all there is to see.
          layout: positions, visibility and logit rows of the block.

        Returns:
          The float32 logits of the layout's R `logit_rows`, and per layer the block's own keys
          and values, `[B, K, T, H]`. The cache is only read; `jaxspec.cache` writes it.
        """
        hidden, kv = self.hidden_states(block_tokens, num_cached, cache, layout)
        return self.logits(hidden, layout), kv

    def hidden_states(
        self,
        block_tokens: Int[Array, "B T"],
        num_cached: Int[Array, "B"],
        cache: KVCache | None,
        layout: BlockLayout,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Return the last layer's output before the final norm, and the block's K/V."""
        table = self.embed_tokens[...]
        x = table[jnp.clip(block_tokens, 0, self.config.vocab_size - 1)]
        positions = num_cached[:, None] + jnp.asarray(layout.depth, jnp.int32)[None]
        cos, sin = rope_tables(self.config, positions, x.dtype)
        kv = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[index]
            x, layer_kv = layer(x, cos, sin, num_cached, layer_cache, layout)
            kv.append(layer_kv)
        return x, tuple(kv)

    def logits(self, hidden: Float[Array, "B T D"], layout: BlockLayout) -> Float[Array, "B R V"]:
        """Return float32 logits of the layout's logit rows."""
        if len(layout.logit_rows) < layout.num_rows:
            hidden = hidden[:, np.asarray(layout.logit_rows, dtype=np.int32)]
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("lm_head"):
            return _einsum("BRD,VD->BRV", self.norm(hidden), head[...], out_dtype=jnp.float32)
