import io
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from phalanx.cli.console import (
    LiveReporter,
    PlainReporter,
    Screen,
    clock,
    describe_step,
    live_line,
    open_console,
)
from phalanx.cli.stream import LossyStream
from phalanx.cli.summary import print_summary, show_info, sparkline
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.trainer.run.report import RunInfo, Silent, StepMetrics, Summary

INFO = RunInfo(
    name="demo",
    directory="runs/demo",
    model=ModelShape(),
    layout=Layout(pp=2, tp=2),
    precision="fp32",
    stages=(2, 2),
    micro_batches=16,
    parameters=3_080_000,
    tokens_per_step=4096,
    steps=200,
    device="4 ranks on 2 cores",
    corpus="a [bold]text[/nonsense]",
    bytes_per_token=1.0,
    peak_flops=1.9e11,
    peak_source="measured",
)
METRICS = StepMetrics(
    step=7,
    steps=200,
    loss=2.34567,
    grad_norm=1.5,
    learning_rate=1e-3,
    tokens=4096,
    seconds=0.5,
    tokens_per_second=8192.0,
    flops_per_second=5e10,
    mfu=0.254,
    hfu=0.301,
    data_wait_seconds=0.05,
    peak_bytes=2**29,
    seconds_left=83.0,
)
SUMMARY = Summary(
    name="demo",
    directory="runs/demo",
    layout="dp=1 pp=2 tp=2",
    parameters=3_080_000,
    last_step=200,
    steps=200,
    first_loss=5.545177,
    last_loss=1.386294,
    losses=tuple(5.5 - 0.02 * i for i in range(200)),
    validation_loss=1.5,
    bytes_per_token=1.0,
    tokens=819_200,
    seconds=100.0,
    tokens_per_second=8192.0,
    flops_per_second=5e10,
    mfu=0.254,
    hfu=0.254,
    convention="6 N + attention",
    time_split={"compute": 60.0, "waiting for tensor": 40.0},
    peak_bytes=2**29,
    checkpoints=("runs/demo/checkpoints/step-00000200",),
    sample="def f(x):\n\treturn \x1b[2Jx",
    next_steps=(("phalanx verify --layout " + "x" * 120, "prove it"),),
)


def shown(item: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(item)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def summarised(summary: Summary, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    print_summary(console, summary)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def reporter_lines(metrics: list[StepMetrics], info: RunInfo = INFO) -> list[str]:
    console = Console(file=io.StringIO(), width=100, markup=False, highlight=False)
    reporter = PlainReporter(console)
    reporter.on_start(info)
    for step in metrics:
        reporter.on_step(step)
    assert isinstance(console.file, io.StringIO)
    return [line for line in console.file.getvalue().splitlines() if line.startswith("step ")]


def steps(first: int, last: int) -> list[StepMetrics]:
    return [replace(METRICS, step=step, steps=last) for step in range(first + 1, last + 1)]


def test_a_step_is_told_with_all_that_the_contract_lists() -> None:
    assert describe_step(METRICS) == [
        "step   7/200",
        "loss 2.3457",
        "8.19K tok/s",
        "MFU 25.4% HFU 30.1%",
        "left 1:23",
        "512 MiB",
        "data wait 10%",
        "norm 1.5",
        "lr 1.00e-03",
    ]


def test_without_a_known_peak_the_achieved_rate_is_shown_instead() -> None:
    pieces = describe_step(replace(METRICS, mfu=None, hfu=None))
    assert "50 GFLOP/s" in pieces
    assert not any("MFU" in piece for piece in pieces)


def test_a_skipped_step_says_so() -> None:
    pieces = describe_step(replace(METRICS, skipped=True, loss=math.nan))
    assert "loss nan" in pieces
    assert any("SKIPPED" in piece for piece in pieces)


@given(st.integers(20, 250))
def test_the_live_line_is_one_line_at_any_width(width: int) -> None:
    lines = shown(live_line(METRICS, width), width).splitlines()
    assert len(lines) == 1
    assert "step   7/200" in lines[0]
    assert len(lines[0]) <= width


def test_a_wide_terminal_shows_everything_and_a_bar() -> None:
    (line,) = shown(live_line(METRICS, 160), 160).splitlines()
    assert all(piece in line for piece in describe_step(METRICS))
    assert line.startswith("╸")


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 20), (0, 1000), (990, 1000), (7, 1007)])
def test_plain_output_is_some_twenty_lines_and_has_the_last_step(first: int, last: int) -> None:
    lines = reporter_lines(steps(first, last), replace(INFO, first_step=first, steps=last))
    assert 1 <= len(lines) <= 41
    assert len(lines) >= min(20, last - first)
    assert lines[-1].startswith(f"step {last}/{last}")


