"""Qwen3 in Flax NNX: (block tokens, cached length, cache, layout) -> logits, the block's K/V.

Modules only declare parameters and compute; they hold no state and are passed to `jax.jit` as
arguments.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.cache import KeyValue, KVCache
from jaxspec.config import Qwen3Config
from jaxspec.layout import BlockLayout
from jaxspec.sharding import (
    ModelAxis,
)
from pallas_kernels import (
    PreNorm,
    attention,
    block_attention,
    linear,
    linear_residual,
    pre_norm,
    rms_linear,
    rms_swiglu,
)
from pallas_kernels.attention import norm
from pallas_kernels.attention import rotate as rotate
from pallas_kernels.dispatch import Implementation
from pallas_kernels.linear import MAX_HEAD_ROWS, MAX_ROWS


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in the cast order of transformers.

    Statistics in float32, the normalised value cast back to the input's dtype, then the weight.
    In the model's own forward the kernels around a norm apply its weight.
    """

    def __init__(self, width: int, *, eps: float, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return norm(x, self.weight[...], self.eps)


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


@dataclasses.dataclass(frozen=True)
class Block:
    """What all layers need to know of the block of rows that runs through them.

    Attributes:
      cos: `[B, T, H/2]` cosines of the rows' rotary angles.
      sin: their sines.
      num_cached: i32[B] live cache slots = position of row 0.
      layout: the block's layout.
      kernels: implementation of the kernels, None = the best available.
      axis: the devices that share the model.
    """

    cos: jax.Array
    sin: jax.Array
    num_cached: jax.Array
    layout: BlockLayout
    kernels: Implementation | None
    axis: ModelAxis

    @property
    def product_kernels(self) -> Implementation | None:
        """Return the implementation of products with the block's rows."""
        return product_kernels(self.kernels, self.cos.shape[0] * self.cos.shape[1])


def product_kernels(
    kernels: Implementation | None, num_rows: int, most: int = MAX_ROWS
) -> Implementation | None:
    """Return the implementation of a product with so many rows."""
    return kernels if num_rows <= most else "xla"


def add_product(
    x: Float[Array, "R K"],
    weight: Float[Array, "K D"],
    rows: PreNorm,
    next_norm: RMSNorm,
    counters: jax.Array | None,
    block: Block,
) -> tuple[PreNorm, jax.Array | None]:
    """Add x @ weight to the residual stream, and prepare it for the norm that follows.

    Where devices share the model, x and weight are one device's part of the inner axis: this is
    the place of a layer where they talk, once after attention and once after the feed-forward part.
    Their products are summed in the dtype of the residual stream, as each has been rounded to it.
    """
    norm_weight = next_norm.weight[...]
    is_shared = block.axis.size > 1
    product, counters = linear_residual(
        x,
        weight,
        jnp.zeros_like(rows.x) if is_shared else rows.x,
        norm_weight,
        counters,
        implementation=block.product_kernels,
    )
    if is_shared:
        product = pre_norm(rows.x + block.axis.sum(product.x), norm_weight)
    return product, counters


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
        self.eps = config.rms_norm_eps

    def __call__(
        self,
        rows: PreNorm,
        next_norm: RMSNorm,
        cache: KeyValue | None,
        counters: jax.Array | None,
        block: Block,
    ) -> tuple[PreNorm, KeyValue, jax.Array | None]:
        """Return the residual stream after attention, the block's own K/V, and the counters."""
        weight, batch_size = self.qkv_proj[...], block.num_cached.shape[0]
        width, *heads = weight.shape
        qkv, counters = rms_linear(
            rows,
            weight.reshape(width, -1),
            counters,
            eps=self.eps,
            implementation=block.product_kernels,
        )
        cache_key, cache_value = cache or (None, None)
        out, key, value, counters = block_attention(
            qkv.reshape(batch_size, -1, *heads),
            block.cos,
            block.sin,
            self.q_norm.weight[...],
            self.k_norm.weight[...],
            cache_key,
            cache_value,
            block.num_cached,
            counters,
            mask=None if block.layout.is_linear else block.layout.packed_mask,
            eps=self.eps,
            implementation=block.kernels,
        )
        weight = self.o_proj[...].reshape(-1, width)
        out = out.reshape(qkv.shape[0], -1)
        rows, counters = add_product(out, weight, rows, next_norm, counters, block)
        return rows, (key, value), counters


class FeedForward(nnx.Module):
    """SwiGLU block. Parameters: `gate_up_proj [D, 2, F]`, `down_proj [F, D]`."""

    def __init__(self, config: Qwen3Config, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_hidden_layers))
        self.gate_up_proj = nnx.Param(init(rngs.params(), (width, 2, inner), dtype))
        self.down_proj = nnx.Param(out_init(rngs.params(), (inner, width), dtype))
        self.eps = config.rms_norm_eps

    def __call__(
        self, rows: PreNorm, next_norm: RMSNorm, counters: jax.Array | None, block: Block
    ) -> tuple[PreNorm, jax.Array | None]:
        """Return the residual stream after the feed-forward part, and the counters."""
        hidden, counters = rms_swiglu(
            rows,
            self.gate_up_proj[...],
            counters,
            eps=self.eps,
            implementation=block.product_kernels,
        )
        return add_product(hidden, self.down_proj[...], rows, next_norm, counters, block)


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
        rows: PreNorm,
        next_norm: RMSNorm,
        cache: KeyValue | None,
        counters: jax.Array | None,
        block: Block,
    ) -> tuple[PreNorm, KeyValue, jax.Array | None]:
        """Return the residual stream ready for the next norm, the block's K/V, the counters."""
        with jax.named_scope("attention"):
            rows, kv, counters = self.self_attn(
                rows, self.post_attention_layernorm, cache, counters, block
            )
        with jax.named_scope("feed_forward"):
            rows, counters = self.mlp(rows, next_norm, counters, block)
        return rows, kv, counters


