"""The model against transformers, against itself in blocks, and under garbage in dead slots."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from jaxspec.cache import commit_block, init_cache, write_block
from jaxspec.config import Qwen3Config, YarnScaling
from jaxspec.layout import BlockLayout
from jaxspec.model import Qwen3, rope_frequencies, rope_tables, rotate
from tests.helpers import ROPE, TINY, YARN, make_hf_checkpoint, spelled_rope

SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "wide_heads": {"hidden_size": 48, "head_dim": 32},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_kv_heads": {"num_key_value_heads": 4},
    "narrow_heads": {"head_dim": 8},
    "yarn": {"rope": YARN},
    "yarn_exact_range": {"rope": YARN | {"truncate": False, "beta_fast": 4.0}},
    "odd_vocabulary": {"vocab_size": 1013, "rope": ROPE | {"rope_theta": 1e6}},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "sharded": {"max_shard_size": "60KB"},
}
NUM_TOKENS = 40
CAPACITY = 48
# Two branches of three after the current token, and a tree of five whose branches share a row.
BRANCHES = BlockLayout.from_mask(
    depth=[0, 1, 2, 3, 1, 2, 3],
    mask=[
        [j in path for j in range(7)]
        for path in [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 4), (0, 4, 5), (0, 4, 5, 6)]
    ],
    candidate_rows=[(0, 1, 2, 3), (0, 4, 5, 6)],
    logit_rows=range(7),
)
SHARED = BlockLayout.from_mask(
    depth=[0, 1, 2, 2, 1],
    mask=[[j in path for j in range(5)] for path in [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 4)]],
    candidate_rows=[(0, 1, 2), (0, 1, 3)],
    logit_rows=[0, 1, 2, 3],
)


@functools.partial(jax.jit, static_argnames="layout")
def forward(model, block_tokens, num_cached, cache, layout):
    """Run one block; the model is an argument, so that its weights are no constants."""
    return model(block_tokens, num_cached, cache, layout)


append = jax.jit(
    lambda cache, rows, start: write_block(
        cache, rows, start, jnp.ones((start.shape[0], rows[0][0].shape[2]), bool)
    )
)


def random_tokens(vocab_size: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def one_pass(model: Qwen3, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of all positions, without a cache."""
    layout = BlockLayout.linear(tokens.shape[1])
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    return np.asarray(forward(model, tokens, start, None, layout)[0])


def in_blocks(model: Qwen3, tokens: np.ndarray, width: int, fill: float = 0.0):
    """Return the logits of all positions and the cache, fed `width` tokens at a time."""
    batch_size = tokens.shape[0]
    cache = init_cache(model.config, batch_size=batch_size, capacity=CAPACITY, dtype=model.dtype)
    cache = jax.tree.map(lambda part: jnp.full_like(part, fill), cache)
    logits = []
    for start in range(0, tokens.shape[1], width):
        num_cached = jnp.full((batch_size,), start, jnp.int32)
        layout = BlockLayout.linear(width)
        part, rows = forward(model, tokens[:, start : start + width], num_cached, cache, layout)
        cache = append(cache, rows, num_cached)
        logits.append(np.asarray(part))
    return np.concatenate(logits, axis=1), cache


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    """Our float32 model, tokens, and the logits of transformers for them."""
    import torch

    path = tmp_path_factory.mktemp("checkpoint")
    theirs = make_hf_checkpoint(path, **SHAPES[request.param])
    tokens = random_tokens(theirs.config.vocab_size, (2, NUM_TOKENS))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    return checkpoints.load_model(path, dtype="float32"), tokens, expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Qwen3:
    path = tmp_path_factory.mktemp("tiny")
    make_hf_checkpoint(path, seed=1)
    return checkpoints.load_model(path)


@pytest.mark.parametrize("reference", SHAPES, indirect=True)
def test_logits_are_those_of_transformers(reference):
    model, tokens, expected = reference
    logits = one_pass(model, tokens)
    assert expected.std() > 0.3
    assert np.abs(logits - expected).max() <= 1e-4
    top_two = np.sort(expected, axis=-1)[..., -2:]
    assert np.diff(top_two).min() > 1e-6
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("reference", ["tied", "wide_heads", "one_kv_head", "yarn"], indirect=True)
def test_blocks_through_the_cache_give_the_logits_of_one_pass(reference):
    model, tokens, expected = reference
    tokens, expected = tokens[:, :20], expected[:, :20]
    whole = one_pass(model, tokens)
    tolerance = 1e-5 * np.abs(whole).max()
    for width in (1, 2, 5):
        logits, _ = in_blocks(model, tokens, width)
        assert np.abs(logits - whole).max() <= tolerance
        assert np.abs(logits - expected).max() <= 1e-4


