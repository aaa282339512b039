"""Every case lowers to Triton for CUDA, on a machine without a GPU.

Interpreting a kernel proves less: it takes sizes and operations that the compiler refuses.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import (
    argmax,
    block_attention,
    find_ngram,
    pre_norm,
    rms_linear,
    top_threshold,
    verify_greedy,
)
from pallas_kernels.argmax import cases as argmax_cases
from pallas_kernels.attention import cases as attention_cases
from pallas_kernels.find_ngram import cases as find_ngram_cases
from pallas_kernels.linear import cases as linear_cases
from pallas_kernels.top_threshold import cases as top_threshold_cases
from pallas_kernels.verify_greedy import cases as verify_greedy_cases

OPS = [
    (op, case)
    for op, cases in (
        (find_ngram, find_ngram_cases.CASES),
        (argmax, argmax_cases.CASES),
        (verify_greedy, verify_greedy_cases.CASES),
        (top_threshold, top_threshold_cases.CASES),
        (block_attention, attention_cases.CASES),
    )
    for case in cases
]
OPS += [(getattr(pallas_kernels, case.op), case) for case in linear_cases.CASES]


def lowered_kernels(function, *arrays):
    """Return the names of the Triton kernels in a function lowered for an H200."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'custom_call @__gpu\$xla\.gpu\.triton.*?name = "(\w+)"', text)


def expected_kernels(op, case):
    """Name the kernels that a case should launch."""
    if op is find_ngram:
        return ["_find_ngram_partial_kernel", "_find_ngram_global_kernel"]
    if op is argmax:
        one_part = case.num_columns <= 2048
        return ["_argmax_partial_kernel"] + ["_argmax_reduce_kernel"] * (not one_part)
    if op is block_attention:
        is_long = case.num_rows > 16
        is_prefill = case.num_rows > 128 and not case.num_candidates
        attention = "_prefill_kernel" if is_prefill else "_wide_attention_kernel"
        return ["_split_qkv_kernel", attention] if is_long else ["_attention_kernel"]
    if op is top_threshold:
        return ["_pass_kernel"] * 11
    if op is verify_greedy:
        return ["_verify_greedy_kernel"]
    kinds = {"rms_swiglu": "swiglu", "linear_residual": "residual"}
    kind = "_linear_" + kinds.get(case.op, "head" if case.transposed else "scale")
    return [f"{kind}_kernel"]


def abstract_arrays(case):
    """Return shapes and dtypes of a case's arrays."""
    if hasattr(case, "shapes"):
        return case.shapes()
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.arrays()]


@pytest.mark.parametrize("op, case", OPS, ids=[f"{op.__name__}-{case.name}" for op, case in OPS])
def test_cases_lower_to_triton(op, case):
    arrays = abstract_arrays(case)
    if op is argmax:
        arrays = [jax.ShapeDtypeStruct(arrays[0].shape, case.dtype)]
    function = partial(op, implementation="triton", **case.settings())
    assert lowered_kernels(function, *arrays) == expected_kernels(op, case)


def test_none_picks_triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    logits = jax.ShapeDtypeStruct((2, 97), jnp.float32)
    assert lowered_kernels(argmax, logits) == ["_argmax_partial_kernel"]


def test_the_xla_form_has_no_loop():
    """A loop inside the decode loop's body would cost more than the op."""
    for op, case in OPS:
        if case.is_benchmark:
            function = jax.jit(partial(op, implementation="xla", **case.settings()))
            text = function.lower(*abstract_arrays(case)).compile().as_text()
            assert " while(" not in text, case.name


@pytest.mark.parametrize("capability, names", [("8.0", []), ("9.0", ["_linear_scale_kernel"])])
def test_products_of_older_gpus_are_left_to_xla(monkeypatch, capability, names):
    class Device:
        compute_capability = capability

    def product(rows, weight):
        return rms_linear(pre_norm(rows, rows[0]), weight, eps=1e-6)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    # Shapes of no other test: a kernel that has been traced once is not asked again.
    rows = jax.ShapeDtypeStruct((3, 96 if names else 112), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((rows.shape[1], 64), jnp.bfloat16)
    assert lowered_kernels(product, rows, weight) == names
