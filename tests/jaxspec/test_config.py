"""Configurations from Hugging Face dicts, and every message about a malformed one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import Qwen3Config, YarnScaling

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN3_8B.items() if name not in names}


def test_reads_a_published_file():
    config = Qwen3Config.from_hf(QWEN3_8B, {"eos_token_id": [151645, 151643]})
    assert config.num_query_groups == 4
    assert config.rope_theta == 1e6
    assert config.rope_scaling is None
    assert config.eos_token_ids == (151645, 151643)
    assert config.num_valid_tokens is None
    assert hash(config) == hash(Qwen3Config.from_hf(QWEN3_8B, {"eos_token_id": [151645, 151643]}))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_scaling": YARN | {"type": "yarn"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn"} | dict(list(YARN.items())[1:])},
        {"rope_parameters": YARN | {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 1e6}},
    ],
    ids=["v4", "v4_both_names", "v4_old_name", "v5", "v4_and_v5"],
)
def test_reads_every_spelling_of_yarn(rope):
    config = Qwen3Config.from_hf(without("rope_theta", "rope_scaling") | rope)
    assert config.rope_theta == 1e6
    assert config.rope_scaling == YarnScaling(4.0, 32768)
    assert config.rope_scaling.cos_sin_scale == pytest.approx(1.138629, abs=1e-6)


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [
        ([5, 3], 3, (5, 3)),
        ([5, 3], 4, (5, 3, 4)),
        (5, [3, 5], (5, 3)),
        (None, 3, (3,)),
        (None, None, ()),
    ],
)
def test_unites_eos_ids_in_order(in_generation, in_config, expected):
    config = QWEN3_8B | {"eos_token_id": in_config}
    assert Qwen3Config.from_hf(config, {"eos_token_id": in_generation}).eos_token_ids == expected


@pytest.mark.parametrize("value", [None, False])
def test_an_absent_flag_is_false(value):
    assert not Qwen3Config.from_hf(QWEN3_8B | {"tie_word_embeddings": value}).tie_word_embeddings
    assert not Qwen3Config.from_hf(without("tie_word_embeddings")).tie_word_embeddings


YARN_FILE = without("rope_scaling") | {"rope_scaling": YARN}


def yarn_with(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": YARN | changes}


BAD = {
    "missing_size": ({"head_dim": None}, "head_dim is missing"),
    "missing_eps": ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    "missing_theta": ({"rope_theta": None}, "rope_theta is missing"),
    "string_size": ({"hidden_size": "4096"}, "hidden_size='4096' is not a positive integer"),
    "float_size": ({"hidden_size": 4096.0}, "hidden_size=4096.0 is not a positive integer"),
    "bool_size": ({"num_hidden_layers": True}, "num_hidden_layers=True is not a positive integer"),
    "zero_size": ({"vocab_size": 0}, "vocab_size=0 is not a positive integer"),
    "negative_size": ({"vocab_size": -5}, "vocab_size=-5 is not a positive integer"),
    "list_size": ({"head_dim": [128]}, "head_dim=[128] is not a positive integer"),
    "huge_size": ({"vocab_size": 2**31}, "vocab_size=2147483648 is above 2147483647"),
    "heads": (
        {"num_key_value_heads": 5},
        "num_attention_heads=32 is not a multiple of num_key_value_heads=5",
    ),
    "odd_head": ({"head_dim": 127}, "head_dim=127 is not even, which RoPE needs"),
    "string_eps": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is not a number"),
    "bool_eps": ({"rms_norm_eps": True}, "rms_norm_eps=True is not a number"),
    "negative_eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 is outside 1e-30..1"),
    "nan_eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is outside 1e-30..1"),
    "zero_theta": ({"rope_theta": 0}, "rope_theta=0 is outside 2..1e+30"),
    "infinite_theta": ({"rope_theta": float("inf")}, "rope_theta=inf is outside 2..1e+30"),
    "huge_theta": ({"rope_theta": 10**40}, f"rope_theta={10**40} is outside 2..1e+30"),
    "list_theta": ({"rope_theta": [1]}, "rope_theta=[1] is not a number"),
    "string_flag": (
        {"tie_word_embeddings": "false"},
        "tie_word_embeddings='false' is neither true nor false",
    ),
    "other_model": ({"model_type": "llama"}, "model_type='llama', expected 'qwen3'"),
    "no_model": ({"model_type": None}, "model_type=None, expected 'qwen3'"),
    "moe": (
        {"model_type": "qwen3_moe"},
        "model_type='qwen3_moe': mixture-of-experts Qwen3 is not supported (dense only)",
    ),
    "experts": (
        {"num_experts": 128},
        "model_type='qwen3': mixture-of-experts Qwen3 is not supported (dense only)",
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config (quant_method='fp8') is not supported",
    ),
    "quantized_by_name": (
        {"quantization_config": "awq"},
        "quantization_config (quant_method='awq') is not supported",
    ),
    "bias": ({"attention_bias": True}, "attention_bias=true is not supported"),
    "string_bias": ({"attention_bias": "no"}, "attention_bias='no' is neither true nor false"),
    "window": (
        {"use_sliding_window": True},
        "use_sliding_window=true is not supported (full attention only)",
    ),
    "layer_types": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "use_sliding_window=true is not supported (full attention only)",
    ),
    "layer_types_dict": ({"layer_types": {"a": 1}}, "layer_types={'a': 1} is not a list"),
    "layer_types_nested": (
        {"layer_types": [["full_attention"]]},
        "use_sliding_window=true is not supported (full attention only)",
    ),
    "activation": (
        {"hidden_act": "gelu"},
        "hidden_act='gelu' is not supported (supported: silu)",
    ),
    "rope_list": ({"rope_scaling": ["yarn"]}, "rope_scaling=['yarn'] is not an object"),
    "rope_string": ({"rope_parameters": "yarn"}, "rope_parameters='yarn' is not an object"),
    "rope_type": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope type 'linear' is not supported (supported: default, yarn)",
    ),
    "rope_types_differ": (
        yarn_with(type="linear"),
        "rope_scaling: rope_type='linear' contradicts rope_type='yarn' elsewhere in the file",
    ),
    "thetas_differ": (
        {"rope_parameters": {"rope_theta": 10000.0}},
        "rope_parameters: rope_theta=10000.0 contradicts rope_theta=1000000 elsewhere in the file",
    ),
    "partial_rotary": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 is not supported (only 1.0)",
    ),
    "yarn_no_factor": (
        yarn_with(factor=None),
        "rope type 'yarn' needs factor, which is missing",
    ),
    "yarn_no_original": (
        yarn_with(original_max_position_embeddings=None),
        "rope type 'yarn' needs original_max_position_embeddings, which is missing",
    ),
    "yarn_mscale": (
        yarn_with(mscale=1.0),
        "rope type 'yarn' with mscale or mscale_all_dim is not supported",
    ),
    "yarn_factor": (yarn_with(factor=0.5), "factor=0.5 is outside 1..1e+06"),
    "yarn_string_factor": (yarn_with(factor="4"), "factor='4' is not a number"),
    "yarn_original": (
        yarn_with(original_max_position_embeddings=-1),
        "original_max_position_embeddings=-1 is not a positive integer",
    ),
    "yarn_beta_fast": (yarn_with(beta_fast=-1), "beta_fast=-1 is outside 1e-06..1e+06"),
    "yarn_beta_slow": (yarn_with(beta_slow="x"), "beta_slow='x' is not a number"),
    "yarn_attention": (
        yarn_with(attention_factor=0.0),
        "attention_factor=0.0 is outside 1e-06..1e+06",
    ),
    "yarn_truncate": (yarn_with(truncate="yes"), "truncate='yes' is neither true nor false"),
    "eos_string": ({"eos_token_id": "</s>"}, "eos_token_id='</s>' is not an id or a list of ids"),
    "eos_bool": ({"eos_token_id": [True]}, "eos_token_id=[True] is not an id or a list of ids"),
    "eos_outside": (
        {"eos_token_id": 151936},
        "eos_token_id=151936 is outside vocab_size=151936",
    ),
    "eos_negative": ({"eos_token_id": [-1]}, "eos_token_id=-1 is outside vocab_size=151936"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_names_what_is_wrong(changes, message):
    with pytest.raises(ValueError) as raised:
        Qwen3Config.from_hf(QWEN3_8B | changes)
    assert str(raised.value) == message


def test_refuses_more_valid_tokens_than_ids():
    with pytest.raises(ValueError, match=r"^num_valid_tokens=98 is outside 1\.\.97$"):
        Qwen3Config(97, 64, 96, 2, 4, 2, 16, 1e-6, 1e4, 256, num_valid_tokens=98)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["factor", "rope_type", "type"]), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = st.sampled_from([*QWEN3_8B, "rope_parameters", "quantization_config", "layer_types"])


@given(changes=st.dictionaries(FIELDS, JSON_VALUES, max_size=3), scaling=JSON_VALUES)
def test_any_json_gives_a_configuration_or_one_line(changes, scaling):
    config = json.loads(json.dumps(QWEN3_8B | {"rope_scaling": scaling} | changes))
    try:
        assert Qwen3Config.from_hf(config, config).vocab_size > 0
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
