"""The drafter and the width of a block, chosen in every step by what has paid."""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp

from jaxspec.drafters.lookahead import Lookahead, LookaheadState
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.protocol import Drafter, Leaf, Outcome, Proposal, current_tokens
from jaxspec.layout import BlockLayout, check_num_rows
from pallas_kernels.dispatch import Implementation

# Evidence of a token ago counts so much; a row begins as if nearly all of one draft had been right.
_MEMORY, _FIRST_HITS = 0.85, 0.9
# Lookahead is tried for so many steps after the first so many, and ever more rarely.
_TRIAL_STEPS, _FIRST_WAIT, _WAIT_GROWTH, _LONGEST_WAIT = 12, 64, 4, 4096
# A step of lookahead counts so much in its mean.
_GAIN_RATE = 0.25
_MOST_CHANCE = 0.995
# Each has a loop of its own in the program.
MAX_ARMS = 16
_NONE = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutoState:
    """What the choice rests on, kept per row.

    Attributes:
      hits: f32[B] tokens that a lookup foretold, older ones counting less.
      tries: f32[B] tokens that it foretold or got wrong, older ones counting less.
      gain: f32[B] tokens a step of lookahead, 1 before it was ever tried.
      clock: i32[B] steps until lookahead is tried; 0 and less while it is.
      wait: i32[B] steps that `clock` starts from after the next trial.
      arm: i32[B] the arm that runs next, the same for all rows.
      draft_tokens: i32[B, M] draft of the widest lookup for the next step.
      num_draft: i32[B, 1] how many of them count.
      lookahead: the state of lookahead, () without it.
    """

    hits: Leaf
    tries: Leaf
    gain: Leaf
    clock: Leaf
    wait: Leaf
    arm: Leaf
    draft_tokens: Leaf
    num_draft: Leaf
    lookahead: LookaheadState | tuple[()]


