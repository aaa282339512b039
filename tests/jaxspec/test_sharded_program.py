"""What devices say to each other in a step, read off the compiled and the lowered program."""

from __future__ import annotations

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from jaxspec import Auto, GenerateConfig, Lookahead, NoDraft, PromptLookup, generate, stream
from jaxspec.decode import prefill, run_steps, run_steps_of
from jaxspec.placement import FlatModel, parameter_specs, spread
from jaxspec.request import make_request, sampling_mode
from jaxspec.sharding import make_mesh
from jaxspec.state import REQUEST_SPECS, STATE_SPECS, init_state
from tests.jaxspec.models import random_model, random_prompts

GREEDY = GenerateConfig(max_new_tokens=3000, max_seq_len=4096)
SAMPLED = GenerateConfig(
    max_new_tokens=3000, max_seq_len=4096, temperature=0.8, top_k=20, top_p=0.9
)
NUM_LAYERS = 2
DRAFTERS = [NoDraft(), PromptLookup(7), Lookahead(2, 3, 2)]
COLLECTIVES = r"= (\S.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"


@functools.cache
def spread_model(data: int, shards: int):
    return spread(random_model(num_attention_heads=8, head_dim=64), make_mesh(data, shards))


def compiled(drafter, config, *shape, kernels=None):
    model = spread_model(*shape)
    flat = FlatModel.of(model)
    tokens, request = make_request(
        model.config, random_prompts((40,) * shape[0]), config, mesh=model.mesh
    )
    state = init_state(flat, tokens, request, drafter=drafter)
    options = {"drafter": drafter, "kernels": kernels, "mode": sampling_mode(config)}
    lowered = run_steps_of(model).lower(flat, state, request, np.int32(3), **options)
    return state, lowered.compile()


def collectives(hlo: str) -> list[tuple[str, int]]:
    """Return name and bytes of every collective of a program."""
    found = []
    for shapes, name in re.findall(COLLECTIVES + r"(?:-start)?\(", hlo):
        sizes = [
            4 * int(np.prod([int(size) for size in dims.split(",") if size]))
            for dims in re.findall(r"[a-z]\d+\[([\d,]*)\]", shapes)
        ]
        found.append((name, sum(sizes)))
    return found


@pytest.mark.parametrize(
    "shape, drafter, kernels",
    [(shape, drafter, None) for shape in ((1, 4), (2, 4)) for drafter in DRAFTERS]
    + [((1, 4), DRAFTERS[1], "interpret")],
    ids=str,
)
def test_a_step_has_two_sums_a_layer(shape, drafter, kernels):
    """Two all-reduces a layer, one for the embedding, and one all-gather of argmax partials.

    No weight, cache or row of logits moves, kernels or not.
    """
    _, program = compiled(drafter, GREEDY, *shape, kernels=kernels)
    found = collectives(program.as_text())
    counts = Counter(name for name, _ in found)
    assert counts == {"all-reduce": 2 * NUM_LAYERS + 1, "all-gather": 1}
    num_rows = drafter.layout.num_rows
    for name, num_bytes in found:
        # Rows of the residual stream, or value and id of the best of each device's part.
        most = num_rows * 48 * 4 if name == "all-reduce" else num_rows * 4 * 8
        assert num_bytes <= most, name


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def test_sampling_moves_each_row_of_logits_to_one_device(drafter):
    _, program = compiled(drafter, SAMPLED, 1, 4)
    found = collectives(program.as_text())
    counts = Counter(name for name, _ in found)
    assert counts["all-reduce"] == 2 * NUM_LAYERS + 1
    assert counts["all-to-all"] == 1
    num_rows = len(drafter.layout.logit_rows)
    gathered = sum(num_bytes for name, num_bytes in found if name == "all-gather")
    # Partials of the pick and of the plain argmax; a row of logits alone has 97 numbers.
    assert gathered <= 4 * (num_rows + 4) * 4 * 8
    (moved,) = [num_bytes for name, num_bytes in found if name == "all-to-all"]
    assert moved <= (num_rows + 3) * 25 * 4


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, Auto((3,), step_costs=(1.0, 1.1))],
                         ids=lambda drafter: type(drafter).__name__)  # fmt: skip
