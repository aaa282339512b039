"""What the kernel benchmark counts, compares and hands on."""

from __future__ import annotations

import benchmark_kernels
import jax
import numpy as np
import pytest
from device_time import DeviceTime
from kernel_calls import OPS, cases_of, check_equal, make_call


def small_call(name):
    """Return an op's call on the case of the smoke mode."""
    (case,) = cases_of(name, smoke=True)
    return case, make_call(name, case)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_cases_and_counts_bytes(name):
    assert cases_of(name, smoke=False)
    case, call = small_call(name)
    if name in ("rms_linear", "rms_swiglu", "linear_residual"):
        assert call.num_bytes == 2 * np.prod(case.weight_shape())
    if name == "block_attention":  # three rows of 150, 147 and 144 slots, keys and values
        assert call.num_bytes == (150 + 147 + 144) * 2 * 64 * 2
    if name == "write_rows":  # six caches, two rows, three heads, five slots; read and written
        slots = call.arrays[1]
        assert call.num_bytes == 2 * 6 * 2 * 3 * slots.shape[1] * 64 * 4
    products = ("rms_linear", "rms_swiglu", "linear_residual", "block_attention")
    assert (call.limit == 0) == (name not in products)


def test_differences_are_found():
    _, call = small_call("linear_residual")
    result, _ = call.run("xla", call.state, *call.arrays)
    check_equal(call, result, result)
    parts = result.sum_squares / 2
    check_equal(call, result._replace(sum_squares=jax.numpy.tile(parts, (1, 2))), result)
    with pytest.raises(AssertionError, match="forms differ by a norm of"):
        check_equal(call, result._replace(x=result.x * 1.02), result)
    with pytest.raises(AssertionError, match="forms differ"):
        check_equal(call, result._replace(x=result.x.at[0, 0].set(np.nan)), result)
    _, call = small_call("lookup_ngrams")
    (found, num_tokens), _ = call.run("xla", call.state, *call.arrays)
    with pytest.raises(AssertionError, match="not equal"):
        check_equal(call, (found, num_tokens + 1), (found, num_tokens))


def test_a_time_is_that_of_one_call(monkeypatch):
    """Streamed arrays are called on in turns, and the state is handed on."""
    calls = []

    def device_time(function):
        function()
        return DeviceTime(10.0, 4.0, {"kernel": 10.0})

    def run(clock, *arrays):
        calls.append(arrays)
        return (), clock + 1

    monkeypatch.setattr(benchmark_kernels, "device_time", device_time)
    monkeypatch.setattr(benchmark_kernels.jax, "jit", lambda run, donate_argnums: run)
    _, call = small_call("rms_linear")
    monkeypatch.setattr(benchmark_kernels, "CACHE_BYTES", 5 * call.num_bytes)
    call = benchmark_kernels.Call(run, np.int32(0), call.arrays, call.num_bytes, True)
    cost, (_, clock) = benchmark_kernels.measure_form(call, run, smoke=False)
    assert clock == 1 and len(calls) == 1 + 5
    assert len({id(weight) for _, weight in calls}) == 5
    assert cost == DeviceTime(2.0, 0.8, {"kernel": 2.0})