def test_bfloat16_follows_the_casts_of_transformers(tmp_path):
    import torch

    theirs = make_hf_checkpoint(tmp_path, dtype="bfloat16")
    model = checkpoints.load_model(tmp_path)
    assert model.dtype == jnp.bfloat16
    tokens = random_tokens(97, (2, NUM_TOKENS))
    with torch.no_grad():
        # Only the weights: the frequencies stay in float32 when transformers loads bfloat16.
        theirs.model.layers.to(torch.bfloat16)
        theirs.model.norm.to(torch.bfloat16)
        theirs.model.embed_tokens.to(torch.bfloat16)
        theirs.lm_head.to(torch.bfloat16)
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()
    difference = np.abs(one_pass(model, tokens) - expected)
    assert difference.max() <= 0.1
    assert difference.mean() <= 0.01


@pytest.mark.parametrize(
    ("key_fill", "value_fill"),
    [
        (1e4, 1e4),
        (np.finfo(np.float32).max, np.finfo(np.float32).max),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max),
        (np.inf, 1e4),
        (np.nan, 1e4),
    ],
)
def test_dead_slots_change_nothing(tiny, key_fill, value_fill):
    _, cache = in_blocks(tiny, random_tokens(97, (3, 20)), 5)
    # Rows of different length, so that live slots of one row are dead in the other.
    num_cached = jnp.asarray([20, 7, 0], jnp.int32)
    is_live = (jnp.arange(CAPACITY)[None] < num_cached[:, None])[:, None, :, None]
    poisoned = tuple(
        (jnp.where(is_live, key, key_fill), jnp.where(is_live, value, value_fill))
        for key, value in cache
    )
    for layout in (BlockLayout.linear(1), BlockLayout.linear(3), BRANCHES, SHARED):
        block = random_tokens(97, (3, layout.num_rows), seed=2)
        expected, _ = forward(tiny, block, num_cached, cache, layout)
        got, _ = forward(tiny, block, num_cached, poisoned, layout)
        assert np.isfinite(np.asarray(expected)).all()
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_rows_past_the_capacity_are_dropped(tiny):
    cache = init_cache(tiny.config, batch_size=2, capacity=CAPACITY, dtype=tiny.dtype)
    cache = jax.tree.map(lambda part: jnp.full_like(part, 7.0), cache)
    rows = jax.tree.map(lambda part: jnp.full_like(part[:, :, :5], 1.0), cache)
    after = append(cache, rows, jnp.asarray([CAPACITY - 2, 0], jnp.int32))
    for part in jax.tree.leaves(after):
        is_written = np.asarray(part == 1.0).all(axis=(1, 3))
        np.testing.assert_array_equal(np.flatnonzero(is_written[0]), [CAPACITY - 2, CAPACITY - 1])
        np.testing.assert_array_equal(np.flatnonzero(is_written[1]), range(5))
        assert bool(((part == 1.0) | (part == 7.0)).all())


@pytest.mark.parametrize("layout", [BRANCHES, SHARED], ids=["branches", "shared"])
@pytest.mark.parametrize("num_context", [0, 9])
def test_each_branch_has_the_logits_of_its_linear_pass(tiny, layout, num_context):
    context = random_tokens(97, (2, num_context))
    cache = init_cache(tiny.config, batch_size=2, capacity=CAPACITY, dtype=tiny.dtype)
    if num_context:
        _, cache = in_blocks(tiny, context, 3)
    block = random_tokens(97, (2, layout.num_rows), seed=3)
    num_cached = jnp.full((2,), num_context, jnp.int32)
    logits, _ = forward(tiny, block, num_cached, cache, layout)
    for rows in layout.candidate_rows:
        whole = one_pass(tiny, np.concatenate([context, block[:, list(rows)]], axis=1))
        where = [layout.logit_rows.index(row) for row in rows]
        got = np.asarray(logits)[:, where]
        assert np.abs(got - whole[:, num_context:]).max() <= 1e-5 * np.abs(whole).max()


