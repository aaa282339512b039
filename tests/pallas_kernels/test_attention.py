"""block_attention against a float64 form in NumPy."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxspec.drafters import Lookahead
from pallas_kernels import block_attention
from pallas_kernels.attention import num_counters
from pallas_kernels.attention.cases import CASES, Case

SMALL = [case for case in CASES if not case.is_benchmark]
# Keys of a tile, whatever the kernel's constants are: lengths around these meet all borders.
BORDERS = (16, 32, 64, 128)
EPS = 1e-6


@functools.cache
def compiled(mask, implementation):
    """Compile the op for one mask."""
    return jax.jit(partial(block_attention, mask=mask, eps=EPS, implementation=implementation))


def oracle(qkv, cos, sin, q_norm, k_norm, cache_key, cache_value, num_cached, mask):
    """Compute attention, keys and values in float64."""
    qkv, cos, sin, q_norm, k_norm = (
        np.asarray(x, np.float64) for x in (qkv, cos, sin, q_norm, k_norm)
    )
    num_rows, head_dim = qkv.shape[1], qkv.shape[4]
    sees = np.tri(num_rows) if mask is None else np.frombuffer(mask, np.int8)
    sees = sees.reshape(num_rows, num_rows) != 0

    def rotated(x, weight):
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * weight
        first, second = np.split(x, 2, -1)
        c, s = cos[:, :, None, None], sin[:, :, None, None]
        return np.concatenate([first * c - second * s, second * c + first * s], -1)

    query = rotated(qkv[..., :-2, :], q_norm)
    key = rotated(qkv[..., -2:-1, :], k_norm)[..., 0, :].swapaxes(1, 2)
    value = qkv[..., -1, :].swapaxes(1, 2)
    out = np.zeros(query.shape)
    for b, n in enumerate(num_cached):
        live = [np.asarray(x[b, :, :n], np.float64) for x in (cache_key, cache_value)]
        keys, values = (np.concatenate(x, 1) for x in zip(live, (key[b], value[b]), strict=True))
        scores = np.einsum("tkgh,ksh->tkgs", query[b], keys) / np.sqrt(head_dim)
        visible = np.concatenate([np.ones((num_rows, n), bool), sees], 1)
        scores = np.where(visible[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[b] = np.einsum("tkgs,ksh->tkgh", weights, values)
    return out, key, value


def distance(actual, expected):
    """Return the relative norm of a difference."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def check(arrays, mask, implementation):
    """Compare a form with the oracle, and with the XLA form where that rounds."""
    *out, counters = compiled(mask, implementation)(*arrays)
    assert counters is None
    assert all(x.dtype == arrays[0].dtype for x in out)
    is_wide = arrays[0].dtype == jnp.float32
    limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[arrays[0].dtype.name]
    expected = oracle(*arrays, mask)
    xla = compiled(mask, "xla")(*arrays)
    for actual, plain, exact in zip(out, xla, expected, strict=False):
        assert distance(actual, exact) <= limit
        assert is_wide or distance(actual, exact) <= 1.1 * distance(plain, exact)
    for actual, plain in zip(out[1:], xla[1:], strict=False):
        assert distance(actual, plain) <= (1e-6 if is_wide else limit / 10)
    np.testing.assert_array_equal(out[2], xla[2])
    return out


def lengths_of(case):
    """Return numbers of cached slots around every border, the cache's ends included."""
    ends = [case.capacity - case.num_rows, case.capacity]
    near = [border + i for border in BORDERS for i in (-1, 0)]
    return [0, 1, *[n for n in near if n < case.capacity], *[n for n in ends if n > 0]]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_match_the_oracle(implementation, case):
    mask = case.settings()["mask"]
    lengths = lengths_of(case)
    for seed in range(len(lengths)):
        arrays = case.arrays(seed)
        # Rows of the batch have different lengths.
        num_cached = np.array(np.roll(lengths, -seed)[: case.batch_size], np.int32)
        arrays = [jnp.asarray(x) for x in (*arrays[:-1], num_cached)]
        out = check(arrays, mask, implementation)
        check_dead_slots(arrays, out, compiled(mask, implementation), seed)


