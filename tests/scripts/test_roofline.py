"""`scripts/benchmark.py roofline`: its model's properties; docs/scaling.md is what it prints."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import benchmark
import command
import pytest
import roofline
from roofline import Product, Setting
from roofline_figures import H200, MEASURED, SHAPES, Shape, shape_of

DOC = Path(__file__).parents[2] / "docs" / "scaling.md"
FENCE = re.compile(r"```sh\n(.*?)\n```", re.DOTALL)


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def documented():
    """Return (command, table lines up to the next command) of the document."""
    _, *parts = FENCE.split(DOC.read_text(encoding="utf-8"))
    return list(zip(parts[::2], map(table_lines, parts[1::2]), strict=True))


@pytest.fixture
def run(capsys):
    """Return a function that runs the command: (exit code, standard output and error)."""

    def run(*args):
        capsys.readouterr()
        code = command.run(benchmark.main, ["roofline", *map(str, args)])
        return code, *capsys.readouterr()

    return run


STEP_ROWS = [
    row
    for line in (DOC.parents[1] / "benchmarks/h200/step.jsonl").read_text().splitlines()
    if (row := json.loads(line))["measure"] == "step" and not row.get("mesh")
]


def setting_of(row):
    part_of, sizes = row.get("part_of", 1), {key: row[key] for key in ("batch", "length", "rows")}
    return Setting(shape_of(row["shape"]), tp=part_of, **sizes)


LISTED = [
    (name, parts, rows, ms)
    for (name, parts), figures in MEASURED.items()
    for rows, ms in figures.items()
]


@pytest.mark.parametrize("name, parts, rows, ms", LISTED)
def test_a_part_takes_what_was_measured(name, parts, rows, ms):
    """Whole models within 5 %, parts within 5 % up to 8 rows and 10 % at 64."""
    setting = Setting(shape_of(name), tp=parts, rows=rows)
    most = 0.1 if parts > 1 and rows > 8 else 0.05
    assert roofline.part_us(setting) / 1e3 == pytest.approx(ms, rel=most)
    found = [row["ms"] for row in STEP_ROWS if setting_of(row) == setting]
    assert ms in [round(each, 3) for each in found]


def test_measured_steps_are_of_one_device():
    setting = Setting(shape_of("8b"), rows=8)
    assert roofline.measured_ms(setting) == roofline.measured_part_ms(setting) == 4.112
    shared = dataclasses.replace(setting, tp=8)
    assert roofline.measured_ms(shared) is None and roofline.measured_part_ms(shared) == 1.23


def test_bytes_are_those_that_the_benchmark_counts():
    parts = {(row["shape"], row.get("part_of", 1)) for row in STEP_ROWS}
    assert parts >= set(MEASURED)
    for row in STEP_ROWS:
        assert roofline.weight_bytes(setting_of(row)) == row["weight_bytes"]
        assert roofline.kv_bytes(setting_of(row)) == row["kv_bytes"]


@pytest.mark.parametrize("name", SHAPES)
def test_more_devices_never_read_or_hold_more(name):
    shape = shape_of(name)
    degrees = [tp for tp in (1, 2, 4, 8, 16, 32) if shape.heads % tp == shape.inner % tp == 0]
    settings = [Setting(shape, tp=tp, rows=8) for tp in degrees]
    for count in (
        roofline.weight_bytes,
        roofline.kv_bytes,
        roofline.held_bytes,
        roofline.operations,
    ):
        sizes = [count(setting) for setting in settings]
        assert sizes == sorted(sizes, reverse=True)
        # No device does with less than its share.
        assert all(size * tp >= sizes[0] for size, tp in zip(sizes, degrees, strict=True))


def test_kv_heads_are_replicated_when_devices_outnumber_them():
    shape = shape_of("235b-a22b")
    assert shape.kv_heads == 4
    kv = {tp: roofline.kv_bytes(Setting(shape, tp=tp)) for tp in (1, 2, 4, 8, 16)}
    assert kv[1] == 4 * kv[4] and kv[4] == kv[8] == kv[16]
    columns = {tp: roofline.products(Setting(shape, tp=tp))[0].columns for tp in (4, 8)}
    assert columns == {4: (16 + 2) * 128, 8: (8 + 2) * 128}


@pytest.mark.parametrize("name", SHAPES)
def test_one_device_has_no_collectives(name):
    setting = Setting(shape_of(name), rows=8)
    assert roofline.collectives_us(setting) == roofline.layer_all_reduce_us(setting) == 0
    assert roofline.collectives_us(dataclasses.replace(setting, tp=2)) > 0


@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_a_batch_say_nothing_to_each_other(name):
    shape = shape_of(name)
    for tp in (1, 8):
        alone = Setting(shape, tp=tp, rows=8)
        parts = dataclasses.replace(alone, batch=8, data=8)
        assert roofline.collectives_us(parts) == roofline.collectives_us(alone)
        assert roofline.step_us(parts) == roofline.step_us(alone)
    # One CUDA graph on each device.
    parts = Setting(shape, data=8, batch=8)
    assert roofline.gaps_us(parts) == roofline.collectives_us(parts) == 0
    assert roofline.step_us(parts) == roofline.part_us(parts)


def test_a_step_is_a_part_and_what_joins_the_parts():
    setting = Setting(shape_of("8b"), tp=8, rows=8)
    # As the compiled program has them: two all-reduces a layer, one of the embedding, a gather.
    assert roofline.num_sums(setting) == 2 * 36 + 1
    gather = roofline.all_gather_us(8 * 8 * 10 * 8, 8)
    sums = 73 * roofline.layer_all_reduce_us(setting)
    assert roofline.collectives_us(setting) == pytest.approx(sums + gather)
    joined = roofline.collectives_us(setting) + 73 * H200.small_kernel_us
    joined += roofline.num_launches(setting) * H200.gap_us + H200.predicate_us
    assert roofline.step_us(setting) == pytest.approx(roofline.part_us(setting) + joined)


def test_launches_are_those_of_the_profile():
    setting = Setting(shape_of("8b"))
    assert roofline.num_launches(setting) == 203
    assert roofline.num_launches(dataclasses.replace(setting, tp=2)) == 203 + 2 * 73 + 1
    assert roofline.num_launches(dataclasses.replace(setting, rows=64)) == 203 + 36


def test_collectives_take_longer_over_more_devices_and_bytes():
    times = [roofline.all_reduce_us(8192, n) for n in (1, 2, 4, 8, 16, 32)]
    assert times[0] == 0 and times == sorted(times)
    assert roofline.all_reduce_us(0, 8) == pytest.approx(6.6 + 14 * 0.6)
    assert roofline.all_reduce_us(0, 16) == pytest.approx(6.8 + 2 * (7 * 0.6 + 5))
    assert roofline.all_reduce_us(1 << 20, 8) > roofline.all_reduce_us(1 << 10, 8)
    gathers = [roofline.all_gather_us(600, n) for n in (1, 2, 8, 16)]
    assert gathers[0] == 0 and gathers == sorted(gathers)


def test_wider_blocks_and_longer_texts_take_longer():
    for name in ("8b", "235b-a22b"):
        setting = Setting(shape_of(name), tp=8)
        widths = [dataclasses.replace(setting, rows=rows) for rows in (1, 8, 16, 64, 128)]
        times = [roofline.step_us(at) for at in widths]
        assert times == sorted(times)
        longer = dataclasses.replace(setting, length=30000)
        assert roofline.step_us(longer) > roofline.step_us(setting)


def test_a_last_round_of_few_programs_is_slow():
    def gate_up_us(columns):
        return roofline.product_us(Product("swiglu", columns, 1, size, size), Setting(shape))

    shape, size = shape_of("14b"), 2.0 * 5120 * 17408
    reading = 2 * size / H200.read_rate * 1e6
    assert gate_up_us(128 * 132) == pytest.approx(H200.product_us + reading)
    assert gate_up_us(128 * 136) > gate_up_us(128 * 132) + 20
    assert gate_up_us(128 * 200) == gate_up_us(128 * 132) == gate_up_us(128 * 12)


def test_where_arithmetic_takes_as_long_as_memory():
    setting = Setting(shape_of("8b"))
    rows = roofline.ridge_rows(setting)
    for width, is_reached in ((rows - 1, False), (rows, True)):
        at = dataclasses.replace(setting, rows=width)
        reading = roofline.weight_bytes(at) / H200.read_rate + roofline.kv_bytes(at) / H200.kv_rate
        assert (roofline.operations(at) / H200.arithmetic_rate >= reading) == is_reached
    assert roofline.ridge_rows(dataclasses.replace(setting, batch=4)) < rows
    assert roofline.ridge_rows(setting, most=8) is None


def test_experts():
    shape = shape_of("235b-a22b")
    assert roofline.distinct_experts(shape, 1) == pytest.approx(8)
    assert roofline.distinct_experts(shape, 2) == pytest.approx(128 * (1 - (120 / 128) ** 2))
    assert roofline.distinct_experts(shape, 10000) == pytest.approx(128)
    # 235 billion parameters, of which a token uses 22 (the embedding is not read).
    assert roofline.held_bytes(Setting(shape, length=0)) / 2e9 == pytest.approx(235, rel=0.002)
    assert roofline.weight_bytes(Setting(shape)) / 2e9 == pytest.approx(22, rel=0.04)
    held = {roofline.held_bytes(Setting(shape, rows=rows)) for rows in (1, 8, 64)}
    assert max(held) == pytest.approx(min(held))
    assert roofline.speed_up(Setting(shape, tp=8)) is None
    assert roofline.speed_up(Setting(shape_of("8b"))) == 1


def test_sizes_that_do_not_divide():
    odd = Shape("odd", 960, 2, 60, 60, 16, 960, 512, False)
    with pytest.raises(ValueError, match="tp=12 is not a multiple of the 8 GPUs of a host"):
        Setting(odd, tp=12)


def test_documented_commands_are_of_this_benchmark():
    assert len(documented()) >= 5
    for line, lines in documented():
        assert line.startswith("python scripts/benchmark.py roofline ") and lines


@pytest.mark.parametrize("line, lines", documented(), ids=lambda value: str(value)[:80])
def test_the_document_has_what_the_command_prints(run, line, lines):
    code, out, err = run(*shlex.split(line.replace("\\\n", " "))[3:])
    assert (code, err) == (0, "")
    assert lines == table_lines(out)


def test_json_lines(run, tmp_path):
    file = tmp_path / "rows.jsonl"
    flags = ("--shape", "8b", "--tp", "1,2", "--rows", "1,8", "--data", "1,2", "--batch", 2)
    code, out, err = run(*flags, "--length", 100, "--dtype", "float32", "--out", file)
    assert (code, err) == (0, "") and "steps" in out and "{" not in out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["tp"], row["data"], row["rows"]) for row in rows] == [
        (1, 1, 1), (1, 1, 8), (1, 2, 1), (1, 2, 8), (2, 1, 1), (2, 1, 8), (2, 2, 1), (2, 2, 8)
    ]  # fmt: skip
    for row in rows:
        assert row["measure"] == "roofline" and row["length"] == 100 and row["itemsize"] == 4
        parts = ("part_ms", "collectives_ms", "joining_ms", "gaps_ms")
        assert row["ms"] == pytest.approx(sum(row[part] for part in parts))
        assert row["gb_read"] == pytest.approx(row["gb_weights"] + row["gb_kv"])
        assert row["collectives_share"] == pytest.approx(row["collectives_ms"] / row["ms"])
        assert row["measured_ms"] is row["measured_part_ms"] is row["error"] is None


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--shape nope", "'nope' is not one of"),
        ("--tp 3", "8b: query heads 32 is not a multiple of tp=3"),
        ("--shape 1.7b --tp 16,32", "1.7b: query heads 16 is not a multiple of tp=32"),
        ("--shape 32b --tp 5", "32b: query heads 64 is not a multiple of tp=5"),
        ("--shape 14b --tp 20", "14b: feed-forward width 17408 is not a multiple of tp=20"),
        ("--shape 0.6b --tp 0", "expected integers of at least 1"),
        ("--rows 1,x", "expected integers of at least 1"),
        ("--length 0", "0 is not in the range x>=1"),
        ("--batch 3 --data 2", "batch=3 is not a multiple of data=2"),
        ("--gpus 3", "no --tp times --data makes --gpus 3"),
        ("--dtype int8", "'int8' is not one of"),
        ("--table all", "'all' is not one of"),
        ("--out /nowhere/rows.jsonl", "expected a file in a folder to write to"),
    ],
)
def test_bad_input_is_one_line(run, flags, message):
    code, out, err = run(*flags.split())
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err
