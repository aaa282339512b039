"""What a model is and what a call asks for: frozen, validated, hashable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.text import check_stops

# Ids, slots and positions are int32.
_MAX_SIZE = 2**31 - 1
_EPS_BOUNDS = (1e-30, 1.0)
_THETA_BOUNDS = (2.0, 1e30)
_YARN_BOUNDS = {
    "factor": (1.0, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
}
_UNSUPPORTED_ROPE = "rope type {!r} is not supported (supported: default, yarn)"


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (Peng et al. 2023), with the correction range of transformers v5.

    Older transformers releases took `max_position_embeddings` for the correction range; this one
    takes `original_max_position_embeddings`.

    Attributes:
      factor: context extension factor, >= 1.
      original_max_position_embeddings: context the model was trained with, in tokens.
      beta_fast: rotations over the original context above which a frequency is kept.
      beta_slow: rotations below which a frequency is divided by `factor`.
      attention_factor: multiplier on cos and sin; None = 0.1 ln(factor) + 1.
      truncate: round the correction range outwards to whole frequency indices.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_size("original_max_position_embeddings", self.original_max_position_embeddings)
        for name, bounds in _YARN_BOUNDS.items():
            if name != "attention_factor" or self.attention_factor is not None:
                _require_number(name, getattr(self, name), bounds)

    @property
    def cos_sin_scale(self) -> float:
        """Return the multiplier on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Shape of one dense Qwen3 model; field names follow Hugging Face's `config.json`.

    Attributes:
      vocab_size: rows of the embedding and of the output head (V), unused ids included.
      hidden_size: width of the residual stream (D).
      intermediate_size: width of the feed-forward block (F).
      num_hidden_layers: number of transformer layers (L).
      num_attention_heads: number of query heads (N).
      num_key_value_heads: number of key and value heads (K); divides N.
      head_dim: width of one head (H), independent of D / N.
      rms_norm_eps: epsilon of every RMSNorm.
      rope_theta: base of the rotary frequencies.
      max_position_embeddings: longest text in tokens that the model was made for.
      tie_word_embeddings: whether the output head is the embedding table.
      rope_scaling: YaRN settings, or None.
      eos_token_ids: ids that end a text; empty where the files name none.
      num_valid_tokens: ids at or past it are never emitted; None = `vocab_size`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    rope_scaling: YarnScaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_valid_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in _SIZE_FIELDS:
            _require_size(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is not even, which RoPE needs")
        _require_number("rms_norm_eps", self.rms_norm_eps, _EPS_BOUNDS)
        _require_number("rope_theta", self.rope_theta, _THETA_BOUNDS)
        for eos_id in self.eos_token_ids:
            if not 0 <= eos_id < self.vocab_size:
                raise ValueError(f"eos_token_id={eos_id} is outside vocab_size={self.vocab_size}")
        if self.num_valid_tokens is not None and not 1 <= self.num_valid_tokens <= self.vocab_size:
            raise ValueError(
                f"num_valid_tokens={self.num_valid_tokens} is outside 1..{self.vocab_size}"
            )

    @property
    def num_query_groups(self) -> int:
        """Return the number of query heads that share one key-value head (G)."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> Qwen3Config:
        """Build the configuration from the contents of Hugging Face files.

        Sizes, theta and eps are read from the file and never defaulted, since the class defaults
        of transformers fit no released model.

        Args:
          config: the parsed `config.json`; the rope spelling of transformers v4 (`rope_theta`,
            `rope_scaling`) and of v5 (`rope_parameters`) are both read.
          generation_config: the parsed `generation_config.json`, whose `eos_token_id` (one id or
            a list) is united with that of `config`.

        Raises:
          ValueError: a field is missing or malformed, or the model uses a feature that is not
            supported (mixture of experts, sliding windows, attention biases, quantized weights,
            other rope types, other activations).
        """
        _refuse_unsupported(config)
        missing = [name for name in (*_SIZE_FIELDS, "rms_norm_eps") if config.get(name) is None]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        rope = _rope_parameters(config)
        eos_ids = dict.fromkeys(
            _token_ids((generation_config or {}).get("eos_token_id"))
            + _token_ids(config.get("eos_token_id"))
        )
        return cls(
            **{name: _require_size(name, config[name]) for name in _SIZE_FIELDS},
            rms_norm_eps=_require_number("rms_norm_eps", config["rms_norm_eps"], _EPS_BOUNDS),
            rope_theta=_require_number("rope_theta", rope["rope_theta"], _THETA_BOUNDS),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            rope_scaling=_yarn_scaling(rope),
            eos_token_ids=tuple(eos_ids),
        )


_SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _require_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer")
    if value > _MAX_SIZE:
        raise ValueError(f"{name}={value} is above {_MAX_SIZE}")
    return value


def _require_number(name: str, value: Any, bounds: tuple[float, float]) -> float:
    """Return a number as a float; the bounds keep float32 arithmetic on it finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a number")
    if not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"{name}={value} is outside {bounds[0]:g}..{bounds[1]:g}")
    return float(value)


