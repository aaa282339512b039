"""Meshes of devices change no token: eight CPU devices, float32."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxspec
from jaxspec import (
    Auto,
    BlockLayout,
    GenerateConfig,
    Lookahead,
    NoDraft,
    PromptLookup,
    generate,
    stream,
)
from jaxspec.drafters import DRAFTERS
from jaxspec.placement import over_mesh, spread
from jaxspec.sharding import make_mesh, shard_config, shard_ranges
from tests.jaxspec.models import CONFIG, random_model, random_prompts, smallest_gap

MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (8, 1)]
LENGTHS = {1: (23,), 3: (5, 40, 17), 8: (23, 5, 40, 1, 17, 9, 30, 12)}
# The mode `auto` with costs that are known: it would measure them for every mesh and batch.
DRAFTING = {
    "none": NoDraft(),
    "promptlookup": PromptLookup(3),
    "lookahead": Lookahead(2, 3, 2),
    "auto": Auto((3,), step_costs=(1.0, 1.1)),
}
GREEDY = GenerateConfig(max_new_tokens=32)
SAMPLED = GenerateConfig(
    max_new_tokens=32, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=7
)
# Heads of 8 queries and 2 keys: from 4 devices on a key head is held by several. 97 ids are no
# multiple of any mesh.
model = functools.partial(random_model, num_attention_heads=8, head_dim=16)


@functools.cache
def spread_model(data: int, shards: int, **overrides: object) -> jaxspec.Qwen3:
    return spread(model(**overrides), make_mesh(data, shards))


@functools.cache
def plain(num_prompts: int, config: GenerateConfig) -> jaxspec.Generation:
    return generate(model(), random_prompts(LENGTHS[num_prompts]), config)


@functools.cache
def drafted(num_prompts: int, spec: str, config: GenerateConfig) -> jaxspec.Generation:
    return generate(model(), random_prompts(LENGTHS[num_prompts]), config, DRAFTING[spec])


def test_every_mode_is_tried():
    assert set(DRAFTING) == set(DRAFTERS)


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", DRAFTING)
@pytest.mark.parametrize("num_prompts", LENGTHS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_tokens_are_those_of_one_device(shape, num_prompts, spec, config, record_gap):
    prompts = random_prompts(LENGTHS[num_prompts])
    expected = plain(num_prompts, config)
    result = generate(spread_model(*shape), prompts, config, DRAFTING[spec])
    assert result.token_ids == expected.token_ids
    assert result.finish_reasons == expected.finish_reasons
    if config is GREEDY and spec == "none":
        record_gap(min(map(smallest_gap, [model()] * num_prompts, prompts, expected.token_ids)))
    if spec in ("promptlookup", "lookahead"):
        alone = drafted(num_prompts, spec, config)
        assert result.num_steps.tolist() == alone.num_steps.tolist()
        assert result.num_drafted.tolist() == alone.num_drafted.tolist()
        if config is GREEDY:
            assert (result.num_steps < expected.num_steps).any()


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_minimum_and_log_probabilities(shape, temperature):
    prompts = random_prompts(LENGTHS[3])
    config = GenerateConfig(
        max_new_tokens=24,
        temperature=temperature,
        top_p=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        min_new_tokens=9,
        eos_token_ids=tuple(range(0, 97, 3)),
        num_logprobs=5,
        seed=(3, 1, 2),
    )
    expected = generate(model(), prompts, config)
    for drafter in (PromptLookup(3), Lookahead(2, 3, 2)):
        result = generate(spread_model(*shape), prompts, config, drafter)
        assert result.token_ids == expected.token_ids
        assert result.finish_reasons == expected.finish_reasons
        for row in range(3):
            np.testing.assert_allclose(result.logprobs[row], expected.logprobs[row], atol=1e-4)
            ids, values = result.top_logprobs[row]
            assert ids.tolist() == expected.top_logprobs[row][0].tolist()
            np.testing.assert_allclose(values, expected.top_logprobs[row][1], atol=1e-4)
            start, end = result.prompt_lengths[row], result.lengths[row]
            gaps = [each.record.logits.pick_gap[row, start:end] for each in (result, expected)]
            np.testing.assert_allclose(*gaps, atol=1e-4)


@pytest.mark.parametrize("num_valid", [90, 25, 1])
@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ids_that_the_tokenizer_has_not_never_appear(num_valid, config):
    whole = random_model(num_attention_heads=8, head_dim=16, num_valid_tokens=num_valid)
    prompts = random_prompts(LENGTHS[3], vocab_size=num_valid)
    expected = generate(whole, prompts, config)
    assert np.max(expected.token_ids) < num_valid
    for shape in ((1, 4), (2, 4)):
        result = generate(spread(whole, make_mesh(*shape)), prompts, config, PromptLookup(3))
        assert result.token_ids == expected.token_ids


def test_a_text_streams_and_stops_at_a_string():
    from tests.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer()
    whole = random_model(num_attention_heads=8, head_dim=16, vocab_size=300)
    prompts = random_prompts(LENGTHS[3], vocab_size=256)
    text = tokenizer.decode(generate(whole, prompts, GREEDY).token_ids[1])
    config = dataclasses.replace(GREEDY, stop_strings=(text[8:10],))
    expected = generate(whole, prompts, config, tokenizer=tokenizer)
    assert "stop" in expected.finish_reasons
    shared = spread(whole, make_mesh(2, 4))
    options = {"tokenizer": tokenizer, "steps_per_chunk": 2}
    *chunks, last = stream(shared, prompts, config, PromptLookup(3), **options)
    assert last.token_ids == expected.token_ids and last.finish_reasons == expected.finish_reasons
    assert len(chunks) > 2 and all(len(chunk.token_ids) == 3 for chunk in chunks)


def test_untied_yarn_and_one_key_head():
    scaling = jaxspec.config.YarnScaling(4.0, 64)
    for overrides in (
        {"tie_word_embeddings": True},
        {"rope_scaling": scaling},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 8},
    ):
        whole = random_model(**({"num_attention_heads": 8, "head_dim": 16} | overrides))
        prompts = random_prompts(LENGTHS[3])
        expected = generate(whole, prompts, GREEDY)
        for shape in ((1, 8), (2, 2)):
            result = generate(spread(whole, make_mesh(*shape)), prompts, GREEDY, PromptLookup(3))
            assert result.token_ids == expected.token_ids, (overrides, shape)


def test_a_drafter_sees_the_rows_of_its_device():
    @dataclasses.dataclass(frozen=True)
    class RepeatLast:
        layout: BlockLayout = BlockLayout.linear(3)

        def init(self, tokens, length, key):
            assert tokens.shape[0] == length.shape[0] == 4
            return {"seen": length}

        def propose(self, state, tokens, length):
            block = jax.numpy.tile(jaxspec.current_tokens(tokens, length)[:, None], (1, 3))
            return jaxspec.Proposal(block, jax.numpy.full((4, 1), 2, jax.numpy.int32))

        def update(self, state, outcome, tokens, length):
            return {"seen": state["seen"] + outcome.num_emitted}

    result = generate(spread_model(2, 4), random_prompts(LENGTHS[8]), GREEDY, RepeatLast())
    assert result.token_ids == plain(8, GREEDY).token_ids

    @dataclasses.dataclass(frozen=True)
    class Global(RepeatLast):
        def init(self, tokens, length, key):
            return jax.numpy.zeros((7,), jax.numpy.int32)

    with pytest.raises(ValueError, match=r"Global has an array of shape \(7,\).* the 4 rows"):
        generate(spread_model(2, 4), random_prompts(LENGTHS[8]), GREEDY, Global())


def test_no_device_holds_more_than_its_part():
    shared = spread_model(2, 4)
    for name, array in (("qkv_proj", shared.layers[0].self_attn.qkv_proj[...]),
                        ("embed_tokens", shared.embed_tokens[...])):  # fmt: skip
        local = {shard.data.shape for shard in array.addressable_shards}
        expected = {"qkv_proj": (48, 1, 4, 16), "embed_tokens": (25, 48)}[name]
        assert local == {expected}, name
    shape = shard_config(CONFIG, 1)
    assert shape == dataclasses.replace(CONFIG, eos_token_ids=(), num_valid_tokens=None)


@pytest.mark.parametrize("heads, kv_heads, inner, vocab", [(8, 2, 96, 97), (16, 8, 64, 512)])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_parts_cover_the_model_and_nothing_twice(heads, kv_heads, inner, vocab, shards):
    config = dataclasses.replace(
        CONFIG,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
    )
    part = shard_config(config, shards)
    counts = {
        "V": np.zeros(vocab, int),
        "F": np.zeros(inner, int),
        "KG": np.zeros((kv_heads, config.num_query_groups), int),
    }
    for index in range(shards):
        ranges = shard_ranges(config, shards, index)
        counts["V"][ranges["V"]] += 1
        counts["F"][ranges["F"]] += 1
        counts["KG"][ranges["K"], ranges["G"]] += 1
        assert ranges["K"].stop - ranges["K"].start == part.num_key_value_heads
        assert ranges["G"].stop - ranges["G"].start == part.num_query_groups
        assert ranges["V"].stop - ranges["V"].start <= part.vocab_size
    assert all((count == 1).all() for count in counts.values())
    # At most 2 % of padding, or less than one id a device.
    assert vocab <= part.vocab_size * shards <= max(1.02 * vocab, vocab + shards - 1)


def test_released_vocabularies_stay_multiples_of_128():
    config = dataclasses.replace(CONFIG, vocab_size=151936, num_attention_heads=64)
    config = dataclasses.replace(config, intermediate_size=1024)
    for shards in (1, 2, 4, 8, 16):
        assert shard_config(config, shards).vocab_size % 128 == 0


@pytest.mark.parametrize(
    "overrides, shards, message",
    [
        ({"num_attention_heads": 6}, 4, "num_attention_heads=6 is not a multiple .*model=4"),
        ({"intermediate_size": 90}, 4, "intermediate_size=90 is not a multiple .*model=4"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "num_key_value_heads=6 and the mesh's model=4: neither",
        ),
    ],
)
def test_sizes_that_do_not_divide(overrides, shards, message):
    with pytest.raises(ValueError, match=message):
        shard_config(dataclasses.replace(CONFIG, **overrides), shards)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((2, 8), "mesh data=2, model=8 needs 16 devices, but there are 8"),
        ((0, 8), "mesh data=0 is not at least 1"),
        ((1, -1), "mesh model=-1 is not at least 1"),
    ],
)
def test_meshes_that_there_are_no_devices_for(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(*sizes)


def test_a_mesh_that_leaves_a_process_idle(monkeypatch):
    @dataclasses.dataclass
    class Device:
        process_index: int

    monkeypatch.setattr(jax, "devices", lambda: [Device(0), Device(0), Device(1), Device(1)])
    with pytest.raises(ValueError, match=r"leaves processes \[1\] without one: expected all 4"):
        make_mesh(1, 2)


def test_what_a_mesh_has_to_be():
    with pytest.raises(ValueError, match=r"mesh has axes \('x',\), expected"):
        spread(model(), Mesh(np.array(jax.devices()), ("x",)))
    with pytest.raises(ValueError, match="spread over a mesh already"):
        spread(spread_model(2, 4), make_mesh(2, 4))


def test_a_spread_model_runs_inside_over_mesh_only():
    shared, tokens = spread_model(2, 4), jax.numpy.ones((2, 3), jax.numpy.int32)
    layout, cached = BlockLayout.linear(3), jax.numpy.zeros((2,), jax.numpy.int32)
    with pytest.raises(ValueError, match="call it inside jaxspec.placement.over_mesh"):
        shared(tokens, cached, None, layout)
    spec = jax.sharding.PartitionSpec
    run = over_mesh(
        lambda part, tokens, cached: part(tokens, cached, None, layout)[0],
        shared,
        (spec("data"), spec("data")),
        spec("data", None, "model"),
    )
    logits = jax.jit(run)(tokens, cached)
    expected = model()(tokens, cached, None, layout)[0]
    assert logits.shape == (2, 3, 100)
    np.testing.assert_allclose(logits[..., :97], expected, atol=1e-4)