def test_plain_output_always_shows_a_skipped_step() -> None:
    metrics = [replace(step, skipped=step.step == 123) for step in steps(0, 1000)]
    assert any("123/1000" in line for line in reporter_lines(metrics, replace(INFO, steps=1000)))


def test_text_of_others_is_never_read_as_markup() -> None:
    assert "a [bold]text[/nonsense]" in shown(show_info(INFO))
    console = Console(file=io.StringIO(), markup=False)
    PlainReporter(console).on_event("set aside [/corrupt]")
    LiveReporter(console).on_event("set aside [/corrupt]")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "set aside [/corrupt]\n" * 2


def test_an_unknown_peak_comes_with_its_reason() -> None:
    text = shown(show_info(replace(INFO, peak_flops=None, peak_source="nobody lists a Foo 9000")))
    assert "no MFU: nobody lists a Foo 9000" in text


def test_a_resumed_run_says_where_it_goes_on() -> None:
    assert "after step 50 of 200" in shown(show_info(replace(INFO, first_step=50)))


def test_the_summary_gives_the_loss_in_nats_and_in_bits_per_byte() -> None:
    text = summarised(SUMMARY)
    assert "5.545 -> 1.386 nats per byte  (8.00 -> 2.00 bits per byte)" in text
    assert "1.500 nats per byte  (2.16 bits per byte)" in text


def test_without_a_known_text_nothing_is_said_per_byte() -> None:
    text = summarised(replace(SUMMARY, bytes_per_token=math.nan))
    assert "nats per token" in text
    assert "byte" not in text


def test_the_summary_splits_the_time_with_the_longest_first() -> None:
    text = summarised(replace(SUMMARY, time_split={"wait": 1.0, "compute": 3.0}))
    assert text.index("compute") < text.index("wait")
    assert "75%" in text
    assert "25%" in text


def test_generated_text_cannot_command_the_terminal() -> None:
    text = summarised(SUMMARY)
    assert "\x1b" not in text
    assert "def f(x):" in text


def test_a_suggested_command_is_never_folded() -> None:
    command = SUMMARY.next_steps[0][0]
    assert any(command in line for line in summarised(SUMMARY, 60).splitlines())


def test_an_interrupted_run_is_called_so() -> None:
    text = summarised(replace(SUMMARY, interrupted=True, last_step=7))
    assert "Interrupted demo: 7 steps" in text


def test_a_run_of_no_steps_has_a_summary_too() -> None:
    empty = replace(
        SUMMARY, losses=(), tokens=0, time_split={}, checkpoints=(), sample="", next_steps=()
    )
    text = summarised(replace(empty, first_loss=math.nan, last_loss=math.nan))
    assert "Trained demo" in text
    assert "nan" not in text


@given(st.lists(st.floats(), min_size=1, max_size=200), st.integers(1, 60))
def test_a_curve_has_a_block_for_every_cell(values: list[float], cells: int) -> None:
    curve = sparkline(values, cells)
    assert len(curve) in (0, min(cells, len(values)))


def test_a_falling_curve_falls() -> None:
    assert sparkline([8.0, 6.0, 4.0, 2.0], 2) == "█▁"
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁!█"
    assert sparkline([1.0, 1.0], 2) == "▁▁"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03"), (-1, "0:00")],
)
def test_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_quiet_screen_shows_nothing() -> None:
    assert isinstance(Screen(quiet=True).reporter(), Silent)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    with (tmp_path / "out").open("w") as stream:
        PlainReporter(open_console(stream)).on_end(SUMMARY)
    assert "\x1b[3" not in (tmp_path / "out").read_text()


def test_a_closed_pipe_loses_the_text_and_not_the_run() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        reporter = PlainReporter(open_console(stream))
        os.close(read_end)
        reporter.on_start(INFO)
        reporter.on_step(METRICS)
        reporter.on_end(SUMMARY)


def test_a_letter_that_the_terminal_lacks_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="ascii") as stream:
        LossyStream(stream).write("█ done")
    assert path.read_text() == "? done"
