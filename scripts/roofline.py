"""What a decode step should take on paper: bytes, operations, launches and collectives a device.

Pure numbers, no device. A device reads its part of the weights and of the live keys and values
once, and each kernel costs some microseconds besides: that is its part of a step. Where devices
share a model, all-reduces, a small kernel after each, and gaps come on top. `docs/scaling.md` has
the results and where the figures come from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from roofline_figures import H200, MEASURED, Hardware, Shape

from jaxspec.sharding import vocab_part

GPUS_PER_HOST = 8
# Rows up to which products are by pallas_kernels, and attention is one launch.
MAX_ROWS, MAX_LAUNCH_ROWS = 128, 16
# Columns of a program of gate and up where there are many; a multiprocessor has one at a time.
WIDE_BLOCK = 128
ARGMAX_COLUMNS = 2048
# Kernels once a step, beside the head: embedding, argmax, verification, cache.
REST_LAUNCHES = 22


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is decoded, and on how many devices.

    Attributes:
      shape: of the model.
      tp: devices that share the model (the mesh's axis `model`).
      data: parts of the batch (the mesh's axis `data`), each on `tp` devices.
      rows: of a text's block, the current token included.
      batch: texts in all.
      length: tokens that are cached of each text.
      itemsize: bytes of a weight.

    Raises:
      ValueError: the sizes do not divide; both numbers are in the message.
    """

    shape: Shape
    tp: int = 1
    data: int = 1
    rows: int = 1
    batch: int = 1
    length: int = 512
    itemsize: int = 2

    def __post_init__(self) -> None:
        """Check that every device gets as much as the next."""
        shape, tp = self.shape, self.tp
        for name, size in (("query heads", shape.heads), ("feed-forward width", shape.inner)):
            if size % tp:
                raise ValueError(f"{shape.name}: {name} {size} is not a multiple of tp={tp}")
        if shape.kv_heads % tp and tp % shape.kv_heads:
            raise ValueError(
                f"{shape.name}: {shape.kv_heads} kv heads and tp={tp}: neither is a multiple of "
                "the other"
            )
        if tp > GPUS_PER_HOST and tp % GPUS_PER_HOST:
            raise ValueError(f"tp={tp} is not a multiple of the {GPUS_PER_HOST} GPUs of a host")
        if self.batch % self.data:
            raise ValueError(f"batch={self.batch} is not a multiple of data={self.data}")

    @property
    def texts(self) -> int:
        """Return the texts of one device."""
        return self.batch // self.data

    @property
    def num_rows(self) -> int:
        """Return the rows that a device's products have."""
        return self.rows * self.texts

    @property
    def kv_heads(self) -> int:
        """Return the kv heads of one device; several have the same one if there are too few."""
        return max(self.shape.kv_heads // self.tp, 1)

    @property
    def vocab(self) -> int:
        """Return the columns of one device's head, padding included."""
        return vocab_part(self.shape.vocab, self.tp)


@dataclasses.dataclass(frozen=True)
class Product:
    """A device's part of one product.

    Attributes:
      kind: as in pallas_kernels/linear: "scale", "swiglu", "residual", "head", or "experts".
      columns: of the result; for "swiglu" of gate and up each.
      count: how many there are a step.
      read: weights that a step reads in each.
      used: weights that a row is multiplied with in each.
    """

    kind: str
    columns: int
    count: int
    read: float
    used: float


def distinct_experts(shape: Shape, num_rows: int) -> float:
    """Return how many experts of a layer some row is expected to go through.

    Rows choose independently, and each expert is as likely as any other.
    """
    share = shape.experts_per_token / shape.experts
    return shape.experts * (1 - (1 - share) ** num_rows)


def products(setting: Setting) -> list[Product]:
    """Return the products of a step on one device."""
    shape, tp = setting.shape, setting.tp
    hidden, heads, inner = shape.hidden, shape.heads // tp, shape.inner // tp

    def product(kind: str, inner: int, columns: int, count: int, parts: int = 1) -> Product:
        size = float(inner * columns * parts)
        return Product(kind, columns, count, size, size)

    found = [
        product("scale", hidden, (heads + 2 * setting.kv_heads) * shape.head_dim, shape.layers),
        product("residual", heads * shape.head_dim, hidden, shape.layers),
        product("head", hidden, setting.vocab, 1),
    ]
    if not shape.experts:
        found += [
            product("swiglu", hidden, inner, shape.layers, 2),
            product("residual", inner, hidden, shape.layers),
        ]
        return found
    touched = distinct_experts(shape, setting.num_rows)
    found.append(product("experts", hidden, shape.experts, shape.layers))  # the router, everywhere
    for size in (2 * hidden * inner, inner * hidden):
        read, used = touched * size, shape.experts_per_token * size
        found.append(Product("experts", inner, shape.layers, read, float(used)))
    return found


def weight_bytes(setting: Setting) -> float:
    """Return the bytes of weights that a device reads in a step; norms are on all devices."""
    shape = setting.shape
    norms = (2 * shape.layers + 1) * shape.hidden + 2 * shape.layers * shape.head_dim
    matrices = sum(product.count * product.read for product in products(setting))
    return (matrices + norms) * setting.itemsize


def kv_bytes(setting: Setting) -> int:
    """Return the bytes of live keys and values that a device reads in a step."""
    width = 2 * setting.shape.layers * setting.kv_heads * setting.shape.head_dim
    return width * setting.texts * setting.length * setting.itemsize


def held_bytes(setting: Setting) -> float:
    """Return the bytes of all weights of a device, read or not, and of the live keys and values."""
    shape = setting.shape
    embedding = 0 if shape.is_tied else setting.vocab * shape.hidden
    idle = 0.0
    if shape.experts:
        touched = distinct_experts(shape, setting.num_rows)
        expert = 3 * shape.hidden * shape.inner / setting.tp
        idle = shape.layers * (shape.experts - touched) * expert
    return weight_bytes(setting) + (embedding + idle) * setting.itemsize + kv_bytes(setting)


def operations(setting: Setting) -> float:
    """Return the additions and multiplications of a device's products in a step."""
    used = sum(product.count * product.used for product in products(setting))
    return 2 * setting.num_rows * used


def product_us(product: Product, setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of one product.

    Reading and arithmetic run at once. Gate and up of more programs than there are multiprocessors
    have a last round, of programs that each read at their own rate.
    """
    reading = product.read * setting.itemsize / hardware.read_rate
    programs = math.ceil(product.columns / WIDE_BLOCK)
    rounds, left = divmod(programs, hardware.num_multiprocessors)
    if product.kind == "swiglu" and setting.num_rows <= MAX_ROWS and rounds and left:
        slowdown = max(hardware.read_rate / (left * hardware.program_rate), 1)
        reading *= 1 + (slowdown - 1) * left / programs
    computing = 2 * setting.num_rows * product.used / hardware.arithmetic_rate
    more_rows = max(min(setting.num_rows, MAX_ROWS) - MAX_LAUNCH_ROWS, 0)
    fixed = hardware.product_us + hardware.product_row_us * more_rows
    return fixed + max(reading, computing) * 1e6


def attention_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of one layer's attention."""
    reading = kv_bytes(setting) / setting.shape.layers / hardware.kv_rate * 1e6
    query_rows = setting.rows * setting.shape.heads / setting.tp / setting.kv_heads
    return reading + hardware.attention_us + hardware.attention_row_us * query_rows


def num_hosts(num_devices: int) -> int:
    """Return the hosts that so many devices span."""
    return math.ceil(num_devices / GPUS_PER_HOST)


def all_reduce_us(num_bytes: float, num_devices: int, hardware: Hardware = H200) -> float:
    """Return the microseconds of an all-reduce: a ring within a host, a tree across hosts."""
    if num_devices == 1:
        return 0.0
    hosts = num_hosts(num_devices)
    if hosts == 1:
        latency = hardware.ring_us + 2 * (num_devices - 1) * hardware.ring_hop_us
    else:
        within = (num_devices // hosts - 1) * hardware.tree_hop_us
        across = math.floor(math.log2(hosts)) * hardware.tree_host_hop_us
        latency = hardware.tree_us + 2 * (within + across)
    share = 2 * (num_devices - 1) / num_devices
    return latency + share * num_bytes / hardware.link_rate(hosts) * 1e6


def all_gather_us(num_bytes: float, num_devices: int, hardware: Hardware = H200) -> float:
    """Return the microseconds until every device has all of `num_bytes`, by a ring."""
    if num_devices == 1:
        return 0.0
    hosts = num_hosts(num_devices)
    hops = num_devices - hosts
    latency = hardware.ring_us + hops * hardware.ring_hop_us
    latency += (hosts - 1) * hardware.ring_host_hop_us
    share = (num_devices - 1) / num_devices
    return latency + share * num_bytes / hardware.link_rate(hosts) * 1e6


def layer_all_reduce_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of one of a layer's two all-reduces."""
    num_bytes = setting.num_rows * setting.shape.hidden * setting.itemsize
    return all_reduce_us(num_bytes, setting.tp, hardware)


def num_sums(setting: Setting) -> int:
    """Return the all-reduces of a step: two a layer, and one of the embedding."""
    return 2 * setting.shape.layers + 1 if setting.tp > 1 else 0


def collectives_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of a step's collectives, all among the devices that share a model.

    Besides the all-reduces one all-gather: of the best id and logit of every 2,048 columns.
    """
    parts = setting.tp * math.ceil(setting.vocab / ARGMAX_COLUMNS)
    gather = all_gather_us(8 * parts * setting.num_rows, setting.tp, hardware)
    return num_sums(setting) * layer_all_reduce_us(setting, hardware) + gather


def small_kernels(setting: Setting) -> int:
    """Return the kernels in the layers of a device's part that read next to nothing.

    Above 128 rows products are the library's, with a small kernel of XLA's beside each. A mixture
    of experts has three that sort rows by expert and back.
    """
    beside = 4 if setting.num_rows > MAX_ROWS else 0
    return setting.shape.layers * (beside + (3 if setting.shape.experts else 0))


def num_launches(setting: Setting) -> int:
    """Return the kernels of a step, collectives and the small kernels after them included."""
    attentions = setting.shape.layers * (1 if setting.rows <= MAX_LAUNCH_ROWS else 2)
    count = sum(product.count for product in products(setting)) + attentions + REST_LAUNCHES
    gathers = 1 if setting.tp > 1 else 0
    return count + small_kernels(setting) + 2 * num_sums(setting) + gathers


def part_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of one device's part of a step, as one CUDA graph."""
    total = sum(
        product.count * product_us(product, setting, hardware) for product in products(setting)
    )
    total += setting.shape.layers * attention_us(setting, hardware)
    total += small_kernels(setting) * hardware.small_kernel_us
    return total + hardware.rest_us + hardware.rest_row_us * setting.num_rows + hardware.call_us


def joining_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of the small kernel after each all-reduce: residual, norm's sums."""
    return num_sums(setting) * hardware.small_kernel_us


def gaps_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of gaps and of the predicate, where a loop is not one CUDA graph.

    Parts of a batch have a loop each, so that is only where devices share a model.
    """
    if setting.tp == 1:
        return 0.0
    return num_launches(setting) * hardware.gap_us + hardware.predicate_us


def step_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of a step."""
    together = collectives_us(setting, hardware) + joining_us(setting, hardware)
    return part_us(setting, hardware) + together + gaps_us(setting, hardware)


def speed_up(setting: Setting, hardware: Hardware = H200) -> float | None:
    """Return the step of one device for the same batch over this one; None if it does not fit."""
    alone = dataclasses.replace(setting, tp=1, data=1)
    if held_bytes(alone) > hardware.memory_bytes:
        return None
    return step_us(alone, hardware) / step_us(setting, hardware)


def break_even(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the mean accepted length at which a block of rows is as fast as one of one row."""
    return step_us(setting, hardware) / step_us(dataclasses.replace(setting, rows=1), hardware)


def measured_part_ms(setting: Setting) -> float | None:
    """Return the measured milliseconds of one device's part of a step, None where there is none."""
    if (setting.data, setting.batch, setting.length, setting.itemsize) != (1, 1, 512, 2):
        return None
    return MEASURED.get((setting.shape.name, setting.tp), {}).get(setting.rows)


def measured_ms(setting: Setting) -> float | None:
    """Return the measured milliseconds of a step: so far of one device only."""
    return measured_part_ms(setting) if setting.tp == 1 else None


def ridge_rows(setting: Setting, hardware: Hardware = H200, most: int = 1 << 20) -> int | None:
    """Return the fewest rows of a block whose arithmetic takes as long as what a device reads.

    None where attention to a long text outweighs the products at any width up to `most`.
    """

    def is_reached(rows: int) -> bool:
        at = dataclasses.replace(setting, rows=rows)
        num_bytes = weight_bytes(at) / hardware.read_rate + kv_bytes(at) / hardware.kv_rate
        return operations(at) / hardware.arithmetic_rate >= num_bytes

    return _first(is_reached, most)


def _first(is_reached: Callable[[int], bool], most: int) -> int | None:
    """Return the least number from 1 to `most` from which on a predicate holds."""
    if not is_reached(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return high