def check_dead_slots(arrays, expected, function, seed):
    """Write what must not matter to the slots that are not live."""
    *block, cache_key, cache_value, num_cached = arrays
    garbage = (np.nan, -np.inf, float(np.finfo(np.float16).max))[seed % 3]
    is_dead = jnp.arange(cache_key.shape[2])[None] >= num_cached[:, None]
    caches = [jnp.where(is_dead[:, None, :, None], garbage, x) for x in (cache_key, cache_value)]
    *actual, _ = function(*block, *caches, num_cached)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_position_has_the_same_bits_in_a_block_of_any_width():
    for width in (5, 16):
        check_widths(width, "interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("width", [2, 5, 8, 16])
def test_a_position_has_the_same_bits_on_a_gpu(width, head_dim):
    check_widths(width, "triton", head_dim=head_dim, text_length=1300, kv_heads=8)


def check_widths(width, implementation, *, head_dim=64, text_length=150, kv_heads=1):
    """Decode a text row by row, then parts of it in blocks, and compare bits."""
    case = Case("text", text_length, text_length + 50, 0, kv_heads=kv_heads, head_dim=head_dim)
    qkv, cos, sin, q_norm, k_norm, *cache, _ = map(jnp.asarray, case.arrays(width))
    function = compiled(None, implementation)

    def run(start, num_rows, cache):
        block = [x[:, start : start + num_rows] for x in (qkv, cos, sin)]
        return function(*block, q_norm, k_norm, *cache, jnp.array([start], jnp.int32))

    write = jax.jit(lambda cache, new, n: jax.lax.dynamic_update_slice(cache, new, (0, 0, n, 0)))
    cache = [jnp.full_like(x, jnp.nan) for x in cache]
    rows, caches = [], []
    for n in range(text_length):
        out, key, value, _ = run(n, 1, cache)
        rows.append(out)
        caches.append(cache)
        cache = [write(x, y, n) for x, y in zip(cache, (key, value), strict=True)]
    rows = np.concatenate(rows, 1)
    near = [border - i for border in BORDERS for i in (width, width - 1, 1, 0)]
    starts = {0, 1, *near, *range(0, text_length - width, 3 * width), text_length - width}
    for start in sorted(starts & set(range(text_length - width + 1))):
        out, key, value, _ = run(start, width, caches[start])
        stop = start + width
        np.testing.assert_array_equal(np.asarray(out), rows[:, start:stop])
        np.testing.assert_array_equal(key, cache[0][:, :, start:stop])
        np.testing.assert_array_equal(value, cache[1][:, :, start:stop])


@pytest.mark.parametrize("widths, capacity", [((20,), 200), ((70,), 250), ((1, 6, 16), 200)])
def test_a_position_has_the_same_bits_at_any_place_in_a_block(widths, capacity):
    check_places(widths, "interpret", head_dim=32, capacity=capacity)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(1, 5, 8, 16), (17,), (32,), (64,), (128,)], ids=str)
@pytest.mark.parametrize("capacity", [1500, 9000])
def test_a_place_in_a_block_changes_no_bits_on_a_gpu(widths, capacity):
    check_places(widths, "triton", head_dim=128, capacity=capacity)


