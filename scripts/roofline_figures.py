"""The figures behind `benchmark.py roofline`: the device, the models' sizes, what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import shapes

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def _figure(value: Any, source: str) -> Any:
    """Return a field with its source; measured and fitted figures are of benchmarks/h200.md."""
    return dataclasses.field(default=value, metadata={"source": source})


@dataclasses.dataclass(frozen=True)
class Hardware:
    """An H200 and its links. Times in microseconds, rates in bytes or operations a second.

    Source: benchmarks/h200.md for the device, fitted to its steps where the figure says so. NCCL's
    own cost model (src/graph/tuning.cc, low-latency protocol on Hopper) for the collectives.

    Attributes:
      memory_bytes: what a device can hold.
      read_rate: of weights by a product that fills the device.
      program_rate: of one program of a product: what counts where wide gate and up have a few
        programs more than there are multiprocessors.
      kv_rate: of keys and values by attention.
      num_multiprocessors: programs that run at once.
      arithmetic_rate: of large products in bfloat16, for some milliseconds.
      product_us: start and tail of a product.
      product_row_us: for each row from 17 to 128.
      attention_us: of an almost empty cache, norms and RoPE.
      attention_row_us: for each query row of a kv head: rows of the block times its query heads.
      rest_us: everything once a step: embedding, argmax, verification, cache.
      rest_row_us: for each row more.
      call_us: a step's part of a call on the host.
      small_kernel_us: of a kernel that reads next to nothing.
      gap_us: between kernels that are not in one CUDA graph.
      predicate_us: of a loop whose predicate goes through the host.
      ring_us, ring_hop_us: latency of a ring, and of each of its hops by NVLink.
      ring_host_hop_us: of a hop by InfiniBand, in a ring.
      tree_us, tree_hop_us, tree_host_hop_us: the same of a tree.
      host_link_rate, two_host_link_rate, far_link_rate: of an all-reduce of a few KB to 1 MB within
        a host, over two, and over more, counted as what a device sends in a ring.
    """

    memory_bytes: float = _figure(141e9, "data sheet")
    read_rate: float = _figure(4.5e12, "fitted; XLA reads at 4.37 to 4.55e12, a head at 4.68e12")
    program_rate: float = _figure(75e9, "measured of 12 programs of gate and up")
    kv_rate: float = _figure(3.8e12, "step at length 30000, one row")
    num_multiprocessors: int = _figure(132, "data sheet")
    arithmetic_rate: float = _figure(772e12, "measured for 12 ms; 690 to 740e12 for 100 ms")
    product_us: float = _figure(3.3, "fitted; about 3 to 4 measured")
    product_row_us: float = _figure(0.06, "fitted; 0.03 to 0.08 measured from 8 to 64 rows")
    attention_us: float = _figure(6.4, "fitted; 7.1 measured at one row of the 8B shape")
    attention_row_us: float = _figure(0.04, "fitted; 8.0 measured at 8 rows, 15.0 at 64 (8B)")
    rest_us: float = _figure(22.0, "measured")
    rest_row_us: float = _figure(0.3, "40 measured at 64 rows, 60 at 128")
    call_us: float = _figure(25.0, "1.6 ms measured, 64 steps a call")
    small_kernel_us: float = _figure(
        2.5, "1.9 to 3 measured for the small kernels beside XLA's products"
    )
    gap_us: float = _figure(0.6, "0.45 and 0.77 measured")
    predicate_us: float = _figure(45.0, "30 to 60 measured")
    ring_us: float = _figure(6.6, "NCCL")
    ring_hop_us: float = _figure(0.6, "NCCL")
    ring_host_hop_us: float = _figure(2.7, "NCCL")
    tree_us: float = _figure(6.8, "NCCL")
    tree_hop_us: float = _figure(0.6, "NCCL")
    tree_host_hop_us: float = _figure(5.0, "NCCL")
    host_link_rate: float = _figure(141e9, "NCCL, low-latency protocol, one host")
    two_host_link_rate: float = _figure(45e9, "NCCL, low-latency protocol, two hosts")
    far_link_rate: float = _figure(35e9, "NCCL, low-latency protocol, four hosts")

    def link_rate(self, num_hosts: int) -> float:
        """Return the rate of an all-reduce over one, two, or more hosts, bytes a second."""
        if num_hosts <= 2:
            return self.host_link_rate if num_hosts == 1 else self.two_host_link_rate
        return self.far_link_rate


H200 = Hardware()


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model that its step depends on.

    Attributes:
      name: as on the command line.
      hidden, layers, heads, kv_heads, head_dim, inner, vocab: as in `config.json`; of a mixture of
        experts `inner` is one expert's.
      is_tied: whether the head is the embedding.
      experts: of a layer, 0 for a dense model.
      experts_per_token: how many of them a token goes through.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_tied: bool
    experts: int = 0
    experts_per_token: int = 0


# Source: config.json of Qwen/Qwen3-235B-A22B. Neither jaxspec nor `benchmark.py step` runs it.
_MIXTURES = {
    "235b-a22b": Shape("235b-a22b", 4096, 94, 64, 4, 128, 1536, 151936, False, 128, 8),
}
SHAPES = (*(name for name in shapes.SHAPES if name not in ("bundled", "tiny")), *_MIXTURES)
# Milliseconds by rows of one device's part of a step, as one CUDA graph and without collectives; by
# shape and devices that share the model. Batch 1, length 512, bfloat16: benchmarks/h200.md.
MEASURED: dict[tuple[str, int], dict[int, float]] = {
    ("0.6b", 1): {1: 0.893, 8: 0.925, 64: 1.414},
    ("1.7b", 1): {1: 1.381, 8: 1.410, 64: 1.849},
    ("4b", 1): {1: 2.557, 8: 2.626, 64: 3.500},
    ("8b", 1): {1: 4.029, 8: 4.112, 64: 4.719},
    ("8b", 2): {1: 2.395, 8: 2.450, 64: 3.026},
    ("8b", 4): {1: 1.602, 8: 1.642, 64: 2.409},
    ("8b", 8): {1: 1.201, 8: 1.230, 64: 2.085},
    ("14b", 1): {1: 8.016, 8: 8.137, 64: 9.837},
    ("32b", 1): {1: 16.069, 8: 16.309},
    ("32b", 2): {1: 8.334, 8: 8.572, 64: 10.640},
    ("32b", 4): {1: 4.816, 8: 5.004, 64: 6.707},
    ("32b", 8): {1: 3.126, 8: 3.308, 64: 5.265},
}


def shape_of(name: str) -> Shape:
    """Return the sizes of a shape."""
    if name in _MIXTURES:
        return _MIXTURES[name]
    config = shapes.config_of(name)
    return Shape(
        name=name,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        vocab=config.vocab_size,
        is_tied=config.tie_word_embeddings,
    )
