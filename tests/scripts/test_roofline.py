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
from roofline import Setting
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


LISTED = [
    ("8b", 1, 4.03), ("8b", 8, 4.11), ("8b", 64, 4.84), ("32b", 1, 16.07), ("32b", 8, 16.31),
    ("14b", 1, 8.02), ("4b", 1, 2.56), ("1.7b", 1, 1.48), ("0.6b", 1, 0.99),
]  # fmt: skip


@pytest.mark.parametrize("name, rows, ms", LISTED)
def test_one_device_is_within_five_percent_of_what_was_measured(name, rows, ms):
    assert MEASURED[name, 1][rows] == ms
    assert roofline.step_us(Setting(shape_of(name), rows=rows)) / 1e3 == pytest.approx(ms, rel=0.05)


def test_bytes_are_those_that_the_benchmark_counts():
    # weight_bytes and kv_bytes of benchmarks/h200/step.jsonl.
    rows = (DOC.parents[1] / "benchmarks/h200/step.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if row["measure"] == "step"]
    assert {row["shape"] for row in steps} >= {"0.6b", "8b", "32b"}
    for row in steps:
        setting = Setting(shape_of(row["shape"]), batch=row["batch"], length=row["length"])
        assert roofline.weight_bytes(setting) == row["weight_bytes"]
        assert roofline.kv_bytes(setting) == row["kv_bytes"]


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
    # A batch in parts has one number to agree on, nothing in the layers.
    parts = dataclasses.replace(setting, batch=2, data=2)
    assert roofline.layer_all_reduce_us(parts) == 0
    assert roofline.collectives_us(parts) == roofline.all_reduce_us(4, 2)


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
        filled = [roofline.step_us(at, is_filled=True) for at in widths]
        assert all(less <= us for less, us in zip(filled, times, strict=True))
        longer = dataclasses.replace(setting, length=30000)
        assert roofline.step_us(longer) > roofline.step_us(setting)


def test_programs_of_gate_and_up_as_the_document_says():
    for name, alone, shared in (("8b", 96, 12), ("32b", 200, 25)):
        for tp, count in ((1, alone), (8, shared)):
            found = roofline.products(Setting(shape_of(name), tp=tp))
            (gate_up,) = [product for product in found if product.kind == "swiglu"]
            assert gate_up.programs(1) == (count, 1)
            assert gate_up.programs(129)[0] == 0


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
        assert row["gb_read"] == pytest.approx(row["gb_weights"] + row["gb_kv"])
        assert row["collectives_share"] == pytest.approx(row["collectives_us"] / row["ms"] / 1e3)
        assert row["measured_ms"] is None and row["error"] is None


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
