"""A call's prompts and settings, checked, as the arrays and the static choices of its program."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import GenerateConfig, Qwen3Config
from jaxspec.sampling import SamplingMode, SamplingParams
from jaxspec.sharding import SPECS, data_size, place
from jaxspec.state import Request

_EOS_ROUND = 8
_MIN_CAPACITY = 128


def capacity_for(num_tokens: int) -> int:
    """Return the buffer size for `num_tokens`: 128, 192, 256, 384, 512, 768, 1024, ...

    Few sizes, so that programs are reused, and never more than 1.5 times what is needed, so that
    memory follows need.
    """
    size = _MIN_CAPACITY
    while size < num_tokens:
        size *= 2
    smaller = size // 4 * 3
    return smaller if smaller >= num_tokens and smaller > _MIN_CAPACITY else size


def check_prompts(
    prompts: Sequence[Sequence[int]], model_config: Qwen3Config, config: GenerateConfig
) -> None:
    """Raise a one-line ValueError if the call cannot be run as asked, before any work."""
    if jax.config.read("jax_enable_x64"):
        raise ValueError(
            "jax_enable_x64 is on, expected it off: jaxspec computes in 32 bits (a program of 64 "
            "bits calls it inside `with jax.enable_x64(False)`)"
        )
    if not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts is a {type(prompts).__name__}, expected a list of prompts")
    if not len(prompts):
        raise ValueError("no prompts: expected at least one")
    num_ids = model_config.num_valid_tokens or model_config.vocab_size
    if config.num_logprobs is not None and config.num_logprobs > num_ids:
        raise ValueError(
            f"num_logprobs={config.num_logprobs} is more than the {num_ids} tokens that there are"
        )
    limit = config.max_seq_len or model_config.max_position_embeddings
    for index, prompt in enumerate(prompts):
        ids = np.asarray([] if isinstance(prompt, str) else prompt)
        if isinstance(prompt, str) or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"prompt {index} is {prompt!r:.40}, expected a list of token ids: prompts are a "
                "list of such lists"
            )
        if not ids.size:
            raise ValueError(f"prompt {index} is empty: expected at least one token")
        for token_id in (ids.min(), ids.max()):
            if not 0 <= token_id < model_config.vocab_size:
                raise ValueError(
                    f"prompt {index} holds id {token_id}, expected 0..{model_config.vocab_size - 1}"
                )
        if len(prompt) + config.max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, which with "
                f"max_new_tokens={config.max_new_tokens} exceed max_seq_len={limit}"
            )
    if isinstance(config.seed, tuple) and len(config.seed) != len(prompts):
        raise ValueError(f"{len(config.seed)} seeds for {len(prompts)} prompts")
    eos_ids = () if config.eos_token_ids is None else config.eos_token_ids
    is_tuple = isinstance(eos_ids, tuple)
    if not is_tuple or not all(isinstance(eos_id, int | np.integer) for eos_id in eos_ids):
        raise ValueError(f"eos_token_ids={eos_ids!r} is not a tuple of token ids")
    for eos_id in eos_ids:
        if not 0 <= eos_id < model_config.vocab_size:
            raise ValueError(
                f"eos_token_ids holds {eos_id}, expected 0..{model_config.vocab_size - 1}"
            )
    ending = {eos_id for eos_id in eos_ids_of(model_config, config) if eos_id < num_ids}
    if config.min_new_tokens and len(ending) == num_ids:
        raise ValueError(
            f"min_new_tokens={config.min_new_tokens}, expected 0: all {num_ids} tokens end a text"
        )


def make_request(
    model_config: Qwen3Config,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    *,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Request]:
    """Return the padded prompts, i32[B, P], and the call's arrays.

    Rows that do not divide by the mesh's `data` axis are padded with rows that have no budget, so
    that they are finished from the start.
    """
    num_prompts = len(prompts)
    batch_size = -(-num_prompts // data_size(mesh)) * data_size(mesh)
    lengths = np.ones(batch_size, dtype=np.int32)
    lengths[:num_prompts] = [len(prompt) for prompt in prompts]
    budget = np.zeros(batch_size, dtype=np.int32)
    budget[:num_prompts] = config.max_new_tokens
    seed = np.zeros(batch_size, dtype=np.uint32)
    seed[:num_prompts] = config.seed
    capacity = capacity_for(int(lengths.max()) + config.max_new_tokens)
    tokens = np.zeros((batch_size, capacity), dtype=np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    eos_ids = eos_ids_of(model_config, config)
    # Rounded up, so that a longer list of EOS ids does not compile again.
    padded_eos = np.full(-(-max(len(eos_ids), 1) // _EOS_ROUND) * _EOS_ROUND, -1, dtype=np.int32)
    padded_eos[: len(eos_ids)] = eos_ids

    def setting(name: str, dtype: type = np.float32) -> jax.Array:
        return place(mesh, np.full(batch_size, getattr(config, name), dtype))

    return place(mesh, tokens), Request(
        prompt_length=place(mesh, lengths),
        max_new_tokens=place(mesh, budget),
        min_new_tokens=setting("min_new_tokens", np.int32),
        eos_ids=place(mesh, padded_eos, SPECS["eos_ids"]),
        seed=place(mesh, seed),
        sampling=SamplingParams(
            temperature=setting("temperature"),
            top_k=setting("top_k", np.int32),
            top_p=setting("top_p"),
            min_p=setting("min_p"),
            repetition_penalty=setting("repetition_penalty"),
            presence_penalty=setting("presence_penalty"),
            frequency_penalty=setting("frequency_penalty"),
        ),
        step_costs=place(mesh, np.ones(1, np.float32), SPECS["step_costs"]),
    )


def eos_ids_of(model_config: Qwen3Config, config: GenerateConfig) -> tuple[int, ...]:
    """Return the ids that end a text."""
    return model_config.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids


def prefill_chunks(
    config: GenerateConfig, *, capacity: int, longest_prompt: int, batch_size: int = 1
) -> tuple[int, int]:
    """Return the tokens of one prefill pass, and how many passes cache all but the last token.

    There are two sizes of a pass, so that prompts of all lengths share two programs.
    """
    chunk_size = config.prefill_chunk_size
    if chunk_size is None:
        # A GPU's products are at their best from some 2,000 rows on; short prompts would pad them.
        gpu_size = 2048 if longest_prompt > 1024 and batch_size <= 2 else 512
        chunk_size = 128 if jax.default_backend() == "cpu" else gpu_size
    chunk_size = min(chunk_size, capacity)
    return chunk_size, -(-(longest_prompt - 1) // chunk_size)


def sampling_mode(config: GenerateConfig) -> SamplingMode:
    """Return what of sampling the call's program needs."""
    is_sampled = config.temperature > 0
    return SamplingMode(
        is_sampled=is_sampled,
        # Filters keep the best token: greedy decoding does not notice them.
        has_top_k=is_sampled and config.top_k > 0,
        has_top_p=is_sampled and config.top_p < 1,
        has_min_p=is_sampled and config.min_p > 0,
        has_penalties=config.repetition_penalty != 1
        or config.presence_penalty != 0
        or config.frequency_penalty != 0,
        has_minimum=config.min_new_tokens > 0,
    )
