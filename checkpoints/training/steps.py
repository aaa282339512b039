"""The training step: forward without a cache, loss, AdamW update; one program for the whole run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.model import Attention, FeedForward, Qwen3, rope_tables, rotate

if TYPE_CHECKING:
    import optax

AttentionName = Literal["cudnn", "xla"]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Settings of one training step that shape its program.

    Attributes:
      attention: implementation of `jax.nn.dot_product_attention`; cudnn needs a GPU and bfloat16.
      compute_dtype: of activations and of the weights as the forward sees them.
      dropout: rate on the output of every attention and feed-forward block.
      weight_decay: AdamW's, on matrices only.
      max_grad_norm: gradients are scaled down to this norm.
    """

    attention: AttentionName = "xla"
    compute_dtype: str = "bfloat16"
    dropout: float = 0.05
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of windows.

    Attributes:
      tokens: i32[B, T+1]; the model reads the first T and predicts the last T.
      likelihood_end: i32[B]; targets from this index of `tokens` on are not learnt.
      penalty_start: i32[B]; targets from this index on continue a loop and are made unlikely.
    """

    tokens: jax.Array
    likelihood_end: jax.Array
    penalty_start: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Float32 parameters and the optimizer's state."""

    params: Any
    optimizer: Any


def hidden_states(
    model: Qwen3,
    tokens: Int[Array, "B T"],
    *,
    attention: AttentionName = "xla",
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> Float[Array, "B T D"]:
    """Return what `Qwen3.hidden_states` returns without a cache, by a fused causal attention.

    Args:
      model: the model.
      tokens: ids, all valid.
      attention: implementation of `jax.nn.dot_product_attention`.
      dropout: rate on the output of every block; 0 = none.
      key: random key for the dropout.
    """
    x = model.embed_tokens[...][tokens].astype(model.norm.weight[...].dtype)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    cos, sin = rope_tables(model.config, positions, x.dtype)
    keys = (
        [None] * (2 * len(model.layers))
        if key is None
        else jax.random.split(key, (2 * len(model.layers),))
    )
    for index, layer in enumerate(model.layers):
        attended = _attend(layer.self_attn, layer.input_layernorm(x), cos, sin, attention)
        x = x + _drop(attended, dropout, keys[2 * index])
        fed = _feed_forward(layer.mlp, layer.post_attention_layernorm(x))
        x = x + _drop(fed, dropout, keys[2 * index + 1])
    return x


def _attend(
    module: Attention,
    x: Float[Array, "B T D"],
    cos: Float[Array, "B T H2"],
    sin: Float[Array, "B T H2"],
    attention: AttentionName,
) -> Float[Array, "B T D"]:
    qkv = jnp.einsum("BTD,DKXH->BTKXH", x, module.qkv_proj[...])
    query = rotate(module.q_norm(qkv[..., :-2, :]), cos, sin)
    key = rotate(module.k_norm(qkv[..., -2, :]), cos, sin)
    heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
    attend: Callable[..., jax.Array] = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=attention
    )
    if attention == "xla":
        # Without it the float32 scores of every layer would be kept for the backward pass.
        attend = jax.checkpoint(attend)
    out = attend(heads, key, qkv[..., -1, :]).reshape(query.shape)
    return jnp.einsum("BTKGH,KGHD->BTD", out, module.o_proj[...])


def _feed_forward(module: FeedForward, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    # A GPU's default for float32 operands is TF32, which is no float32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    both = jnp.einsum("BTD,DXF->BTXF", x, module.gate_up_proj[...], precision=precision)
    hidden = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
    return jnp.einsum("BTF,FD->BTD", hidden, module.down_proj[...], precision=precision)


def _drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))


