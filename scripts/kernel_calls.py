"""How each op of pallas_kernels is called on a benchmark case, and what its result is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.attention import num_counters as num_arrival_counters
from pallas_kernels.linear import num_counters as num_column_counters

# The folder of each op.
FOLDERS = {
    "find_ngram": "find_ngram",
    "argmax": "argmax",
    "argmax_partial": "argmax",
    "verify_greedy": "verify_greedy",
    "top_threshold": "top_threshold",
    "rms_linear": "linear",
    "rms_swiglu": "linear",
    "linear_residual": "linear",
    "block_attention": "attention",
    "write_rows": "write_rows",
    "insert_ngrams": "ngram_pool",
    "lookup_ngrams": "ngram_pool",
}
OPS = tuple(FOLDERS)
# Relative norm by which results may differ from the XLA form's, by bytes of an entry.
LIMITS = {2: 1e-2, 4: 1e-4}


@dataclasses.dataclass(frozen=True)
class Call:
    """One op on one case.

    Attributes:
        run: Takes a form, the state and the arrays; returns a result and the next state.
        state: Arrays that a call updates in place.
        arrays: The other arrays.
        num_bytes: What a call has to move; None means its arrays and its result.
        is_streamed: Whether a decode step finds these arrays in memory, not in the cache.
        limit: Relative norm by which forms may differ; 0 means equal results.
    """

    run: Callable[..., tuple[Any, Any]]
    state: Any
    arrays: tuple[Any, ...]
    num_bytes: int | None = None
    is_streamed: bool = False
    limit: float = 0.0


def cases_of(name: str, smoke: bool) -> list[Any]:
    """Return an op's benchmark cases, or one small case."""
    cases = import_module(f"pallas_kernels.{FOLDERS[name]}.cases").CASES
    cases = [case for case in cases if getattr(case, "op", name) == name]
    return [cases[2]] if smoke else [case for case in cases if case.is_benchmark]


def make_call(name: str, case: Any) -> Call:
    """Put a case's arrays on the device, and say how to call the op."""
    makers = {
        "linear": _product,
        "attention": _attention,
        "write_rows": _write_rows,
        "ngram_pool": _ngram_pool,
    }
    return makers.get(FOLDERS[name], _plain)(name, case)


def _on_device(arrays: Any) -> Any:
    return jax.tree.map(jnp.asarray, arrays)


def _plain(name: str, case: Any) -> Call:
    op = partial(getattr(pallas_kernels, name), **case.settings())
    arrays = _on_device(case.arrays())
    if hasattr(case, "dtype"):
        arrays = (arrays[0].astype(case.dtype),)
    return Call(lambda form, _, *arrays: (op(*arrays, implementation=form), ()), (), arrays)


def _product(name: str, case: Any) -> Call:
    op = partial(getattr(pallas_kernels, name), **case.settings())
    arrays = _on_device(case.arrays())

    def run(form: Any, counters: Any, *arrays: Any) -> tuple[Any, Any]:
        return op(*arrays, counters, implementation=form)

    counters = jnp.zeros((num_column_counters(case.num_columns),), jnp.int32)
    return Call(run, counters, arrays, arrays[1].nbytes, True, LIMITS[arrays[1].dtype.itemsize])


def _attention(name: str, case: Any) -> Call:
    op: Any = partial(pallas_kernels.block_attention, **case.settings())
    arrays = _on_device(case.arrays())
    qkv, cache_key, num_cached = arrays[0], arrays[5], arrays[7]

    def run(form: Any, counters: Any, *arrays: Any) -> tuple[Any, Any]:
        *out, counters = op(*arrays, counters, implementation=form)
        return out, counters

    counters = jnp.zeros((num_arrival_counters(qkv.shape),), jnp.int32)
    slot_bytes = 2 * cache_key.nbytes // (cache_key.shape[0] * cache_key.shape[2])
    num_bytes = int(num_cached.sum()) * slot_bytes
    return Call(run, counters, arrays, num_bytes, True, LIMITS[qkv.dtype.itemsize])


def _write_rows(name: str, case: Any) -> Call:
    caches, *arrays = _on_device(case.arrays())
    rows, slots = arrays[:2]

    def run(form: Any, caches: Any, *arrays: Any) -> tuple[Any, Any]:
        return (), pallas_kernels.write_rows(caches, *arrays, implementation=form)

    row_bytes = sum(x.nbytes for x in rows) // rows[0].shape[2]
    return Call(run, caches, tuple(arrays), 2 * row_bytes * slots.shape[1])


def _ngram_pool(name: str, case: Any) -> Call:
    pool, new = _on_device(case.pool()), _on_device(case.new())
    if name == "lookup_ngrams":
        op = partial(pallas_kernels.lookup_ngrams, num_candidates=case.num_candidates)
        arrays = (*pool[:2], jnp.asarray(case.key()))
        return Call(lambda form, _, *arrays: (op(*arrays, implementation=form), ()), (), arrays)

    def run(form: Any, pool: Any, *new: Any) -> tuple[Any, Any]:
        return (), pallas_kernels.insert_ngrams(*pool, *new, implementation=form)

    num_bytes = sum(x.nbytes for x in (*pool, *new))
    return Call(run, pool, new, num_bytes)


def check_equal(call: Call, actual: Any, expected: Any) -> None:
    """Compare two forms' results.

    Raises:
        AssertionError: They differ by more than the op allows.
    """
    check = partial(_check_close, call.limit) if call.limit else np.testing.assert_array_equal
    results = (jax.tree.map(np.asarray, _comparable(x)) for x in (actual, expected))
    jax.tree.map(check, *results)


def _comparable(result: Any) -> Any:
    """Sum the parts of a PreNorm's squares: how many there are is up to the form."""
    if isinstance(result, pallas_kernels.PreNorm):
        return result._replace(sum_squares=result.sum_squares.sum(1))
    return [_comparable(x) for x in result] if isinstance(result, (tuple, list)) else result


def _check_close(limit: float, actual: np.ndarray, expected: np.ndarray) -> None:
    wide = expected.astype(np.float64)
    distance = np.linalg.norm(actual.astype(np.float64) - wide)
    if not distance <= limit * np.linalg.norm(wide):
        raise AssertionError(
            f"forms differ by a norm of {distance:.1e}, more than {limit} of the result's"
        )
