"""The one table of Hugging Face keys <-> our parameters, read by loading and by saving."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxspec.config import Qwen3Config
from jaxspec.model import Qwen3


def _whole(fused: np.ndarray, num_groups: int) -> np.ndarray:
    return fused


@dataclasses.dataclass(frozen=True)
class Key:
    """How one stored tensor lies in one of our parameters.

    Attributes:
      stored: Hugging Face key; `{layer}` stands for the layer's index.
      stored_axes: its axes, each a string of the axis letters that it merges: a Linear weight is
        `[out, in]`, and "KGH" is the query width in the order kv head, group, head channel.
      parameter: path of our parameter, `{layer}` as above.
      axes: axis letters of the tensor's part of our parameter.
      part: returns that part, as a view, of the whole parameter, given G.
    """

    stored: str
    stored_axes: tuple[str, ...]
    parameter: str
    axes: str
    part: Callable[[np.ndarray, int], np.ndarray] = _whole

    def shape(self, config: Qwen3Config) -> tuple[int, ...]:
        """Return the stored shape."""
        sizes = _axis_sizes(config)
        return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.stored_axes)

    def view(self, parameter: np.ndarray, config: Qwen3Config) -> np.ndarray:
        """Return a view of our parameter with the stored axes, unmerged."""
        part = self.part(parameter, config.num_query_groups)
        return part.transpose([self.axes.index(letter) for letter in "".join(self.stored_axes)])

    def stored_part(
        self, tensor: np.ndarray, config: Qwen3Config, ranges: Mapping[str, slice]
    ) -> np.ndarray:
        """Return a view of a part of the stored tensor, its axes unmerged.

        Args:
          tensor: as stored.
          config: the model that it is of.
          ranges: slices of axis letters; of the others it is everything.
        """
        sizes = _axis_sizes(config)
        letters = "".join(self.stored_axes)
        unmerged = tensor.reshape([sizes[letter] for letter in letters])
        return unmerged[tuple(ranges.get(letter, slice(None)) for letter in letters)]

    def at(self, layer: int) -> Key:
        """Return the key of one layer."""
        return dataclasses.replace(
            self,
            stored=self.stored.format(layer=layer),
            parameter=self.parameter.format(layer=layer),
        )


def _axis_sizes(config: Qwen3Config) -> dict[str, int]:
    return {
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "G": config.num_query_groups,
        "H": config.head_dim,
        "K": config.num_key_value_heads,
        "V": config.vocab_size,
    }


_HF = "model.layers.{layer}."
_OURS = "layers.{layer}."
EMBEDDING = Key("model.embed_tokens.weight", ("V", "D"), "embed_tokens", "VD")
HEAD = Key("lm_head.weight", ("V", "D"), "lm_head", "VD")
_NORM = Key("model.norm.weight", ("D",), "norm.weight", "D")
_LAYER = (
    Key(_HF + "input_layernorm.weight", ("D",), _OURS + "input_layernorm.weight", "D"),
    Key(
        _HF + "self_attn.q_proj.weight",
        ("KGH", "D"),
        _OURS + "self_attn.qkv_proj",
        "DKGH",
        lambda fused, num_groups: fused[:, :, :num_groups],
    ),
    Key(
        _HF + "self_attn.k_proj.weight",
        ("KH", "D"),
        _OURS + "self_attn.qkv_proj",
        "DKH",
        lambda fused, num_groups: fused[:, :, num_groups],
    ),
    Key(
        _HF + "self_attn.v_proj.weight",
        ("KH", "D"),
        _OURS + "self_attn.qkv_proj",
        "DKH",
        lambda fused, num_groups: fused[:, :, num_groups + 1],
    ),
    Key(_HF + "self_attn.q_norm.weight", ("H",), _OURS + "self_attn.q_norm.weight", "H"),
    Key(_HF + "self_attn.k_norm.weight", ("H",), _OURS + "self_attn.k_norm.weight", "H"),
    Key(_HF + "self_attn.o_proj.weight", ("D", "KGH"), _OURS + "self_attn.o_proj", "KGHD"),
    Key(
        _HF + "post_attention_layernorm.weight",
        ("D",),
        _OURS + "post_attention_layernorm.weight",
        "D",
    ),
    Key(
        _HF + "mlp.gate_proj.weight",
        ("F", "D"),
        _OURS + "mlp.gate_up_proj",
        "DF",
        lambda fused, _: fused[:, 0],
    ),
    Key(
        _HF + "mlp.up_proj.weight",
        ("F", "D"),
        _OURS + "mlp.gate_up_proj",
        "DF",
        lambda fused, _: fused[:, 1],
    ),
    Key(_HF + "mlp.down_proj.weight", ("D", "F"), _OURS + "mlp.down_proj", "FD"),
)


def iterate_keys(config: Qwen3Config) -> Iterator[Key]:
    """Yield the keys of a model in file order; those of one parameter follow one another."""
    yield EMBEDDING
    for layer in range(config.num_hidden_layers):
        for key in _LAYER:
            yield key.at(layer)
    yield _NORM
    if not config.tie_word_embeddings:
        yield HEAD


def get_parameter(model: Qwen3, path: str) -> nnx.Param:
    """Return the parameter at a dotted path, e.g. "layers.3.self_attn.o_proj"."""
    node: Any = model
    for name in path.split("."):
        node = node[int(name)] if name.isdigit() else getattr(node, name)
    assert isinstance(node, nnx.Param)
    return node