@dataclasses.dataclass(frozen=True)
class Auto:
    """Choose in every step among plain decoding, prompt lookup of several widths, and lookahead.

    Each way of drafting, an arm, is worth the tokens that it should emit over what its step
    costs; the best arm runs. What a lookup would have foretold is seen in every step, whichever
    arm it ran, since text does not depend on drafts: so a text without anything to copy settles
    on plain decoding and pays for hardly a draft, and one that begins to copy is noticed. The
    tokens of lookahead are known only where it runs, so it is tried for a few steps now and then.

    `generate` measures the costs of the arms once for every shape of a call.

    Attributes:
      num_draft_tokens: widths of prompt lookup to choose among, draft tokens each, ascending.
      lookahead: drafter to choose from besides; None = none.
      ngram_size: longest suffix that is looked up, in tokens.
      min_ngram_size: shortest suffix that is looked up, in tokens.
      match: "last" or "first" occurrence among equally long matches.
      step_costs: relative time of a step of each arm, plain decoding first; None = measured.
      kernels: implementation of the drafters, None = the call's.
    """

    num_draft_tokens: tuple[int, ...] = (3, 7)
    lookahead: Lookahead | None = None
    ngram_size: int = 16
    min_ngram_size: int = 1
    match: str = "last"
    step_costs: tuple[float, ...] | None = None
    kernels: Implementation | None = None

    def __post_init__(self) -> None:
        widths = self.num_draft_tokens
        is_tuple = isinstance(widths, tuple) and all(isinstance(width, int) for width in widths)
        if not is_tuple or not widths or list(widths) != sorted(set(widths)):
            raise ValueError(f"num_draft_tokens={widths} is not an ascending, non-empty tuple")
        if self.lookahead is not None and not isinstance(self.lookahead, Lookahead):
            raise ValueError(f"lookahead={self.lookahead!r} is not a Lookahead")
        for arm in self.arms:
            check_num_rows(arm.layout.num_rows)
        if len(self.arms) > MAX_ARMS:
            raise ValueError(f"{len(self.arms)} arms are more than {MAX_ARMS}")
        costs = self.step_costs
        if costs is not None and not (
            isinstance(costs, tuple)
            and len(costs) == len(self.arms)
            and all(isinstance(cost, int | float) and 0 < cost < math.inf for cost in costs)
        ):
            raise ValueError(f"step_costs={costs} are not {len(self.arms)} positive numbers")

    @property
    def arms(self) -> tuple[Drafter, ...]:
        """Return the drafters to choose among: none, lookups by width, lookahead."""
        lookups = tuple(self._lookup(width) for width in self.num_draft_tokens)
        more = () if self.lookahead is None else (self._lookahead(),)
        return (NoDraft(), *lookups, *more)

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of the arm that drafts most tokens in a row."""
        return max((arm.layout for arm in self.arms), key=lambda layout: layout.num_draft_tokens)

    def init(self, tokens: jax.Array, length: jax.Array, key: jax.Array) -> AutoState:
        """Return the state for a fresh text: hopeful of lookups, and lookahead still untried."""
        ones = jnp.ones(length.shape, jnp.float32)
        memory: LookaheadState | tuple[()] = ()
        if self.lookahead is not None:
            memory = self._lookahead().init(tokens, length, key)
        return AutoState(
            hits=ones * _FIRST_HITS,
            tries=ones,
            gain=ones,
            clock=jnp.full_like(length, _FIRST_WAIT),
            wait=jnp.full_like(length, _FIRST_WAIT * _WAIT_GROWTH),
            arm=jnp.zeros_like(length),
            draft_tokens=jnp.zeros((length.shape[0], self.num_draft_tokens[-1]), jnp.int32),
            num_draft=jnp.zeros((length.shape[0], 1), jnp.int32),
            lookahead=memory,
        )

    def propose(
        self, arm: Drafter, state: AutoState, tokens: jax.Array, length: jax.Array
    ) -> Proposal:
        """Return the block of an arm; that of a lookup is part of the widest one's."""
        if isinstance(arm, Lookahead):
            return arm.propose(_moved(state.lookahead, tokens, length), tokens, length)
        num_draft_tokens = arm.layout.num_draft_tokens
        current = current_tokens(tokens, length)[:, None]
        return Proposal(
            jnp.concatenate([current, state.draft_tokens[:, :num_draft_tokens]], axis=1),
            jnp.minimum(state.num_draft, num_draft_tokens),
        )

    def plan(
        self,
        state: AutoState,
        tokens: jax.Array,
        length: jax.Array,
        costs: jax.Array,
        room: jax.Array,
    ) -> AutoState:
        """Return the state with the next draft, and the arm that is worth most for its time.

        Args:
          state: what is known of each row.
          tokens: i32[B, P] texts.
          length: i32[B] known tokens.
          costs: f32[A] relative time of a step of each arm.
          room: i32[B] tokens that each row can still emit; 0 for a finished one.
        """
        is_active = room > 0
        draft = self._lookup(self.num_draft_tokens[-1]).propose((), tokens, length)
        widths = jnp.asarray((0, *self.num_draft_tokens), jnp.int32)
        # A draft of m tokens, each right with probability p, gives 1 + p + ... + p^m tokens.
        chance = jnp.minimum(state.hits / state.tries, _MOST_CHANCE)[:, None]
        # The last token that there is room for needs no draft.
        useful = jnp.minimum(draft.num_draft, jnp.maximum(room - 1, 0)[:, None])
        drafted = jnp.minimum(widths[None], useful).astype(jnp.float32)
        gain = (1.0 - chance ** (drafted + 1.0)) / (1.0 - chance)
        if self.lookahead is not None:
            of_lookahead = jnp.minimum(state.gain, room.astype(jnp.float32))
            gain = jnp.concatenate([gain, of_lookahead[:, None]], axis=1)
        value = jnp.sum(jnp.where(is_active[:, None], gain, 0.0), axis=0) / costs
        arm = jnp.argmax(value).astype(jnp.int32)
        if self.lookahead is not None:
            # Not tried where even full acceptance would not beat the best of the others.
            last = len(self.arms) - 1
            num_active = jnp.sum(is_active.astype(jnp.float32))
            most = num_active * self.lookahead.ngram_size / costs[last]
            is_trial = jnp.any(is_active & (state.clock <= 0)) & (most > jnp.max(value[:last]))
            arm = jnp.where(is_trial, jnp.int32(last), arm)
        return dataclasses.replace(
            state,
            arm=jnp.broadcast_to(arm, length.shape),
            draft_tokens=draft.block_tokens[:, 1:],
            num_draft=draft.num_draft,
        )

    def learn(
        self,
        arm: Drafter,
        state: AutoState,
        outcome: Outcome,
        tokens: jax.Array,
        length: jax.Array,
    ) -> AutoState:
        """Return the state after a step of an arm, the next draft and arm not planned yet.

        Args:
          arm: the arm that ran.
          state: the state before the step, with the lookup's draft, fed or not.
          outcome: what came of the step.
          tokens: i32[B, P] texts with what it emitted.
          length: i32[B] known tokens with it.
        """
        num_emitted = outcome.num_emitted
        offset = jnp.arange(state.draft_tokens.shape[1], dtype=jnp.int32)[None]
        place = (length - num_emitted)[:, None] + offset
        emitted = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
        is_seen = offset < jnp.minimum(num_emitted[:, None], state.num_draft)
        # The first draft that is wrong ends what counts.
        wrong = jnp.where(is_seen & (state.draft_tokens != emitted), offset, _NONE)
        num_seen = jnp.sum(is_seen.astype(jnp.int32), axis=1)
        num_hits = jnp.minimum(jnp.min(wrong, axis=1), num_seen)
        has_miss = (num_hits < num_seen).astype(jnp.float32)
        count = num_hits.astype(jnp.float32)
        faded = _MEMORY ** (count + has_miss)
        hits = (1.0 - _MEMORY**count) / (1.0 - _MEMORY) * _MEMORY**has_miss
        state = dataclasses.replace(
            state,
            hits=state.hits * faded + hits,
            tries=state.tries * faded + (1.0 - faded) / (1.0 - _MEMORY),
        )
        if self.lookahead is None:
            return state
        is_lookahead = isinstance(arm, Lookahead)
        # A trial that is due waits for its turn; its steps are those that lookahead ran.
        has_moved = is_lookahead | (state.clock > 0)
        clock = state.clock - has_moved.astype(jnp.int32)
        is_over = clock <= -_TRIAL_STEPS
        longer = jnp.minimum(state.wait * _WAIT_GROWTH, _LONGEST_WAIT)
        state = dataclasses.replace(
            state,
            clock=jnp.where(is_over, state.wait, clock),
            wait=jnp.where(is_over, longer, state.wait),
        )
        known = cast(LookaheadState, state.lookahead)
        if not is_lookahead:
            # The window falls behind: nothing of it is harvested before it is filled anew.
            behind = dataclasses.replace(known, num_steps=jnp.zeros_like(known.num_steps))
            return dataclasses.replace(state, lookahead=behind)
        gain = state.gain + _GAIN_RATE * (num_emitted.astype(jnp.float32) - state.gain)
        return dataclasses.replace(
            state,
            gain=jnp.where(num_emitted > 0, gain, state.gain),
            lookahead=cast(Lookahead, arm).update(
                _moved(known, tokens, length - num_emitted), outcome, tokens, length
            ),
        )

    def _lookup(self, num_draft_tokens: int) -> PromptLookup:
        return PromptLookup(
            num_draft_tokens, self.ngram_size, self.min_ngram_size, self.match, self.kernels
        )

    def _lookahead(self) -> Lookahead:
        assert self.lookahead is not None
        if self.kernels is None or self.lookahead.kernels is not None:
            return self.lookahead
        return dataclasses.replace(self.lookahead, kernels=self.kernels)


def _moved(
    state: LookaheadState | tuple[()], tokens: jax.Array, length: jax.Array
) -> LookaheadState:
    """Return the state of lookahead at the current token, where other arms may have led."""
    known = cast(LookaheadState, state)
    current = current_tokens(tokens, length)
    return dataclasses.replace(known, window=known.window.at[:, 0, 0].set(current))
