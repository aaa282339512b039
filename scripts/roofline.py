"""What a decode step should take on paper: bytes, operations, launches and collectives a device.

Pure numbers, no device. A step reads a device's part of the weights and of the live keys and values
once; each kernel costs some microseconds besides, and with a model that is split over devices each
layer waits for two all-reduces. `docs/scaling.md` has the results and where the figures come from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from roofline_figures import H200, MEASURED, Hardware, Shape

GPUS_PER_HOST = 8
# Of products by pallas_kernels, of a head by it, and of attention in one launch.
MAX_ROWS, MAX_HEAD_ROWS, MAX_LAUNCH_ROWS = 128, 64, 16
ARGMAX_COLUMNS = 2048


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


@dataclasses.dataclass(frozen=True)
class Product:
    """A device's part of one product.

    Attributes:
      kind: as in pallas_kernels/linear: "scale", "swiglu", "residual", "head", or "experts".
      inner: entries of a row.
      columns: of the result; for "swiglu" of gate and up each.
      count: how many there are a step.
      read: weights that a step reads in each.
      used: weights that a row is multiplied with in each.
    """

    kind: str
    inner: int
    columns: int
    count: int
    read: float
    used: float

    def programs(self, num_rows: int) -> tuple[int, int]:
        """Return how many programs it has, and how many fit a multiprocessor; 0 for no limit.

        Source: `TILINGS` of pallas_kernels/linear/triton.py, made for the 8B shape on one device.
        """
        if self.kind == "experts" or num_rows > (
            MAX_HEAD_ROWS if self.kind == "head" else MAX_ROWS
        ):
            return 0, 1  # by a library that chooses for itself
        is_wide = num_rows > MAX_LAUNCH_ROWS
        if self.kind == "residual":
            blocks, steps, splits = math.ceil(self.columns / 64), math.ceil(self.inner / 128), 1
            while splits * blocks < (128 if is_wide else 64) and steps % (2 * splits) == 0:
                splits *= 2
            return blocks * splits, 2 if is_wide else 1
        block = 128 if self.kind == "swiglu" or (self.kind == "head" and is_wide) else 64
        resident = {"scale": 2, "swiglu": 1, "head": 1 if is_wide else 3}[self.kind]
        return math.ceil(self.columns / block), resident


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
        return Product(kind, inner, columns, count, size, size)

    found = [
        product("scale", hidden, (heads + 2 * setting.kv_heads) * shape.head_dim, shape.layers),
        product("residual", heads * shape.head_dim, hidden, shape.layers),
        product("head", hidden, math.ceil(shape.vocab / tp), 1),
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
        found.append(Product("experts", hidden, inner, shape.layers, read, float(used)))
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
    embedding = 0 if shape.is_tied else math.ceil(shape.vocab / setting.tp) * shape.hidden
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


def product_us(
    product: Product, setting: Setting, hardware: Hardware = H200, is_filled: bool = False
) -> float:
    """Return the microseconds of one product.

    Reading and arithmetic run at once but for a share of the shorter. Programs that are fewer than
    the device takes read at their own rate only, and so do those that are left for a last round.

    Args:
      product: which.
      setting: whose rows it has.
      hardware: the device.
      is_filled: as if there were programs enough at any size.
    """
    num_bytes = product.read * setting.itemsize
    computing = 2 * setting.num_rows * product.used / hardware.arithmetic_rate
    reading = num_bytes / hardware.read_rate
    num_programs, resident = product.programs(setting.num_rows)
    if num_programs and not is_filled:
        at_once = hardware.num_multiprocessors * resident
        rounds, left = divmod(num_programs, at_once)
        reading *= rounds * at_once / num_programs
        if left:
            busy = min(left, hardware.num_multiprocessors)
            rate = min(hardware.read_rate, busy * hardware.program_rate)
            reading += num_bytes * left / num_programs / rate
        computing /= min(num_programs / hardware.num_multiprocessors, 1)
    exposed = hardware.overlap_loss * min(reading, computing)
    return hardware.product_us + (max(reading, computing) + exposed) * 1e6


def attention_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of one layer's attention."""
    reading = kv_bytes(setting) / setting.shape.layers / hardware.kv_rate * 1e6
    if setting.rows <= MAX_LAUNCH_ROWS:
        return reading + hardware.attention_us + hardware.attention_row_us * setting.rows
    return reading + hardware.wide_attention_us + hardware.wide_attention_row_us * setting.rows


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


