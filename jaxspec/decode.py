"""Draft, forward, verify, commit: one step, and the one loop that runs it.

Everything between two tokens happens inside one `jax.lax.while_loop` inside one `jax.jit`; the
host starts the loop and reads its result. What shapes the program (drafter, capacity, batch) is
static; what varies per call (budget, EOS ids, seeds, steps to run) is an array, so that two calls
of the same shape share one compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, committed_rows, write_block
from jaxspec.commit import commit, room_of
from jaxspec.config import Qwen3Config
from jaxspec.drafters import DRAFTERS, Auto, Drafter, Outcome, Proposal, current_tokens
from jaxspec.layout import BlockLayout
from jaxspec.model import Qwen3
from jaxspec.placement import FlatModel, over_mesh
from jaxspec.record import emitted_logits, step_record
from jaxspec.sampling import (
    SamplingMode,
    add_noise,
    early_eos,
    prefix_counts,
    process_logits,
)
from jaxspec.sharding import ModelAxis, model_size
from jaxspec.state import (
    REQUEST_SPECS,
    SCALAR,
    STATE_SPECS,
    UNFINISHED,
    DecodeState,
    Request,
)
from jaxspec.verify import verify
from pallas_kernels.dispatch import Implementation

GREEDY = SamplingMode()
# A GPU then runs the loop as one CUDA graph and does not ask the host after every step: XLA's own
# list, with the two that make up a loop; XLA otherwise makes no graph of fewer than 5 operations.
# Measured on one GPU; not yet on several that have a whole model each.
LOOP_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
}
# Prefill has few and long kernels: to make a graph of them takes longer than it saves.
PREFILL_OPTIONS = {"xla_gpu_graph_min_graph_size": 2**30}


@functools.partial(
    jax.jit,
    static_argnames=("chunk_size", "kernels"),
    donate_argnames=("state",),
    compiler_options=PREFILL_OPTIONS,
)
def prefill(
    model: Qwen3 | FlatModel,
    state: DecodeState,
    num_chunks: jax.Array,
    *,
    chunk_size: int,
    kernels: Implementation | None = None,
) -> DecodeState:
    """Cache the K/V of the prompts' first `num_chunks * chunk_size` tokens; emit nothing.

    One program serves all prompt lengths up to the capacity. Shorter rows write garbage past
    their end, to slots that decoding overwrites before it reads them.
    """
    fill = functools.partial(_prefill, chunk_size=chunk_size, kernels=kernels)
    return over_mesh(fill, model, (STATE_SPECS, SCALAR), STATE_SPECS)(state, num_chunks)


def _prefill(
    model: Qwen3,
    state: DecodeState,
    num_chunks: jax.Array,
    *,
    chunk_size: int,
    kernels: Implementation | None,
) -> DecodeState:
    layout = BlockLayout.linear(chunk_size, has_logits=False)
    batch_size = state.tokens.shape[0]

    def cache_chunk(index: jax.Array, cache: KVCache) -> KVCache:
        start = index * chunk_size
        # Past its end a row goes on with its last token: what is not in a text has no part in it,
        # not even where that token's embedding is not finite.
        places = start + jnp.arange(chunk_size, dtype=jnp.int32)[None]
        places = jnp.minimum(places, state.length[:, None] - 1)
        block_tokens = jnp.take_along_axis(state.tokens, places, axis=1, mode="clip")
        num_cached = jnp.broadcast_to(start, (batch_size,))
        _, block = model.hidden_states(block_tokens, num_cached, cache, layout, kernels)
        # Positions past the prompt are written only where all keys are finite. They are garbage
        # either way; that the writes wait for the last layer's keys orders them after every read
        # of the cache, so that they happen in place.
        is_finite = jnp.all(jnp.isfinite(block[-1][0]), axis=(1, 2, 3))
        is_known = start + jnp.arange(chunk_size)[None] < state.length[:, None] - 1
        is_written = is_known | is_finite[:, None]
        return write_block(cache, block, num_cached, is_written, kernels=kernels)

    with jax.named_scope("prefill"):
        cache = jax.lax.fori_loop(jnp.int32(0), num_chunks, cache_chunk, state.cache)
    return dataclasses.replace(state, cache=cache)


def decode_step(
    model: Qwen3,
    state: DecodeState,
    request: Request,
    drafter: Drafter,
    kernels: Implementation | None = None,
    mode: SamplingMode = GREEDY,
) -> DecodeState:
    """Feed the current token and its drafts; append the tokens that the model agrees with."""
    with jax.named_scope("draft"):
        proposal = drafter.propose(state.drafter, state.tokens, state.length)
        check_proposal(proposal, drafter, state.tokens.shape[0])
        if type(drafter) not in DRAFTERS.values():
            # One launch more on a GPU; the library's own drafters are known to do it.
            proposal = with_current_token(proposal, state)
    state, outcome = feed(model, state, request, proposal, drafter.layout, kernels, mode)
    with jax.named_scope("update"):
        memory = drafter.update(state.drafter, outcome, state.tokens, state.length)
    return dataclasses.replace(state, drafter=memory)


def decode_step_of_arm(
    model: Qwen3,
    state: DecodeState,
    request: Request,
    drafter: Auto,
    index: int,
    kernels: Implementation | None,
    mode: SamplingMode,
) -> DecodeState:
    """Run a step of one arm of `Auto`, and plan the next step."""
    arm = drafter.arms[index]
    with jax.named_scope("draft"):
        proposal = drafter.propose(arm, state.drafter, state.tokens, state.length)
    state, outcome = feed(model, state, request, proposal, arm.layout, kernels, mode, arm=index)
    with jax.named_scope("update"):
        memory = drafter.learn(arm, state.drafter, outcome, state.tokens, state.length)
    return plan_step(dataclasses.replace(state, drafter=memory), request, drafter)


def plan_step(state: DecodeState, request: Request, drafter: Auto) -> DecodeState:
    """Let `Auto` choose the arm of the next step."""
    with jax.named_scope("plan"):
        room = room_of(state, request)
        room = jnp.where(state.finish == UNFINISHED, room, 0)
        memory = drafter.plan(state.drafter, state.tokens, state.length, request.step_costs, room)
    return dataclasses.replace(state, drafter=memory)


def feed(
    model: Qwen3,
    state: DecodeState,
    request: Request,
    proposal: Proposal,
    layout: BlockLayout,
    kernels: Implementation | None,
    mode: SamplingMode,
    *,
    arm: int = 0,
) -> tuple[DecodeState, Outcome]:
    """Feed a block and append the tokens that the model agrees with; the drafter's part stays.

    `arm` goes into the record of the tokens.
    """
    config, axis = model.config, model.axis
    with jax.named_scope("forward"):
        logits, block = model(proposal.block_tokens, state.length - 1, state.cache, layout, kernels)
    with jax.named_scope("sample"):
        scores = sample_scores(
            logits, proposal, state, request, layout, mode, config, axis, kernels
        )
    with jax.named_scope("verify"):
        outcome = verify(
            logits,
            proposal,
            layout,
            scores=scores,
            num_valid=num_valid_of(config, axis),
            axis=axis,
            implementation=kernels,
        )
    with jax.named_scope("commit"):
        rows = committed_rows(layout, outcome.best_candidate)
        emitted = outcome.target_tokens
        if rows is not None:
            emitted = jnp.take_along_axis(emitted, rows, axis=1, mode="clip")
        kept = None
        if state.record.logits is not None:
            kept = emitted_logits(
                logits,
                scores,
                emitted,
                rows,
                layout,
                num_top=state.record.logits.top_ids.shape[-1],
                num_valid=config.num_valid_tokens,
                num_ids=config.vocab_size,
                axis=axis,
            )
        fresh = step_record(emitted, outcome.num_accepted, proposal.num_draft, kept, arm=arm)
        return commit(state, outcome, request, layout, block, emitted, fresh, kernels)


def check_proposal(proposal: Proposal, drafter: Drafter, batch_size: int) -> None:
    """Raise a one-line ValueError if a proposal does not have the shapes of its layout."""
    layout = drafter.layout
    expected = {
        "block_tokens": (batch_size, layout.num_rows),
        "num_draft": (batch_size, layout.num_candidates),
    }
    for name, shape in expected.items():
        got = getattr(proposal, name)
        if got.shape != shape or got.dtype != jnp.int32:
            raise ValueError(
                f"{type(drafter).__name__} proposed {name} of shape {got.shape} and dtype "
                f"{got.dtype}, expected {shape} and int32"
            )


def with_current_token(proposal: Proposal, state: DecodeState) -> Proposal:
    """Return the proposal with the current token in row 0, whatever the drafter put there."""
    current = current_tokens(state.tokens, state.length)[:, None]
    is_first = jnp.arange(proposal.block_tokens.shape[1], dtype=jnp.int32)[None] == 0
    block_tokens = jnp.where(is_first, current, proposal.block_tokens)
    return dataclasses.replace(proposal, block_tokens=block_tokens)


def num_valid_of(config: Qwen3Config, axis: ModelAxis) -> int | None:
    """Return the id from which on none is picked, None if all may be."""
    if axis.size > 1 and config.num_valid_tokens is None:
        return config.vocab_size  # what follows is padding
    return config.num_valid_tokens


def sample_scores(
    logits: jax.Array,
    proposal: Proposal,
    state: DecodeState,
    request: Request,
    layout: BlockLayout,
    mode: SamplingMode,
    config: Qwen3Config,
    axis: ModelAxis,
    kernels: Implementation | None,
) -> jax.Array | None:
    """Return scores whose argmax is the token to pick, or None where logits are that.

    f32[B, R, V]; where devices share the model, each has whole rows instead of its part of all of
    them: f32[R', 1, V], row after row of the batch.
    """
    if mode == GREEDY:
        return None
    batch_size, num_rows = logits.shape[:2]
    num_ids = config.vocab_size
    depth = np.asarray(layout.depth, np.int32)[list(layout.logit_rows)]
    positions = state.length[:, None] + depth[None]
    counts = None
    if mode.has_penalties:
        counts = prefix_counts(
            state.tokens,
            state.length,
            request.prompt_length,
            proposal.block_tokens,
            layout,
            num_ids,
        )
    is_banned = None
    if mode.has_minimum:
        num_emitted = positions - request.prompt_length[:, None]
        is_banned = early_eos(request.eos_ids, num_emitted, request.min_new_tokens, num_ids)
    params, seed = request.sampling, request.seed
    if axis.size > 1:

        def own(values: jax.Array) -> jax.Array:
            return axis.own_rows(values.reshape(batch_size * num_rows, 1, *values.shape[2:]))

        def own_setting(values: jax.Array) -> jax.Array:
            return own(jnp.repeat(values[:, None], num_rows, axis=1))[:, 0]

        logits = axis.spread_rows(logits.reshape(batch_size * num_rows, -1), num_ids)[:, None]
        counts, is_banned, positions = jax.tree.map(own, (counts, is_banned, positions))
        params, seed = jax.tree.map(own_setting, (params, seed))
        depth = depth[:1]  # each row is a block of its own
    scores = process_logits(
        logits,
        params,
        mode,
        num_valid=config.num_valid_tokens,
        counts=counts,
        is_banned=is_banned,
        implementation=kernels,
    )
    if mode.is_sampled:
        scores = add_noise(scores, params, seed, positions, depth)
    return scores


def _loop(
    model: Qwen3 | FlatModel,
    state: DecodeState,
    request: Request,
    max_steps: jax.Array,
    *,
    drafter: Drafter | Auto,
    kernels: Implementation | None = None,
    mode: SamplingMode = GREEDY,
) -> DecodeState:
    """Run steps until every row is finished, `max_steps` at most.

    The state is donated: the cache is updated in place. `max_steps` is an array, so a text that
    streams in chunks of steps and one that runs to its end share this compiled program.

    On a mesh the parts of a batch run for as many steps as each of them needs.
    """
    run = functools.partial(_run_steps, drafter=drafter, kernels=kernels, mode=mode)
    specs = (STATE_SPECS, REQUEST_SPECS, SCALAR)
    return over_mesh(run, model, specs, STATE_SPECS)(state, request, max_steps)


_jit_loop = functools.partial(
    jax.jit, static_argnames=("drafter", "kernels", "mode"), donate_argnames=("state",)
)
run_steps = _jit_loop(_loop, compiler_options=LOOP_OPTIONS)
# For models that devices share: collectives are no part of a CUDA graph.
_run_shared_steps = _jit_loop(_loop)


def run_steps_of(model: Qwen3 | FlatModel) -> Any:
    """Return `run_steps` as it is compiled for a model and its mesh."""
    return run_steps if model_size(model.mesh) == 1 else _run_shared_steps


def _run_steps(
    model: Qwen3,
    state: DecodeState,
    request: Request,
    max_steps: jax.Array,
    *,
    drafter: Drafter | Auto,
    kernels: Implementation | None,
    mode: SamplingMode,
) -> DecodeState:
    first_step = state.num_steps

    def is_running(state: DecodeState) -> jax.Array:
        # An unfinished row takes part in every step, so that its count of them is the loop's.
        is_unfinished = state.finish == UNFINISHED
        return jnp.any(is_unfinished & (state.num_steps - first_step < max_steps))

    if isinstance(drafter, Auto):
        return _run_arms(model, state, request, drafter, kernels, mode, is_running)

    def body(state: DecodeState) -> DecodeState:
        return decode_step(model, state, request, drafter, kernels, mode)

    return jax.lax.while_loop(is_running, body, state)


def _run_arms(
    model: Qwen3,
    state: DecodeState,
    request: Request,
    drafter: Auto,
    kernels: Implementation | None,
    mode: SamplingMode,
    is_running: Callable[[DecodeState], jax.Array],
) -> DecodeState:
    """Run steps of the arms that `drafter` chooses.

    Each arm has a loop of its own, inside the one over all, which runs while the arm is chosen:
    what a branch returns is copied, the cache too; what a loop carries stays in place.
    """

    def steps_of(index: int, state: DecodeState) -> DecodeState:
        def is_chosen(state: DecodeState) -> jax.Array:
            return is_running(state) & (state.drafter.arm[0] == index)

        def body(state: DecodeState) -> DecodeState:
            return decode_step_of_arm(model, state, request, drafter, index, kernels, mode)

        return jax.lax.while_loop(is_chosen, body, state)

    def body(state: DecodeState) -> DecodeState:
        for index in range(len(drafter.arms)):
            state = steps_of(index, state)
        return state

    return jax.lax.while_loop(is_running, body, plan_step(state, request, drafter))
