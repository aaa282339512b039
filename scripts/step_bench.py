"""A random model, its cache and its compiled loop, for measurements of a decode step."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import random_array

from jaxspec import Auto, Drafter, GenerateConfig, Qwen3
from jaxspec.cache import KVCache
from jaxspec.decode import run_steps_of
from jaxspec.generation import with_kernels
from jaxspec.placement import FlatModel
from jaxspec.request import make_request, sampling_mode
from jaxspec.sharding import SPECS, place
from jaxspec.state import (
    FINISHED_BY_LENGTH,
    SCALAR,
    STATE_SPECS,
    UNFINISHED,
    DecodeState,
    Request,
    init_state,
)


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


def count(mesh: Mesh | None, number: int) -> jax.Array:
    """Return a number of steps or chunks, where the loop of a mesh wants it."""
    return jax.block_until_ready(place(mesh, np.asarray(number, np.int32), SCALAR))


class Bench:
    """A model and a cache of random keys and values, which one measurement hands to the next.

    On a mesh everything lies where the loop wants it, so that no call moves any of it. Texts that
    do not divide by the mesh's `data` axis are followed by rows that are finished.

    Attributes:
      model: the target model.
      mesh: its devices, None = the default one.
      batch_size: texts decoded at once.
      capacity: slots of text and cache.
      length: known tokens of every text when a measurement starts.
      request: the arrays of a call without end-of-text ids and with budget for any text.
      text: i32[B', P] random texts, and the rows that fill up the mesh, on the host.
    """

    def __init__(self, model: Qwen3, *, batch_size: int, capacity: int, length: int) -> None:
        self.model, self.mesh, self.batch_size = model, model.mesh, batch_size
        self.flat = FlatModel.of(model)
        self.capacity, self.length = capacity, length
        rng = np.random.default_rng(0)
        text = rng.integers(0, model.config.vocab_size, (batch_size, length), dtype=np.int32)
        config = GenerateConfig(max_new_tokens=1, eos_token_ids=())
        padded, request = make_request(model.config, text.tolist(), config, mesh=self.mesh)
        is_text = np.arange(padded.shape[0]) < batch_size
        budget = self.place(np.where(is_text, capacity, 0))
        self.request = dataclasses.replace(request, max_new_tokens=budget)
        self.text = np.pad(text, ((0, len(is_text) - batch_size), (0, capacity - length)))
        self._start = {
            "length": np.where(is_text, length, 1),
            "finish": np.where(is_text, UNFINISHED, FINISHED_BY_LENGTH),
            "num_steps": np.zeros(len(is_text)),
        }
        self._cache: KVCache | None = None

    def place(self, values: np.ndarray) -> jax.Array:
        """Return an i32 array with a row for each text, where the loop wants it."""
        return place(self.mesh, values.astype(np.int32))

    def count(self, number: int) -> jax.Array:
        """Return a number of steps or chunks, where the loop wants it."""
        return count(self.mesh, number)

    def compile(
        self, drafter: Drafter | Auto, kernels: str | None, config: GenerateConfig | None = None
    ) -> Program:
        """Compile the loop for a drafter, and the sampling of a configuration if there is one."""
        drafter, request = with_kernels(drafter, kernels), self.request
        config = config or GenerateConfig()
        prompts = [[0]] * self.batch_size
        _, settings = make_request(self.model.config, prompts, config, mesh=self.mesh)
        request = dataclasses.replace(request, sampling=settings.sampling)
        if isinstance(drafter, Auto):
            request = self.with_step_costs(request, np.ones(len(drafter.arms)))
        state = self.abstract_state(drafter, config.num_logprobs)
        started = time.perf_counter()
        lowered = run_steps_of(self.model).lower(
            self.flat,
            state,
            request,
            self.count(0),
            drafter=drafter,
            kernels=kernels,
            mode=sampling_mode(config),
        )
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        times = (lowered_at - started, time.perf_counter() - lowered_at)
        return Program(drafter, kernels, request, config.num_logprobs, compiled, *times)

    def with_step_costs(self, request: Request, costs: np.ndarray) -> Request:
        """Return the request with the relative time of a step of each arm of `Auto`."""
        placed = place(self.mesh, costs.astype(np.float32), SPECS["step_costs"])
        return dataclasses.replace(request, step_costs=placed)

    def abstract_state(
        self, drafter: Drafter | Auto, num_logprobs: int | None = None
    ) -> DecodeState:
        """Return shapes and dtypes of the state, and on a mesh the shardings."""
        tokens = jax.ShapeDtypeStruct(self.text.shape, jnp.int32)
        begin = functools.partial(init_state, drafter=drafter, num_logprobs=num_logprobs)
        state = jax.eval_shape(begin, self.flat, tokens, self.request)
        mesh = self.mesh
        if mesh is None:
            return state

        def placed(spec: P, part: Any) -> Any:
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), part)

        return jax.tree.map(placed, STATE_SPECS, state)

    def start(self, program: Program) -> DecodeState:
        """Return the state of texts of the bench's length, the live slots of the cache random."""
        state = init_state(
            self.flat,
            self.place(self.text),
            self.request,
            drafter=program.drafter,
            num_logprobs=program.num_logprobs,
        )
        cache, self._cache = self._cache, None
        if cache is None:
            key, num_live = jax.random.key(1), jnp.int32(self.length - 1)
            sharding = None if self.mesh is None else NamedSharding(self.mesh, SPECS["cache"])
            leaves, structure = jax.tree.flatten(state.cache)
            state = dataclasses.replace(state, cache=None)
            for index, leaf in enumerate(leaves):
                shape, dtype = leaf.shape, leaf.dtype
                leaves[index] = leaf = None  # frees the zeros before more is allocated
                part = jax.random.fold_in(key, index)
                leaves[index] = _live_slots(sharding)(part, num_live, shape=shape, dtype=dtype)
            cache = jax.tree.unflatten(structure, leaves)
        return dataclasses.replace(state, cache=cache)

    def keep(self, state: DecodeState) -> None:
        """Take the cache of a state that is not needed any more."""
        self._cache = state.cache

    def rewind(self, state: DecodeState) -> DecodeState:
        """Return the state with its texts cut back to the bench's length."""
        start: Any = {name: self.place(values) for name, values in self._start.items()}
        return jax.block_until_ready(dataclasses.replace(state, **start))

    def progress(self, state: DecodeState) -> tuple[int, float]:
        """Return the steps since `rewind`, and the tokens that texts gained in one, on average."""
        steps = int(np.asarray(state.num_steps).max())
        gained = np.asarray(state.length)[: self.batch_size] - self.length
        return steps, float(gained.mean()) / max(steps, 1)

    def run(
        self, program: Program, state: DecodeState, num_steps: int
    ) -> tuple[DecodeState, float]:
        """Run steps from the bench's length on; return the state and the seconds they took."""
        state = self.rewind(state)
        steps = self.count(num_steps)
        started = time.perf_counter()
        state = jax.block_until_ready(program.run(self.flat, state, program.request, steps))
        return state, time.perf_counter() - started


@functools.lru_cache(maxsize=16)
def _live_slots(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    """Return a function that makes random keys or values, of which so many slots are no zeros."""

    def live_slots(
        key: jax.Array, num_live: jax.Array, *, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        values = random_array(key, shape=shape, dtype=dtype, sharding=sharding)
        is_live = jnp.arange(shape[2])[None, None, :, None] < num_live
        return jnp.where(is_live, values, jnp.zeros((), dtype))

    return jax.jit(live_slots, static_argnames=("shape", "dtype"), out_shardings=sharding)