def collectives_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of a step's collectives.

    Two all-reduces a layer and one of the embedding; a gather of the best id and logit of every
    2,048 columns; and, where the batch is split, one number: whether any text still runs.
    """
    total = (2 * setting.shape.layers + 1) * layer_all_reduce_us(setting, hardware)
    parts = setting.tp * math.ceil(setting.shape.vocab / setting.tp / ARGMAX_COLUMNS)
    total += all_gather_us(8 * parts * setting.num_rows, setting.tp, hardware)
    if setting.data > 1:
        total += all_reduce_us(4, setting.tp * setting.data, hardware)
    return total


def num_launches(setting: Setting) -> int:
    """Return the kernels of a step's layers and head, collectives and what follows each included.

    Above 128 rows products are the library's, with a small kernel of XLA's beside each. A mixture
    of experts has a router, and three small kernels that sort rows by expert and back.
    """
    layers = setting.shape.layers
    count = sum(product.count for product in products(setting))
    count += layers * (1 if setting.rows <= MAX_LAUNCH_ROWS else 2) + small_kernels(setting)
    return count + (2 * layers + 2 if setting.tp > 1 else 0)


def small_kernels(setting: Setting) -> int:
    """Return the kernels of a step that read next to nothing, but for those once a step."""
    layers = setting.shape.layers
    count = 2 * layers + 1 if setting.tp > 1 else 0  # residual and statistics of the norm
    count += 4 * layers if setting.num_rows > MAX_ROWS else 0
    return count + (3 * layers if setting.shape.experts else 0)


def glue_us(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the microseconds of small kernels, and of a loop that is not one CUDA graph."""
    total = small_kernels(setting) * hardware.small_kernel_us
    if setting.tp * setting.data > 1:
        total += hardware.predicate_us
    if setting.tp > 1:  # Collectives are outside of CUDA graphs: too few kernels are between them.
        total += num_launches(setting) * hardware.gap_us
    return total


def step_us(setting: Setting, hardware: Hardware = H200, is_filled: bool = False) -> float:
    """Return the microseconds of a step.

    Args:
      setting: what is decoded, and on how many devices.
      hardware: the devices.
      is_filled: as if every product had programs enough to keep a device busy.
    """
    total = sum(
        product.count * product_us(product, setting, hardware, is_filled)
        for product in products(setting)
    )
    total += setting.shape.layers * attention_us(setting, hardware)
    total += hardware.rest_us + hardware.rest_row_us * setting.num_rows + hardware.call_us
    return total + glue_us(setting, hardware) + collectives_us(setting, hardware)


def speed_up(setting: Setting, hardware: Hardware = H200) -> float | None:
    """Return the step of one device for the same batch over this one; None if it does not fit."""
    alone = dataclasses.replace(setting, tp=1, data=1)
    if held_bytes(alone) > hardware.memory_bytes:
        return None
    return step_us(alone, hardware) / step_us(setting, hardware)


def break_even(setting: Setting, hardware: Hardware = H200) -> float:
    """Return the mean accepted length at which a block of rows is as fast as one of one row."""
    return step_us(setting, hardware) / step_us(dataclasses.replace(setting, rows=1), hardware)


def measured_ms(setting: Setting) -> float | None:
    """Return the measured milliseconds of a step, None where there is none."""
    if (setting.data, setting.batch, setting.length, setting.itemsize) != (1, 1, 512, 2):
        return None
    return MEASURED.get((setting.shape.name, setting.tp), {}).get(setting.rows)


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
