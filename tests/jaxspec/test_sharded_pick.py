"""A vocabulary that devices share: the pick is that of one device, ties and NaN included."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxspec import BlockLayout, Lookahead
from jaxspec.drafters import Proposal
from jaxspec.sampling import SamplingMode, SamplingParams, add_noise, process_logits
from jaxspec.sharding import MODEL, ModelAxis, make_mesh
from jaxspec.verify import verify

LAYOUTS = [BlockLayout.linear(4), Lookahead(2, 3, 2).layout]


def proposal_for(layout: BlockLayout, batch_size: int, seed: int) -> Proposal:
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 6, (batch_size, layout.num_rows), dtype=np.int32)
    full = np.full((batch_size, layout.num_candidates), layout.num_draft_tokens, np.int32)
    return Proposal(jnp.asarray(block), jnp.asarray(full))


@functools.cache
def sharded_verify(layout: BlockLayout, size: int, num_valid: int, has_scores: bool):
    axis = ModelAxis(size)

    def run(logits, proposal):
        scores = None
        if has_scores:
            scores = axis.spread_rows(logits.reshape(-1, logits.shape[-1]), num_valid)[:, None]
        return verify(logits, proposal, layout, scores=scores, num_valid=num_valid, axis=axis)

    return jax.jit(
        jax.shard_map(
            run,
            mesh=make_mesh(1, size),
            in_specs=(P(None, None, MODEL), P()),
            out_specs=P(),
            check_vma=False,
        )
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["linear", "lookahead"])
def test_ties_nan_and_padding(layout, size, has_scores, data):
    """The first NaN, else the largest, on ties the lowest id; what is past the last id never."""
    batch_size, num_columns, num_valid = 3, 24, data.draw(st.sampled_from([23, 17, 9, 2]))
    values = data.draw(st.sampled_from([(0.0, 1.0), (-5.0, -4.0), (-np.inf, -1.0), (np.nan, 2.0)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    shape = (batch_size, len(layout.logit_rows), num_columns)
    logits = rng.choice(np.asarray(values, np.float32), shape, p=[0.1, 0.9])
    # Padding that would win: 0 among negative logits, or larger than all.
    logits[..., num_valid:] = data.draw(st.sampled_from([0.0, 9.0]))
    proposal = proposal_for(layout, batch_size, data.draw(st.integers(0, 99)))
    ours = sharded_verify(layout, size, num_valid, has_scores)(jnp.asarray(logits), proposal)
    expected = verify(jnp.asarray(logits), proposal, layout, num_valid=num_valid)
    for name in ("target_tokens", "greedy_tokens", "num_accepted", "best_candidate"):
        left, right = getattr(ours, name), getattr(expected, name)
        np.testing.assert_array_equal(left, right, err_msg=name)
    assert int(jnp.max(ours.target_tokens)) < num_valid


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_filters_and_noise_are_bit_for_bit_those_of_one_device(size, batch_size):
    """Rows are shared out, so that filters see whole rows: top-k over a sharded axis is no help."""
    num_rows, num_ids = 5, 97
    padded = -(-num_ids // size) * size
    rng = np.random.default_rng(size)
    logits = rng.normal(0, 3, (batch_size, num_rows, padded)).astype(np.float32)
    logits = np.round(logits, 1)  # ties at the thresholds
    mode = SamplingMode(is_sampled=True, has_top_k=True, has_top_p=True, has_min_p=True)
    ones = np.ones(batch_size, np.float32)
    params = SamplingParams(
        temperature=ones * np.float32(0.8), top_k=np.arange(batch_size, dtype=np.int32) * 7 + 3,
        top_p=ones * np.float32(0.7), min_p=ones * np.float32(0.02), repetition_penalty=ones,
        presence_penalty=0 * ones, frequency_penalty=0 * ones,
    )  # fmt: skip
    params = jax.tree.map(jnp.asarray, params)
    seed = jnp.arange(batch_size, dtype=jnp.uint32)
    depth = np.arange(num_rows, dtype=np.int32)
    positions = jnp.full((batch_size, 1), 11, jnp.int32) + depth[None]
    axis = ModelAxis(size)

    def whole(logits):
        scores = process_logits(logits, params, mode, num_valid=None, counts=None)
        return add_noise(scores, params, seed, positions, depth)

    def shared(logits):
        def own(values):
            rows = jnp.broadcast_to(values.reshape(batch_size, -1), (batch_size, num_rows))
            return axis.own_rows(rows.reshape(-1))

        rows = axis.spread_rows(logits.reshape(batch_size * num_rows, -1), num_ids)[:, None]
        settings = jax.tree.map(own, params)
        scores = process_logits(rows, settings, mode, num_valid=None, counts=None)
        scores = add_noise(scores, settings, own(seed), own(positions)[:, None], depth[:1])
        return axis.collect_rows(scores, batch_size * num_rows).reshape(batch_size, num_rows, -1)

    run = jax.shard_map(
        shared,
        mesh=make_mesh(1, size),
        in_specs=P(None, None, MODEL),
        out_specs=P(),
        check_vma=False,
    )
    expected = jax.jit(whole)(jnp.asarray(logits[..., :num_ids]))
    np.testing.assert_array_equal(jax.jit(run)(jnp.asarray(logits)), expected)
    assert np.isinf(np.asarray(expected)).mean() > 0.5


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13])
def test_rows_are_shared_out_and_collected(num_rows):
    axis, rows = ModelAxis(4), np.arange(num_rows * 8, dtype=np.float32).reshape(num_rows, 8)

    def run(part):
        own = axis.spread_rows(part, 7)
        copies = axis.own_rows(jnp.asarray(rows)[:, :7])
        both = jnp.stack([own, copies], axis=1)
        return axis.collect_rows(both, num_rows)

    shared = jax.shard_map(
        run, mesh=make_mesh(1, 4), in_specs=P(None, MODEL), out_specs=P(), check_vma=False
    )
    result = np.asarray(shared(jnp.asarray(rows)))
    np.testing.assert_array_equal(result[:, 0], rows[:, :7])
    np.testing.assert_array_equal(result[:, 1], rows[:, :7])
