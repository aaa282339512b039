"""A random model, its cache and its compiled loop, for measurements of a decode step."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from shapes import random_array

from jaxspec import Auto, Drafter, GenerateConfig, Qwen3
from jaxspec.cache import KVCache
from jaxspec.decode import run_steps
from jaxspec.generation import make_request, sampling_mode, with_kernels
from jaxspec.model import FlatModel
from jaxspec.state import DecodeState, Request, init_state


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled loop of one drafter, its request, and the seconds that it took to get it."""

    drafter: Drafter | Auto
    kernels: str | None
    request: Request
    num_logprobs: int | None
    run: Callable[[FlatModel, DecodeState, Request, jax.Array], DecodeState]
    lower_seconds: float
    compile_seconds: float


class Bench:
    """A model and a cache of random keys and values, which one measurement hands to the next.

    Attributes:
      model: the target model.
      batch_size: texts decoded at once.
      capacity: slots of text and cache.
      length: known tokens of every text when a measurement starts.
      request: the arrays of a call without end-of-text ids and with budget for any text.
      text: i32[B, P] random texts, on the host.
    """

    def __init__(self, model: Qwen3, *, batch_size: int, capacity: int, length: int) -> None:
        self.model, self.batch_size = model, batch_size
        self.flat = FlatModel.of(model)
        self.capacity, self.length = capacity, length
        rng = np.random.default_rng(0)
        text = rng.integers(0, model.config.vocab_size, (batch_size, length), dtype=np.int32)
        config = GenerateConfig(max_new_tokens=1, eos_token_ids=())
        _, request = make_request(model.config, text.tolist(), config)
        budget = jnp.full((batch_size,), capacity, jnp.int32)
        self.request = dataclasses.replace(request, max_new_tokens=budget)
        self.text = np.pad(text, ((0, 0), (0, capacity - length)))
        self._cache: KVCache | None = None

    def compile(
        self, drafter: Drafter | Auto, kernels: str | None, config: GenerateConfig | None = None
    ) -> Program:
        """Compile the loop for a drafter, and the sampling of a configuration if there is one."""
        drafter, request = with_kernels(drafter, kernels), self.request
        config = config or GenerateConfig()
        sampling = make_request(self.model.config, [[0]] * self.batch_size, config)[1].sampling
        request = dataclasses.replace(request, sampling=sampling)
        if isinstance(drafter, Auto):
            request = dataclasses.replace(request, step_costs=jnp.ones(len(drafter.arms)))
        state = self.abstract_state(drafter, config.num_logprobs)
        num_steps = jax.ShapeDtypeStruct((), jnp.int32)
        started = time.perf_counter()
        lowered = run_steps.lower(
            self.flat,
            state,
            request,
            num_steps,
            drafter=drafter,
            kernels=kernels,
            mode=sampling_mode(config),
        )
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        times = (lowered_at - started, time.perf_counter() - lowered_at)
        return Program(drafter, kernels, request, config.num_logprobs, compiled, *times)

    def abstract_state(
        self, drafter: Drafter | Auto, num_logprobs: int | None = None
    ) -> DecodeState:
        """Return shapes and dtypes of the state."""
        tokens = jax.ShapeDtypeStruct(self.text.shape, jnp.int32)
        begin = functools.partial(init_state, drafter=drafter, num_logprobs=num_logprobs)
        return jax.eval_shape(begin, self.flat, tokens, self.request)

    def start(self, program: Program) -> DecodeState:
        """Return the state of texts of the bench's length, the live slots of the cache random."""
        state = init_state(
            self.flat,
            jnp.asarray(self.text),
            self.request,
            drafter=program.drafter,
            num_logprobs=program.num_logprobs,
        )
        cache, self._cache = self._cache, None
        if cache is None:
            key, num_live = jax.random.key(1), jnp.int32(self.length - 1)
            leaves, structure = jax.tree.flatten(state.cache)
            state = dataclasses.replace(state, cache=None)
            for index, leaf in enumerate(leaves):
                shape, dtype = leaf.shape, leaf.dtype
                leaves[index] = leaf = None  # frees the zeros before more is allocated
                part = jax.random.fold_in(key, index)
                leaves[index] = _live_slots(part, num_live, shape=shape, dtype=dtype)
            cache = jax.tree.unflatten(structure, leaves)
        return dataclasses.replace(state, cache=cache)

    def keep(self, state: DecodeState) -> None:
        """Take the cache of a state that is not needed any more."""
        self._cache = state.cache

    def rewind(self, state: DecodeState) -> DecodeState:
        """Return the state with its texts cut back to the bench's length."""
        zeros = [jnp.zeros((self.batch_size,), jnp.int32) for _ in range(2)]
        length = jnp.full((self.batch_size,), self.length, jnp.int32)
        return jax.block_until_ready(
            dataclasses.replace(state, length=length, finish=zeros[0], num_steps=zeros[1])
        )

    def run(
        self, program: Program, state: DecodeState, num_steps: int
    ) -> tuple[DecodeState, float]:
        """Run steps from the bench's length on; return the state and the seconds they took."""
        state = self.rewind(state)
        steps = jax.block_until_ready(jnp.int32(num_steps))
        started = time.perf_counter()
        state = jax.block_until_ready(program.run(self.flat, state, program.request, steps))
        return state, time.perf_counter() - started


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _live_slots(
    key: jax.Array, num_live: jax.Array, *, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> jax.Array:
    values = random_array(key, shape=shape, dtype=dtype)
    is_live = jnp.arange(shape[2])[None, None, :, None] < num_live
    return jnp.where(is_live, values, jnp.zeros((), dtype))
