import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.api.runfile import load_run
from phalanx.catalog import load
from phalanx.cli.main import main
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe, Run
from phalanx.cost.refusals import refuse
from phalanx.planner.estimate import estimate

SMALL = ("llama-3.1-8b", "h100x64", "--tokens", "1Mi")
EIGHT = ("llama-3.1-8b", "h100x8", "--tokens", "1M")


@pytest.fixture
def phalanx(capsys, monkeypatch):
    """Runs one command line: exit code, stdout, stderr."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["plan", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_the_screen_ranks_layouts_with_bars_of_memory_and_reasons(phalanx):
    code, out, err = phalanx(*SMALL)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(
        "llama-3.1-8b (8.03B parameters) in bf16 on 64 h100-sxm of 80 GB; 128"
    )
    assert re.search(r"121,518 layouts divide the devices and the batch; [\d,]+ fit", out)
    assert re.search(r"^   1  dp=", out, re.MULTILINE)
    assert "memory of 80 GB" in out
    assert "w weights  g gradients" in out
    assert "matrix products: at the peak" in out
    assert "by the textbook" in out
    assert "\x1b" not in out


def test_on_a_terminal_bars_have_colours(phalanx, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = phalanx(*SMALL)
    assert "\x1b[" in out
    assert "█" in out


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_narrow_terminal_cuts_no_number_short(phalanx, monkeypatch, columns: int):
    for name, value in (("TTY_COMPATIBLE", "1"), ("COLUMNS", columns), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, str(value))
    _, out, _ = phalanx(*SMALL, "--top", "2")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, plain.splitlines())) <= columns
    assert "…" not in plain
    first = re.search(r"^   1  dp=.* GB", plain, re.MULTILINE)
    assert first is not None
    assert "below the peak" in plain.partition("memory: ")[0]


def test_json_is_one_document_with_the_fields_that_scripts_rely_on(phalanx):
    code, out, err = phalanx(*SMALL, "--json", "--top", 3)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == 1
    assert document["candidates"] == document["feasible"] + sum(document["refused"].values())
    assert document["tokens"] == 2**20
    assert len(document["layouts"]) == 3
    for shown in document["layouts"]:
        assert {"mfu", "hfu", "tokens_per_second", "peak_bytes", "bubble"} <= set(shown)
        assert shown["reasons"]
        assert shown["step_seconds"] == pytest.approx(sum(shown["term_seconds"].values()))
        assert shown["peak_bytes"] <= document["capacity_bytes"]
        assert Layout.parse(shown["layout"]).ranks == 64
    assert document["heuristic"]["difference_seconds"]
    assert document["why"] is None


@pytest.mark.parametrize(
    ("form", "first"), [("csv", "rank,layout,"), ("markdown", "| rank | layout")]
)
def test_other_forms_are_only_the_table(phalanx, form: str, first: str):
    _, out, _ = phalanx(*SMALL, "--format", form, "--top", 2)
    assert out.startswith(first)
    assert len(out.splitlines()) == (3 if form == "csv" else 4)
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert float(rows[0]["step_seconds"]) <= float(rows[1]["step_seconds"])


def test_16m_tokens_are_read_as_llama_3_means_them_and_it_says_so(phalanx):
    _, out, _ = phalanx(*EIGHT, "--json")
    document = json.loads(out)
    assert document["batch"] == 120
    assert document["notes"] == [
        "1M tokens are 122.1 sequences of 8,192; planned for 120 sequences, 983K tokens"
    ]


# the run file


def test_it_writes_a_run_file_that_train_accepts(phalanx, tmp_path: Path):
    path = tmp_path / "run.toml"
    code, _, err = phalanx(*SMALL, "--out", path, "--train-tokens", "1T", "--json")
    assert code == 0
    assert err.startswith(f"wrote {path}: dp=")
    run = load_run(path)
    refuse(run)
    assert run.layout.ranks == 64
    assert (run.recipe.seq, run.recipe.batch) == (8192, 128)
    assert run.recipe.steps == 953675
    assert run.model.name == "llama-3.1-8b"
    assert run.cluster == "h100x64"


def test_the_run_file_has_the_fastest_layout_that_the_trainer_runs(phalanx, tmp_path: Path):
    path = tmp_path / "run.toml"
    fixed = ("--fixed", "pp=4")
    phalanx(*SMALL, *fixed, "--out", path)
    code, out, _ = phalanx(*SMALL, *fixed, "--trainable", "--json", "--top", 1)
    assert code == 0
    assert Layout.parse(json.loads(out)["layouts"][0]["layout"]) == load_run(path).layout


def test_all_that_is_shown_as_trainable_is(phalanx):
    asked = ("mixtral-8x7b", "h100x64", "--tokens", "512Ki", "--seq", "4096", "--trainable")
    code, out, _ = phalanx(*asked, "--json")
    assert code == 0
    recipe = Recipe(seq=4096, batch=128)
    layouts = [Layout.parse(found["layout"]) for found in json.loads(out)["layouts"]]
    assert any(layout.ep > 1 for layout in layouts)
    assert any(layout.cp > 1 for layout in layouts)
    for layout in layouts:
        refuse(Run(model=load.model("mixtral-8x7b"), layout=layout, recipe=recipe))


LONGER = ("gpt2", "a100x8", "--tokens", "64Ki", "--seq", "2048")  # than its learned positions


def test_a_model_that_train_cannot_run_has_nothing_trainable(phalanx):
    code, _, err = phalanx(*LONGER, "--trainable")
    assert code == 3
    assert "sequences are longer than the learned positions" in err


def test_no_run_file_is_written_of_what_train_cannot_run(phalanx, tmp_path: Path):
    path = tmp_path / "run.toml"
    code, _, err = phalanx(*LONGER, "--out", path)
    assert code == 3
    assert "sequences are longer than the learned positions" in err
    assert not path.exists()


# questions


def test_why_not_shows_a_layout_term_by_term_beside_the_best(phalanx):
    code, out, _ = phalanx(*SMALL, "--why", "dp=8 pp=1 tp=8 mb=4")
    assert code == 0
    said = out[out.index("why not dp=8 pp=1 tp=8 mb=4?") :]
    assert re.search(r"rank [\d,]+ of [\d,]+", said)
    assert re.search(r"tensor axis +\d+ ms", said)
    assert re.search(r"step +[\d.]+ s +[\d.]+ s +\+", said)


def test_why_not_says_what_refuses_a_layout_and_what_fixes_it(phalanx):
    _, out, _ = phalanx(*SMALL, "--why", "dp=64 pp=1 tp=1 zero=0", "--memory", "76GiB")
    said = out[out.index("why not") :]
    assert re.search(r"needs [\d.]+ GiB of 76 GiB, [\d.]+ GiB too much", said)
    assert "it fits with zero=" in said
    assert not re.search(r"\d GB", out)


def test_json_has_the_answer_to_why_not(phalanx):
    _, out, _ = phalanx(*SMALL, "--why", "dp=7 pp=3 tp=4", "--json")
    answer = json.loads(out)["why"]
    assert answer["rank"] is None
    assert answer["refused"].endswith("the nearest that fits is dp=8 pp=2 tp=4")


def test_time_and_cost_of_a_training_with_failures(phalanx):
    _, out, _ = phalanx(*SMALL, "--train-tokens", "1T", "--price", 2.5, "--json")
    training = json.loads(out)["training"]
    assert training["steps"] == 953675
    assert 0.9 < training["goodput"] < 1
    assert training["cost"] == pytest.approx(2.5 * training["device_hours"])
    _, out, _ = phalanx(*SMALL, "--train-tokens", "1T", "--price", 2.5)
    assert "1T tokens with rank 1: 953,675 steps" in out
    assert "assumed: one failure in 50,677 device-hours" in out


def test_limits_of_the_command_line_hold(phalanx):
    words = ("--max-tp", 2, "--fixed", "pp=2 schedule=1f1b", "--json")
    _, out, _ = phalanx(*SMALL, *words)
    for shown in json.loads(out)["layouts"]:
        layout = Layout.parse(shown["layout"])
        assert layout.tp <= 2
        assert (layout.pp, layout.schedule) == (2, "1f1b")


def test_another_program_and_another_precision_have_other_prices(phalanx):
    def best(*words: str) -> float:
        _, out, _ = phalanx(*SMALL, *words, "--json")
        return json.loads(out)["layouts"][0]["step_seconds"]

    assert best("--framework", "megatron") < best()
    assert best("--fixed", "precision=fp8") < best()


def test_every_price_is_what_estimate_says(phalanx):
    from phalanx.catalog import load

    _, out, _ = phalanx(*SMALL, "--json", "--top", 4)
    for shown in json.loads(out)["layouts"]:
        layout = Layout.parse(shown["layout"])
        price = estimate(load.model("llama-3.1-8b"), load.cluster("h100x64"), layout, 8192, 128)
        assert price.step_seconds == shown["step_seconds"]
        assert price.peak_bytes == shown["peak_bytes"]


# bad input: one line, exit code 2 or 3


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        (2, ("llama-3.1-405", "h100x8", "--tokens", "1M"), "did you mean llama-3.1-405b"),
        (2, ("llama-3.1-8b", "h10x8", "--tokens", "1M"), "did you mean h100"),
        (2, ("llama-3.1-8b", "h100", "--tokens", "1M"), "say how many, for example h100x8"),
        (2, ("llama-3.1-8b", "h100x8"), "--tokens"),
        (2, ("llama-3.1-8b", "h100x8", "--tokens", "0"), "positive and finite"),
        (2, ("llama-3.1-8b", "h100x8", "--tokens", "-5"), "write it as 16M"),
        (2, ("llama-3.1-8b", "h100x8", "--tokens", "nan"), "write it as 16M"),
        (2, ("llama-3.1-8b", "h100x8", "--tokens", "1e30"), "at most 1,000,000,000 sequences"),
        (2, ("llama-3.1-8b", "h100x8", "--tokens", "100"), "less than one sequence"),
        (2, (*EIGHT, "--seq", "0"), "seq is 0"),
        (2, (*EIGHT, "--seq", "-8"), "seq is -8"),
        (2, (*EIGHT, "--seq", "1e3"), "invalid int value"),
        (2, (*EIGHT, "--top", "0"), "top is 0"),
        (2, (*EIGHT, "--max-tp", "-1"), "max_tp is -1"),
        (2, (*EIGHT, "--memory", "0"), "80GB (80e9) or 76GiB"),
        (2, (*EIGHT, "--memory", "nan"), "80GB (80e9) or 76GiB"),
        (2, (*EIGHT, "--memory", "1e30"), "at most 1e+15"),
        (2, (*EIGHT, "--train-tokens", "1T", "--price", "nan"), "price is nan"),
        (2, (*EIGHT, "--train-tokens", "1T", "--price", "-1"), "price is -1"),
        (2, (*EIGHT, "--price", "2"), "--price is for a whole training; say how long it is"),
        (2, (*EIGHT, "--train-tokens", "-1"), "--train-tokens is '-1'; write it as 16M"),
        (2, (*EIGHT, "--out", "/"), "--out /: it is a file to write"),
        (2, (*EIGHT, "--out", "/nowhere/run.toml"), "in a folder that is there"),
        (2, (*EIGHT, "--train-tokens", "1e30"), "at most 1e+20"),
        (2, (*EIGHT, "--train-tokens", "0"), "positive and finite"),
        (2, (*EIGHT, "--train-tokens", "1T", "--device-hours", "0"), "must be positive"),
        (2, (*EIGHT, "--fixed", "ppp=3"), "did you mean pp"),
        (2, (*EIGHT, "--fixed", "precision=bf16|fp8"), "one precision"),
        (2, (*EIGHT, "--fixed", "stages=16+16"), "the search leaves stages at its default"),
        (2, (*EIGHT, "--fixed", "stages=16+16"), "prices one layout with stages=16+16"),
        (2, (*EIGHT, "--memory", "5"), "5 what?"),
        (2, (*EIGHT, "--why", "dp=two pp=1 tp=1"), "dp is a whole number"),
        (2, (*EIGHT, "--framework", "megatron-2021"), "phalanx estimate prices one layout"),
        (3, (*EIGHT, "--fixed", "pp=3"), "pp=3 does not divide 8 devices"),
        (3, (*EIGHT, "--fixed", "tp=8", "--max-tp", "2"), "tp is to be 8, and can only be 1, 2"),
        (3, (*EIGHT, "--fixed", "tp=8 pp=8"), "no layout of 8 devices has tp=8 pp=8"),
        (3, ("llama-3.1-8b", "a100x8", "--tokens", "1M", "--fixed", "precision=fp8"), "no fp8"),
        (3, ("llama-3.1-405b", "h100x8", "--tokens", "16M"), "it would fit on 128 devices"),
        (3, (*EIGHT, "--memory", "2GiB"), "GiB too much"),
    ],
)
def test_a_question_without_an_answer_is_one_line(phalanx, code: int, words, message: str):
    found, out, err = phalanx(*words)
    assert (found, out) == (code, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert message in err


def test_a_degree_that_divides_nothing_is_named_where_others_do(phalanx):
    code, out, _ = phalanx(*EIGHT, "--fixed", "pp=3|4", "--top", "1")
    assert code == 0
    assert "pp=3 does not divide the devices, 8, and is left out" in out


# the limits of time and memory that a person waits within


def measured(*words: str) -> tuple[float, float]:
    """User seconds and bytes of a whole process, start-up included."""
    program = (
        "import re, resource, sys; from phalanx.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        # ru_maxrss would count what the parent held when it forked
        "most = re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(used.ru_utime, int(most) * 1024, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, size = done.stderr.split()
    return float(seconds), float(size)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (("llama-3.1-405b", "h100x16384", "--tokens", "16M", "--seq", "8192"), 2.0),
        (("gpt-3-175b", "a100x4096", "--tokens", "3.2M", "--seq", "2048"), 2.0),
        (("llama-3.1-405b", "h100x1048576", "--tokens", "16M", "--seq", "8192"), 5.0),
    ],
)
def test_a_whole_search_takes_seconds_of_one_core_and_little_memory(words, limit: float):
    seconds, size = measured(*words)
    assert seconds < 2 * limit  # a machine that is busy, or slower, by as much as that
    assert size < 500e6