def test_parts_of_a_batch_say_nothing_to_each_other(drafter, config):
    _, program = compiled(drafter, config, 8, 1)
    assert not collectives(program.as_text())


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def test_the_cache_is_updated_in_place(drafter):
    state, program = compiled(drafter, GREEDY, 1, 4)
    memory = program.memory_analysis()
    cache_bytes = sum(part.nbytes for part in jax.tree.leaves(state.cache)) // 4
    layer_bytes = sum(part.nbytes for part in state.cache[0]) // 4
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < 1.7 * layer_bytes < cache_bytes
    assert len(re.findall(r"= .* while\(", program.as_text())) == 1


def test_donated_state_is_gone_and_stays_where_it_is():
    model, drafter = spread_model(2, 4), NoDraft()
    config = GenerateConfig(max_new_tokens=4)
    tokens, request = make_request(model.config, [[1, 2, 3]], config, mesh=model.mesh)
    state = init_state(model, tokens, request, drafter=drafter)
    for run in (
        lambda s: prefill(model, s, np.int32(1), chunk_size=64),
        lambda s: run_steps_of(model)(model, s, request, np.int32(1), drafter=drafter),
    ):
        old = jax.tree.leaves(state)
        shardings = [leaf.sharding for leaf in old]
        state = run(state)
        assert all(part.is_deleted() for part in jax.tree.leaves(old))
        assert [leaf.sharding for leaf in jax.tree.leaves(state)] == shardings
    spec = STATE_SPECS.cache
    assert state.cache[0][0].sharding == NamedSharding(model.mesh, spec)


def test_two_calls_of_one_shape_trace_once():
    model, drafter = spread_model(2, 4), PromptLookup(num_draft_tokens=2)
    loop = run_steps_of(model)
    assert loop is not run_steps
    prefill.clear_cache()
    loop.clear_cache()
    calls = [
        (random_prompts((20, 9, 4)), GenerateConfig(max_new_tokens=30)),
        (random_prompts((33, 70, 5, 6), seed=5), GenerateConfig(max_new_tokens=50)),
        (random_prompts((1, 2, 3)), GenerateConfig(max_new_tokens=1, eos_token_ids=(4,))),
        (random_prompts((20, 9, 5)), GenerateConfig(max_new_tokens=9, seed=(7, 8, 9))),
    ]
    for prompts, config in calls:
        assert len(generate(model, prompts, config, drafter).token_ids) == len(prompts)
    for _ in stream(model, calls[0][0], calls[0][1], drafter, steps_per_chunk=3):
        pass
    assert loop._cache_size() == 1
    assert prefill._cache_size() == 1


def test_kernels_see_one_devices_part(monkeypatch):
    """Lowered for eight H200s: every kernel is inside the one shard_map, with local arrays."""
    model = random_model(
        num_attention_heads=8, head_dim=64, vocab_size=4096, hidden_size=256, intermediate_size=512
    )
    shared = spread(model, make_mesh(2, 4))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((2, 4), ("data", "model"), abstract_device=device)
    specs = parameter_specs(shared)
    flat = FlatModel.of(shared)
    shared.mesh = mesh
    structure = jax.tree.structure(shared)

    def abstract(tree, prefix):
        prefix = jax.tree.broadcast(
            prefix, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            prefix,
        )

    arrays = tuple(abstract(flat.arrays, tuple(specs)))
    drafter = PromptLookup(7)
    tokens, request = make_request(model.config, random_prompts((40, 50)), GREEDY)
    state = jax.eval_shape(functools.partial(init_state, drafter=drafter), flat, tokens, request)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = run_steps_of(shared).trace(
            FlatModel(arrays, structure, mesh),
            abstract(state, STATE_SPECS),
            abstract(request, REQUEST_SPECS),
            jax.ShapeDtypeStruct((), jnp.int32),
            drafter=drafter,
            kernels="triton",
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r'custom_call @__gpu\$xla\.gpu\.triton.*?name = "(\w+)"', text)
    assert {"_linear_scale_kernel", "_attention_kernel", "_linear_swiglu_kernel"} <= set(kernels)
    assert {"_linear_residual_kernel", "_linear_head_kernel", "_argmax_partial_kernel"} <= set(
        kernels
    )
    assert text.count("sdy.manual_computation") == 1
    assert text.count("stablehlo.all_reduce") == 2 * NUM_LAYERS + 1
    for line in text.splitlines():
        if "_linear_head_kernel" in line:
            assert "tensor<1024x256xf32>" in line and "tensor<4096x256xf32>" not in line