def _require_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither true nor false")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field; absent or null is false, as in transformers' Qwen3Config."""
    value = config.get(name)
    return value is not None and _require_flag(name, value)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type == "qwen3_moe" or config.get("num_experts"):
        raise ValueError(
            f"model_type={model_type!r}: mixture-of-experts Qwen3 is not supported (dense only)"
        )
    if model_type != "qwen3":
        raise ValueError(f"model_type={model_type!r}, expected 'qwen3'")
    quantization = config.get("quantization_config")
    if quantization:
        is_object = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "unknown") if is_object else quantization
        raise ValueError(f"quantization_config (quant_method={method!r}) is not supported")
    if _flag(config, "attention_bias"):
        raise ValueError("attention_bias=true is not supported")
    layer_types = config.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list | tuple):
        raise ValueError(f"layer_types={layer_types!r} is not a list")
    is_full = all(layer_type == "full_attention" for layer_type in layer_types)
    if _flag(config, "use_sliding_window") or not is_full:
        raise ValueError("use_sliding_window=true is not supported (full attention only)")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act={activation!r} is not supported (supported: silu)")


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the v4 and v5 spellings of the rope settings; where both are there, they must agree."""
    rope: dict[str, Any] = {}
    if config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    for field in ("rope_scaling", "rope_parameters"):
        settings = config.get(field)
        if settings is not None and not isinstance(settings, Mapping):
            raise ValueError(f"{field}={settings!r} is not an object")
        for name, value in (settings or {}).items():
            # Old files say "type"; transformers writes both.
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if rope.setdefault(name, value) != value:
                raise ValueError(
                    f"{field}: {name}={value!r} contradicts {name}={rope[name]!r} elsewhere in "
                    "the file"
                )
    rope.setdefault("rope_type", "default")
    if "rope_theta" not in rope:
        raise ValueError("rope_theta is missing")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported (only 1.0)"
        )
    return rope


def _yarn_scaling(rope: Mapping[str, Any]) -> YarnScaling | None:
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return None
    if rope_type != "yarn":
        raise ValueError(_UNSUPPORTED_ROPE.format(rope_type))
    for name in ("factor", "original_max_position_embeddings"):
        if rope.get(name) is None:
            raise ValueError(f"rope type 'yarn' needs {name}, which is missing")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ValueError("rope type 'yarn' with mscale or mscale_all_dim is not supported")
    numbers = {
        name: _require_number(name, rope[name], bounds)
        for name, bounds in _YARN_BOUNDS.items()
        if name in rope
    }
    original = "original_max_position_embeddings"
    return YarnScaling(
        **numbers,
        original_max_position_embeddings=_require_size(original, rope[original]),
        truncate=_require_flag("truncate", rope.get("truncate", True)),
    )


def _token_ids(value: Any) -> list[int]:
    """Return the ids of an `eos_token_id` field: absent, one id, or a list."""
    if value is None:
        return []
    ids = value if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"eos_token_id={value!r} is not an id or a list of ids")
    return list(ids)


# Positions are 32-bit, and a cache of so many tokens is larger than any memory.
_MAX_TOKENS = 2**28
_COUNT_RANGES = {
    "max_new_tokens": (1, _MAX_TOKENS),
    "max_seq_len": (1, _MAX_TOKENS),
    "min_new_tokens": (0, _MAX_TOKENS),
    "num_logprobs": (0, 1000),
    "prefill_chunk_size": (1, _MAX_TOKENS),
}
_OPTIONAL_COUNTS = ("max_seq_len", "num_logprobs", "prefill_chunk_size")
_SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What one call of `generate` asks for.

    Attributes:
      max_new_tokens: most tokens to emit per prompt, >= 1; EOS counts.
      max_seq_len: longest prompt plus output allowed, in tokens; None = the model's
        `max_position_embeddings`.
      min_new_tokens: tokens before which no EOS is picked and no stop string counts; 0 = off.
      eos_token_ids: ids that end a text; None = those of the model's configuration, () = none.
      stop_strings: strings that end a text; it is cut before them, and its tokens after the one
        that completes one. `generate` then needs the tokenizer.
      num_logprobs: alternatives whose log-probabilities are kept with those of the emitted
        tokens; 0 = of the tokens alone, None = none at all.
      seed: seed of the rows' random streams, one for all rows or one per row. Rows of one seed
        and one prompt get one text. Greedy output does not depend on it.
      temperature: divides the logits before a token is drawn; 0 = greedy.
      top_k: draw among the k most probable tokens only; 0 = all.
      top_p: draw among the most probable tokens whose mass, a sum in float32, first reaches it;
        1 = all.
      min_p: draw among tokens at least this fraction as probable as the best; 0 = all.
      repetition_penalty: > 1 makes tokens of the text so far less likely, prompt included.
      presence_penalty: taken off the logits of tokens in the output so far.
      frequency_penalty: taken off the logits once for each time a token is in the output so far.
      kernels: kernel implementation ("triton", "interpret", "xla"), None = the best available. A
        named one raises NotImplementedError for a model or drafter that a kernel does not take.
      prefill_chunk_size: tokens per prefill pass; None = 128 on a CPU,
        elsewhere 2048 for one or two prompts of more than 1024 tokens, else 512.
    """

    max_new_tokens: int = 256
    max_seq_len: int | None = None
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    num_logprobs: int | None = None
    seed: int | tuple[int, ...] = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    kernels: str | None = None
    prefill_chunk_size: int | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _COUNT_RANGES.items():
            count = getattr(self, name)
            if count is None and name in _OPTIONAL_COUNTS:
                continue
            if not isinstance(count, int | np.integer) or isinstance(count, bool):
                raise ValueError(f"{name}={count!r} is not an integer")
            if count < least:
                raise ValueError(f"{name}={count} is not at least {least}")
            if count > most:
                raise ValueError(f"{name}={count} is more than {most}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}"
            )
        for name in ("stop_strings", "eos_token_ids", "seed"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.stop_strings, tuple):
            raise ValueError(f"stop_strings={self.stop_strings!r} is not a tuple of strings")
        check_stops(self.stop_strings)
        if self.kernels not in (None, "triton", "interpret", "xla"):
            raise ValueError(f"kernels={self.kernels!r} is none of triton, interpret, xla")
        for name, (low, high) in _SAMPLING_RANGES.items():
            value = getattr(self, name)
            kinds = int | np.integer if name == "top_k" else int | float | np.number
            if not isinstance(value, kinds) or isinstance(value, bool):
                kind = "an integer" if name == "top_k" else "a number"
                raise ValueError(f"{name}={value!r} is not {kind}")
            if not low <= value <= high:
                raise ValueError(f"{name}={value} is outside {low}..{high}")
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        for seed in seeds:
            if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
                raise ValueError(f"seed={seed!r} is not an integer")
            if not 0 <= seed < 2**32:
                raise ValueError(f"seed={seed} is outside 0..{2**32 - 1}")