class Qwen3(nnx.Module):
    """A dense Qwen3 decoder.

    Source: transformers `modeling_qwen3.py`; ours processes a block of rows under a static
    layout and fuses qkv and gate+up.

    Args:
      config: the model's shape.
      dtype: of parameters and activations.
      rngs: source of the initial weights.

    Attributes:
      mesh: the devices that the parameters are spread over, None = they are whole. A spread model
        runs inside `over_mesh` only.
      axis: inside it, the devices that share the model; the parameters are this device's part.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.mesh: Mesh | None = None
        self.axis = ModelAxis()
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
        kernels: Implementation | None = None,
    ) -> tuple[Float[Array, "B R V"], KVCache]:
        """Run one block of rows through the model.

        Args:
          block_tokens: ids of the rows; ids outside 0..V-1 are clipped (unused rows).
          num_cached: live cache slots per row of the batch = position of the block's row 0.
          cache: the KV cache, or None: the block is then all there is to see.
          layout: positions, visibility and logit rows of the block.
          kernels: implementation of the kernels, None = the best available.

        Returns:
          The float32 logits of the layout's R `logit_rows`, and per layer the block's own keys
          and values, `[B, K, T, H]`. The cache is only read; `jaxspec.cache` writes it.
        """
        rows, kv = self.hidden_states(block_tokens, num_cached, cache, layout, kernels)
        return self.logits(rows, layout, kernels), kv

    def hidden_states(
        self,
        block_tokens: Int[Array, "B T"],
        num_cached: Int[Array, "B"],
        cache: KVCache | None,
        layout: BlockLayout,
        kernels: Implementation | None = None,
    ) -> tuple[PreNorm, KVCache]:
        """Return the last layer's output, one row per token of the block, and the block's K/V."""
        if self.mesh is not None:
            raise ValueError(
                "the model is spread over a mesh: call it inside jaxspec.placement.over_mesh"
            )
        x = self._embed(block_tokens)
        positions = num_cached[:, None] + jnp.asarray(layout.depth, jnp.int32)[None]
        cos, sin = rope_tables(self.config, positions, x.dtype)
        block = Block(cos, sin, num_cached, layout, kernels, self.axis)
        norms = [layer.input_layernorm for layer in self.layers] + [self.norm]
        rows = pre_norm(x.reshape(-1, x.shape[-1]), norms[0].weight[...])
        heads, inner = self.layers[0].self_attn.qkv_proj.shape[1:], self.layers[0].mlp.down_proj
        columns = max(x.shape[-1], math.prod(heads), inner.shape[0])
        most = max(
            attention.num_counters((*block_tokens.shape, *heads)), linear.num_counters(columns)
        )
        counters: jax.Array | None = jnp.zeros((most,), jnp.int32)
        kv = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[index]
            rows, layer_kv, counters = layer(rows, norms[index + 1], layer_cache, counters, block)
            kv.append(layer_kv)
        return rows, tuple(kv)

    def _embed(self, block_tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the embeddings of ids, clipped to the vocabulary."""
        table, ids = self.embed_tokens[...], jnp.clip(block_tokens, 0, self.config.vocab_size - 1)
        if self.axis.size == 1:
            return table[ids]
        ids = ids - self.axis.index * table.shape[0]
        is_here = (ids >= 0) & (ids < table.shape[0])
        x = jnp.where(is_here[..., None], table[jnp.clip(ids, 0, table.shape[0] - 1)], 0)
        return self.axis.sum(x)

    def logits(
        self, rows: PreNorm, layout: BlockLayout, kernels: Implementation | None = None
    ) -> Float[Array, "B R V"]:
        """Return float32 logits of the layout's logit rows: of the ids of this device's part."""
        batch_size = rows.x.shape[0] // layout.num_rows
        if len(layout.logit_rows) < layout.num_rows:
            first = np.arange(batch_size)[:, None] * layout.num_rows
            chosen = (first + np.asarray(layout.logit_rows)).reshape(-1)
            rows = PreNorm(
                rows.x[chosen], rows.norm_weight, rows.scaled[chosen], rows.sum_squares[chosen]
            )
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("lm_head"):
            logits, _ = rms_linear(
                rows,
                head[...],
                eps=self.config.rms_norm_eps,
                transposed=True,
                out_dtype=jnp.float32,
                implementation=product_kernels(kernels, rows.x.shape[0], MAX_HEAD_ROWS),
            )
        return logits.reshape(batch_size, -1, logits.shape[-1])