@pytest.mark.parametrize("layout", [BRANCHES, SHARED], ids=["branches", "shared"])
def test_a_committed_candidate_continues_as_the_linear_pass_does(tiny, layout):
    context = random_tokens(97, (3, 6))
    _, cache = in_blocks(tiny, context, 3, fill=1e4)
    block = random_tokens(97, (3, layout.num_rows), seed=4)
    num_cached = jnp.full((3,), 6, jnp.int32)
    _, block_kv = forward(tiny, block, num_cached, cache, layout)
    best = np.asarray([0, 1, 1], np.int32)
    num_emitted = np.asarray([3, 1, 0], np.int32)
    committed = commit_block(
        cache,
        block_kv,
        layout,
        num_cached=num_cached,
        best_candidate=jnp.asarray(best),
        num_emitted=jnp.asarray(num_emitted),
    )
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(committed), strict=True):
        np.testing.assert_array_equal(before[2], after[2])
        # Rows past the emitted tokens write nothing.
        np.testing.assert_array_equal(before[1, :, 7:], after[1, :, 7:])
    committed = commit_block(
        cache,
        block_kv,
        layout,
        num_cached=num_cached,
        best_candidate=jnp.asarray(best),
        num_emitted=jnp.full((3,), layout.num_draft_tokens + 1),
    )
    rows = np.asarray(layout.candidate_rows)[best]
    accepted = np.take_along_axis(block, rows, axis=1)
    after = random_tokens(97, (3, 4), seed=5)
    whole = one_pass(tiny, np.concatenate([context, accepted, after], axis=1))[:2]
    new_length = num_cached + rows.shape[1]
    logits, _ = forward(tiny, after, new_length, committed, BlockLayout.linear(4))
    got = np.asarray(logits)[:2]
    assert np.abs(got - whole[:, -4:]).max() <= 1e-5 * np.abs(whole).max()


def test_changing_one_branch_changes_no_other(tiny):
    _, cache = in_blocks(tiny, random_tokens(97, (2, 9)), 3)
    num_cached = jnp.full((2,), 9, jnp.int32)
    block = random_tokens(97, (2, 7), seed=6)
    changed = block.copy()
    changed[:, 4:] = (changed[:, 4:] + 1) % 97
    logits, _ = forward(tiny, block, num_cached, cache, BRANCHES)
    after, _ = forward(tiny, changed, num_cached, cache, BRANCHES)
    np.testing.assert_array_equal(np.asarray(logits)[:, :4], np.asarray(after)[:, :4])
    is_different = np.asarray(logits)[:, 4:] != np.asarray(after)[:, 4:]
    assert is_different.any(axis=-1).all()


def test_ids_outside_the_vocabulary_are_clipped(tiny):
    inside = np.asarray([[5, 0, 96, 0]], np.int32)
    outside = np.asarray([[5, -1, 97, -(2**31)]], np.int32)
    np.testing.assert_array_equal(one_pass(tiny, outside), one_pass(tiny, inside))


def test_weights_are_arguments_of_the_compiled_program(tiny):
    layout = BlockLayout.linear(2)
    tokens = random_tokens(97, (1, 2))
    lowered = forward.lower(tiny, tokens, jnp.zeros(1, jnp.int32), None, layout)
    dense = re.findall(r"dense<[^>]*>", lowered.as_text())
    assert sum(len(text) for text in dense) < 4096


def test_rotation_pairs_the_halves_and_not_neighbours():
    config = Qwen3Config(
        **{k: v for k, v in TINY.items() if k in Qwen3Config.__annotations__}, rope_theta=1e4
    )
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    cos, sin = rope_tables(config, positions, jnp.float32)
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 16)).astype(np.float32)
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    c, s = np.asarray(cos)[:, :, None], np.asarray(sin)[:, :, None]
    first, second = x[..., :8], x[..., 8:]
    halves = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    np.testing.assert_allclose(got, halves, rtol=1e-6, atol=1e-6)
    even, odd = x[..., ::2], x[..., 1::2]
    neighbours = np.stack([even * c - odd * s, odd * c + even * s], axis=-1).reshape(x.shape)
    assert np.abs(got - neighbours)[:, 1:].max() > 0.1


def test_scores_depend_on_the_distance_of_positions_only():
    config = Qwen3Config(97, 64, 96, 2, 4, 2, 16, 1e-6, 1e4, 256)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 1, 16)), jnp.float32)

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            rotate(part[None], *rope_tables(config, jnp.asarray([[position]]), jnp.float32))
            for part, position in zip(x, (query_position, key_position), strict=True)
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


@pytest.mark.parametrize("head_dim", [8, 32, 128])
@pytest.mark.parametrize("original", [64, 4096, 32768])
@pytest.mark.parametrize(
    "extra",
    [{}, {"truncate": False}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.25}],
    ids=["default", "exact_range", "betas", "attention_factor"],
)
def test_yarn_frequencies_are_those_of_transformers(head_dim, original, extra):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = YARN | {"rope_theta": 1e6, "original_max_position_embeddings": original} | extra
    theirs = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=4 * original, **spelled_rope(rope)
    )
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    yarn = YarnScaling(4.0, original, **extra)
    config = Qwen3Config(97, 64, 96, 2, 4, 2, head_dim, 1e-6, 1e6, 4 * original, rope_scaling=yarn)
    np.testing.assert_allclose(rope_frequencies(config), expected.numpy(), rtol=2e-6)
    assert yarn.cos_sin_scale == pytest.approx(scale)
