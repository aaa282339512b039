"""Prompts decoded one at a time in buffers of one size, for measurements; host side."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import GenerateConfig
from jaxspec.decode import prefill, run_steps_of
from jaxspec.drafters import Auto, Drafter, NoDraft
from jaxspec.generation import with_kernels
from jaxspec.model import Qwen3
from jaxspec.placement import FlatModel
from jaxspec.request import capacity_for, check_prompts, make_request, prefill_chunks, sampling_mode
from jaxspec.result import to_host
from jaxspec.sharding import place
from jaxspec.state import DecodeState, Request, init_state
from jaxspec.step_costs import with_step_costs


@dataclasses.dataclass(frozen=True)
class Run:
    """One decoded text: the emitted ids, the steps they took, drafts accepted by position."""

    token_ids: list[int]
    num_steps: int
    accepted_by_position: list[int]
    seconds: float


class Runner:
    """Decodes prompts one at a time, all in buffers of one size.

    One compiled program a drafter then serves all prompts. The prompts' K/V, which no drafter
    changes, are computed once. The texts are those of `generate`.

    Args:
      model: the target model.
      prompts: token ids of each prompt.
      config: what to generate; None = the defaults.
      whole: the model on one device, for what is computed of finished texts; None = `model`.

    Raises:
      ValueError: a prompt is empty, holds an id outside the vocabulary, or does not fit; or the
        configuration has stop strings or log-probabilities.
    """

    def __init__(
        self,
        model: Qwen3,
        prompts: Sequence[Sequence[int]],
        config: GenerateConfig | None = None,
        *,
        whole: Qwen3 | None = None,
    ) -> None:
        self.model, self.prompts, self.whole = model, prompts, whole or model
        self._flat = FlatModel.of(model)
        self.config = config or GenerateConfig()
        check_prompts(prompts, model.config, self.config)
        if self.config.stop_strings or self.config.num_logprobs is not None:
            raise ValueError("a Runner looks for no stop strings and keeps no log-probabilities")
        self.capacity = capacity_for(max(map(len, prompts)) + self.config.max_new_tokens)
        self._caches = [self._prefilled(index) for index in range(len(prompts))]

    def run(
        self,
        index: int,
        drafter: Drafter | Auto,
        *,
        budget: int | None = None,
        max_steps: int | None = None,
        ignore_eos: bool = False,
    ) -> Run:
        """Decode one prompt; the time is that of the loop alone, compilation included if new.

        Args:
          index: of the prompt.
          drafter: how drafts are made.
          budget: most tokens to emit, None = the configuration's; it changes no program.
          max_steps: most steps to run, None = all that it takes; 0 only compiles.
          ignore_eos: go on after an EOS.
        """
        drafter = with_kernels(drafter, self.config.kernels)
        tokens, request = self._request(index)
        if budget is not None:
            limit = jnp.minimum(request.max_new_tokens, budget)
            request = dataclasses.replace(request, max_new_tokens=limit)
        if ignore_eos:
            request = dataclasses.replace(request, eos_ids=request.eos_ids * 0 - 1)
        request, _ = with_step_costs(
            self._flat,
            tokens,
            request,
            drafter,
            kernels=self.config.kernels,
            mode=sampling_mode(self.config),
        )
        state = init_state(self._flat, tokens, request, drafter=drafter)
        state = dataclasses.replace(state, cache=jax.tree.map(jnp.copy, self._caches[index]))
        steps = np.int32(self.config.max_new_tokens if max_steps is None else max_steps)
        state = jax.block_until_ready(state)
        started = time.perf_counter()
        state = run_steps_of(self.model)(
            self._flat,
            state,
            request,
            steps,
            drafter=drafter,
            kernels=self.config.kernels,
            mode=sampling_mode(self.config),
        )
        state = jax.block_until_ready(state)
        return _to_run(state, request, drafter, time.perf_counter() - started)

    def _request(self, index: int) -> tuple[jax.Array, Request]:
        mesh, prompt = self.model.mesh, self.prompts[index]
        tokens, request = make_request(self.model.config, [prompt], self.config, mesh=mesh)
        padded = np.zeros((tokens.shape[0], self.capacity), np.int32)
        padded[0, : len(prompt)] = prompt
        return place(mesh, padded), request

    def _prefilled(self, index: int) -> Any:
        tokens, request = self._request(index)
        chunk_size, num_chunks = prefill_chunks(
            self.config, capacity=self.capacity, longest_prompt=len(self.prompts[index])
        )
        state = init_state(self._flat, tokens, request, drafter=NoDraft())
        fill = functools.partial(prefill, chunk_size=chunk_size, kernels=self.config.kernels)
        return fill(self._flat, state, np.int32(num_chunks)).cache


def _to_run(state: DecodeState, request: Request, drafter: Drafter | Auto, seconds: float) -> Run:
    generation = to_host(state, request, drafter, num_rows=1)
    return Run(
        generation.token_ids[0],
        int(generation.num_steps[0]),
        generation.accepted_by_position[0].tolist(),
        seconds,
    )