def check_places(widths, implementation, *, head_dim, capacity):
    """Decode overlapping blocks of a text, and compare the bits of rows of one position."""
    case = Case("text", capacity, capacity, 0, kv_heads=1, head_dim=head_dim)
    qkv, cos, sin, q_norm, k_norm, *cache, none = map(jnp.asarray, case.arrays(widths[0]))
    function = compiled(None, implementation)
    _, *known, _ = function(qkv, cos, sin, q_norm, k_norm, *cache, none)
    rows, keys = {}, {}

    def check_block(start, width):
        is_live = (jnp.arange(capacity) < start)[None, None, :, None]
        live = [jnp.where(is_live, x, jnp.nan) for x in known]
        block = [x[:, start : start + width] for x in (qkv, cos, sin)]
        out, key, value, _ = function(*block, q_norm, k_norm, *live, jnp.array([start], jnp.int32))
        np.testing.assert_array_equal(value, known[1][:, :, start : start + width])
        for found, parts in ((rows, np.asarray(out)[0]), (keys, np.asarray(key)[0].swapaxes(0, 1))):
            for position, part in enumerate(parts, start):
                np.testing.assert_array_equal(part, found.setdefault(position, part))

    for width in widths:
        for border in (width, 128, 4096, capacity - width):
            first = border - width
            for start in {first, first + 1, border - width // 2, border - 1, border}:
                if start + width <= capacity:
                    check_block(start, width)


def test_lookahead_layout(implementation):
    layout = Lookahead(window_size=5, ngram_size=4, num_candidates=4).layout
    case = Case("lookahead", layout.num_rows, 200, 0, kv_heads=1, head_dim=64)
    for seed, num_cached in enumerate((0, 1, 64, 100, 200)):
        *arrays, _ = case.arrays(seed)
        arrays = [jnp.asarray(x) for x in (*arrays, np.array([num_cached], np.int32))]
        check(arrays, layout.packed_mask, implementation)


@pytest.mark.parametrize("num_rows", [3, 40, 150])
def test_without_a_cache(implementation, num_rows):
    case = Case("block", num_rows, 10, 7, kv_heads=1, groups=2, head_dim=32)
    *arrays, num_cached = map(jnp.asarray, case.arrays())
    *actual, _ = compiled(None, implementation)(*arrays[:5], None, None, num_cached)
    expected = oracle(*arrays, jnp.zeros_like(num_cached), None)
    for x, exact in zip(actual, expected, strict=True):
        assert distance(x, exact) <= 1e-2


@pytest.mark.parametrize("num_rows", [6, 20, 150])
def test_counters_come_back_as_zeros(implementation, num_rows):
    case = Case("counted", num_rows, 400, 300, kv_heads=2, groups=2, head_dim=32)
    arrays = [jnp.asarray(x) for x in case.arrays()]
    expected = oracle(*arrays, None)
    counters = jnp.zeros(num_counters(arrays[0].shape) + 3, jnp.int32)
    for _ in range(2):
        *actual, counters = compiled(None, implementation)(*arrays, counters)
        assert distance(actual[0], expected[0]) <= 1e-2
        assert not np.asarray(counters).any()


def test_the_kernel_refuses_other_head_widths():
    case = Case("width", 1, 10, 5, kv_heads=1, groups=1, head_dim=48)
    arrays = [jnp.asarray(x) for x in case.arrays()]
    with pytest.raises(NotImplementedError, match="a head width of 48 is not 32, 64 or 128"):
        block_attention(*arrays, mask=None, eps=EPS, implementation="interpret")


def array(*shape, dtype=jnp.float32):
    """Make an array of zeros."""
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(qkv=array(2, 3, 4, 5, 32, dtype=jnp.int32)), "qkv has dtype int32, not float32"),
        (dict(qkv=array(2, 3, 4, 2, 32)), r"qkv of shape \(2, 3, 4, 2, 32\) has no query heads"),
        (dict(qkv=array(2, 0, 4, 5, 32)), "has no query heads or no elements"),
        (dict(qkv=array(2, 3, 4, 5, 31)), "qkv has an odd head width, 31"),
        (dict(cos=array(2, 3, 32)), r"cos has shape \(2, 3, 32\), not \(2, 3, 16\)"),
        (dict(sin=array(2, 3, 16, dtype=jnp.float16)), "sin has dtype float16, not float32 as qkv"),
        (dict(q_norm=array(16)), r"q_norm has shape \(16,\), not \(32,\)"),
        (dict(k_norm=array(32, dtype=jnp.bfloat16)), "k_norm has dtype bfloat16, not float32"),
        (dict(cache_key=None), "cache_key and cache_value are not both given or both None"),
        (dict(cache_key=array(2, 5, 9, 32)), r"cache_key has shape .*, not \(2, 4, 9, 32\)"),
        (dict(cache_value=array(2, 4, 8, 32)), r"cache_value has shape .*, not \(2, 4, 9, 32\)"),
        (dict(cache_value=array(2, 4, 9, 32, dtype=jnp.float16)), "cache_value has dtype float16"),
        (
            dict(cache_key=array(2, 4, 0, 32), cache_value=array(2, 4, 0, 32)),
            r"cache_key of shape \(2, 4, 0, 32\) has no slots",
        ),
        (dict(num_cached=array(2)), "num_cached has dtype float32, not int32"),
        (dict(num_cached=array(3, dtype=jnp.int32)), r"num_cached has shape \(3,\), not \(2,\)"),
        (dict(counters=array(8)), "counters has dtype float32, not int32"),
        (
            dict(counters=array(7, dtype=jnp.int32)),
            r"counters has shape \(7,\), at least \(8,\) is needed",
        ),
        (dict(mask=b"\1" * 8), "mask has 8 entries, expected 9 for 3 rows"),
    ],
)
def test_bad_arguments_are_named(monkeypatch, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    arguments = dict(
        qkv=array(2, 3, 4, 5, 32),
        cos=array(2, 3, 16),
        sin=array(2, 3, 16),
        q_norm=array(32),
        k_norm=array(32),
        cache_key=array(2, 4, 9, 32),
        cache_value=array(2, 4, 9, 32),
        num_cached=array(2, dtype=jnp.int32),
        counters=None,
        mask=None,
        eps=EPS,
    )
    with pytest.raises(ValueError, match=message):
        block_attention(**(arguments | change))


@pytest.mark.parametrize("num_cached", [0, 5])
def test_a_row_that_sees_no_row_changes_no_other(num_cached):
    """It sees what is cached, or nothing at all, and is finite."""
    case = Case("hidden", 3, 10, num_cached, kv_heads=1, head_dim=32, float_dtype="float32")
    arrays = [jnp.asarray(x) for x in case.arrays()]
    masks = (b"\1\0\0\1\1\0\1\1\1", b"\1\0\0\0\0\0\1\1\1")
    full, hidden = (
        block_attention(*arrays, mask=mask, eps=1e-6, implementation="interpret")[0]
        for mask in masks
    )
    assert bool(jnp.isfinite(hidden).all())
    np.testing.assert_array_equal(hidden[:, [0, 2]], full[:, [0, 2]])
