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

from jaxspec import Drafter, GenerateConfig, Qwen3
from jaxspec.cache import KVCache
from jaxspec.decode import DecodeState, Request, init_state, run_steps
from jaxspec.generation import make_request, with_kernels
from jaxspec.model import FlatModel


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled loop of one drafter, and the seconds that it took to get it."""

    drafter: Drafter
    kernels: str | None
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

    def compile(self, drafter: Drafter, kernels: str | None) -> Program:
        """Compile the loop for a drafter."""
        drafter = with_kernels(drafter, kernels)
        state = self.abstract_state(drafter)
        num_steps = jax.ShapeDtypeStruct((), jnp.int32)
        started = time.perf_counter()
        lowered = run_steps.lower(
            self.flat, state, self.request, num_steps, drafter=drafter, kernels=kernels
        )
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        ended = time.perf_counter()
        return Program(drafter, kernels, compiled, lowered_at - started, ended - lowered_at)

    def abstract_state(self, drafter: Drafter) -> DecodeState:
        """Return shapes and dtypes of the state."""
        tokens = jax.ShapeDtypeStruct(self.text.shape, jnp.int32)
        begin = functools.partial(init_state, drafter=drafter)
        return jax.eval_shape(begin, self.flat, tokens, self.request)

    def start(self, drafter: Drafter) -> DecodeState:
        """Return the state of texts of the bench's length, the live slots of the cache random."""
        tokens = jnp.asarray(self.text)
        state = init_state(self.flat, tokens, self.request, drafter=drafter)
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
        state = jax.block_until_ready(program.run(self.flat, state, self.request, steps))
        return state, time.perf_counter() - started


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _live_slots(
    key: jax.Array, num_live: jax.Array, *, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> jax.Array:
    values = random_array(key, shape=shape, dtype=dtype)
    is_live = jnp.arange(shape[2])[None, None, :, None] < num_live
    return jnp.where(is_live, values, jnp.zeros((), dtype))