def _logits(model: Qwen3, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    return jnp.einsum(
        "BTD,VD->BTV",
        model.norm(hidden),
        head[...].astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def log_likelihoods(
    model: Qwen3, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the float32 log-probability of each target."""
    logits = _logits(model, hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def batch_loss(
    log_probs: Float[Array, "B T"], batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return (objective, mean negative log-likelihood of the learnt targets).

    The objective adds the unlikelihood -log(1 - p) of tokens that continue a loop.
    Source: Welleck et al. 2020; loops made from training text as in Xu et al. 2022 (DITTO), whose
    target is a falling probability where ours is zero.
    """
    index = jnp.arange(1, log_probs.shape[1] + 1)[None]
    is_learnt = index < batch.likelihood_end[:, None]
    is_penalised = index >= batch.penalty_start[:, None]
    num_learnt = jnp.sum(is_learnt, dtype=log_probs.dtype)
    nll = -jnp.sum(jnp.where(is_learnt, log_probs, 0.0)) / num_learnt
    # 1 - p without cancellation; p is kept below one, where its logarithm would be infinite.
    unlikelihood = -jnp.log(-jnp.expm1(jnp.minimum(log_probs, -1e-6)))
    penalty = jnp.sum(jnp.where(is_penalised, unlikelihood, 0.0)) / log_probs.size
    return nll + penalty, nll


def make_optimizer(config: StepConfig) -> optax.GradientTransformation:
    """Return AdamW without its learning rate, which every step is given."""
    # Imported here because only training needs it: the script says so where it is missing.
    import optax

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda params: jax.tree.map(lambda w: w.ndim > 1, params)
        ),
    )


def init_state(model: Qwen3, config: StepConfig) -> tuple[Any, TrainState]:
    """Return (graph definition of the model, state with its parameters)."""
    graph, params = nnx.split(model)
    return graph, TrainState(params, make_optimizer(config).init(params))


def cast(params: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Return the parameters in `dtype`."""
    return jax.tree.map(lambda w: w.astype(dtype), params)


def _compute_model(graph: Any, params: Any, config: StepConfig) -> Qwen3:
    """Return the model in the compute dtype, but for the embedding.

    The gradient of a lookup adds up thousands of rows for a frequent token, which bfloat16 loses.
    """
    lower = cast(params, config.compute_dtype)
    lower["embed_tokens"] = params["embed_tokens"]
    return nnx.merge(graph, lower)


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def train_step(
    graph: Any,
    state: TrainState,
    batch: Batch,
    learning_rate: Float[Array, ""],
    key: jax.Array,
    *,
    config: StepConfig,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after one step, and its loss and gradient norm.

    A step whose gradients are not finite changes nothing.
    """

    def objective(params: Any) -> tuple[jax.Array, jax.Array]:
        model = _compute_model(graph, params, config)
        hidden = hidden_states(
            model,
            batch.tokens[:, :-1],
            attention=config.attention,
            dropout=config.dropout,
            key=key if config.dropout > 0 else None,
        )
        return batch_loss(log_likelihoods(model, hidden, batch.tokens[:, 1:]), batch)

    (_, nll), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        updates, optimizer = make_optimizer(config).update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda w, u: w - learning_rate * u, state.params, updates)
    new = TrainState(params, optimizer)
    is_finite = jnp.isfinite(norm)
    kept = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, state)
    return kept, {"loss": nll, "grad_norm": norm}


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def evaluate_step(
    graph: Any, params: Any, tokens: Int[Array, "B T1"], *, config: StepConfig
) -> Float[Array, "B T"]:
    """Return the log-likelihoods of a batch of windows."""
    model = _compute_model(graph, params, config)
    hidden = hidden_states(model, tokens[:, :-1], attention=config.attention)
    return log_likelihoods(model, hidden, tokens[:, 1:])


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def greedy_step(
    graph: Any, params: Any, tokens: Int[Array, "B T1"], *, config: StepConfig
) -> Int[Array, "B T"]:
    """Return the likeliest of all ids in the place of each of the last T tokens."""
    model = _compute_model(graph, params, config)
    hidden = hidden_states(model, tokens[:, :-1], attention=config.attention)
    return jnp.argmax(_logits(model, hidden), axis=-1)


def learning_rate(
    progress: float, step: int, *, peak: float, warmup_steps: int, hold: float = 0.2
) -> float:
    """Return the rate at a step: linear warm-up, constant until `hold`, linear to zero.

    Args:
      progress: share of the training that is over, 0 to 1; of its time where time is the limit.
      step: steps done.
      peak: highest rate.
      warmup_steps: steps of the warm-up.
      hold: progress at which the decay begins.
    """
    decay = (1 - progress) / (1 - hold) if progress > hold else 1.0
    return peak * min(1.0, (step + 1) / warmup_steps) * min(max(decay, 0.0), 1.0)
