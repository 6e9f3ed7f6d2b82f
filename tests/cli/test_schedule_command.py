import json
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import main
from phalanx.cli.schedule_picture import plain
from phalanx.planner.simulate import simulate
from phalanx.schedules.build import build

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def phalanx(capsys, monkeypatch):
    """Runs one command line: exit code, stdout, stderr."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["schedule", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_without_a_terminal_it_draws_in_letters_and_sums_up(phalanx):
    code, out, err = phalanx("1f1b", "-p", 3, "-m", 4)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "1f1b: p=3 ranks, m=4 micro-batches, v=1",
        "rank 0   F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3---",
        "rank 1   ...F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3---",
        "rank 2   ......F0 B0--- F1 B1--- F2 B2--- F3 B3---",
        "         F forward   B backward   . idle",
        "makespan        18 (ideal 12)",
        "bubble          50.0% of the ideal time, 33.3% of all time",
        "idle inside     6 3 0 between the first and the last action of each rank",
        "peak in flight  3 2 1 micro-batches",
        "checked         complete, in order, without deadlock; 16 messages meet in order",
    ]


def test_several_stages_on_a_rank_are_told_apart(phalanx):
    _, out, _ = phalanx("interleaved", "-p", 2, "-m", 2)
    assert "rank 1   ....1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1----\n" in out
    assert "peak in flight  4 3 micro-batches x stages, v=2 to a rank" in out


def test_json_is_one_document_with_the_fields_that_scripts_rely_on(phalanx):
    code, out, err = phalanx("1f1b", "-p", 2, "-m", 2, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "schema": 1,
        "name": "1f1b",
        "p": 2,
        "m": 2,
        "v": 1,
        "rows": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "makespan": 9,
        "bubble_over_ideal": 0.5,
        "idle_fraction": pytest.approx(1 / 3),
        "peak_in_flight": [2, 1],
        "checked": True,
    }


@pytest.mark.parametrize(
    ("cost", "makespan"),
    [("F=2", 12), ("F=1,I=2,W=0.5", 10.5), ("I=3 W=1", 15), ("F=1,B=3", 12)],
)
def test_costs_left_out_stay_one_and_a_backward_is_its_two_halves(phalanx, cost, makespan):
    _, out, _ = phalanx("gpipe", "-p", 2, "-m", 2, "--json", "--cost", cost)
    assert json.loads(out)["makespan"] == makespan


def test_rows_written_to_a_file_are_read_back_as_a_schedule(phalanx, tmp_path):
    path = tmp_path / "mine.csv"
    code, out, err = phalanx("interleaved", "-p", 2, "-m", 4, "--csv", path, "--json")
    assert (code, err) == (0, f"wrote {path}\n")
    assert path.read_text().splitlines()[1].startswith("1F0,1F1,3F0,3B0,3F1")
    code, again, _ = phalanx(path, "--json")
    assert code == 0
    assert json.loads(again) == {**json.loads(out), "name": "mine"}


def test_the_picture_is_xml_with_one_block_for_every_action(phalanx, tmp_path):
    path = tmp_path / "picture.svg"
    code, _, _ = phalanx("gpipe", "-p", 2, "-m", 3, "--svg", path)
    assert code == 0
    root = ET.parse(path).getroot()
    blocks = root.findall(f"{SVG}g")
    assert [b.findtext(f"{SVG}title") for b in blocks[:3]] == [
        "0F0: 0 to 1",
        "0F1: 1 to 2",
        "0F2: 2 to 3",
    ]
    assert len(blocks) == 2 * 3 * 2
    backward = blocks[3].find(f"{SVG}rect")
    assert backward is not None
    assert float(backward.attrib["width"]) == 2 * 26


def test_colour_is_used_where_it_is_wanted(phalanx, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = phalanx("1f1b", "-p", 2, "-m", 2)
    assert "\x1b[" in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = phalanx("1f1b", "-p", 2, "-m", 2)
    assert "\x1b[" not in out
    assert "rank 1   ...F0 B0--- F1 B1---" in out


@given(p=st.integers(1, 5), m=st.integers(1, 30), columns=st.integers(1, 300), f=st.floats(0.1, 10))
def test_a_picture_never_grows_wider_than_the_screen(p, m, columns, f):
    schedule = build("1f1b", p, m)
    kinds = {action.kind for row in schedule.rows for action in row}
    timeline = simulate(schedule, {kind: f if kind.value == "F" else 1.0 for kind in kinds})
    lines = plain(schedule, timeline, columns)
    assert len(lines) == p
    assert max(map(len, lines)) <= max(columns, len("rank 127 ") + 1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["1fib"], 2, "unknown schedule '1fib'; did you mean 1f1b?"),
        (["1f1b", "-p", "0"], 2, "p=0; a schedule needs p of at least 1"),
        (["1f1b", "-p", "1000000000"], 2, "8e+09 passes through a stage; a schedule that is"),
        (["1f1b", "-v", "2"], 3, "1f1b needs v to be 1, not v=2"),
        (["interleaved", "-m", "6"], 3, "m can be 4 or 8"),
        (["1f1b", "--cost", "F=fast"], 2, "cannot read 'F=fast' as a cost; write F=1.5"),
        (["1f1b", "--cost", "G=1"], 2, "unknown kind of action 'G'; known: B, F, I, W"),
        (["1f1b", "--cost", "F=-1"], 2, "the cost of F is -1.0; it must be finite and at least 0"),
        (["1f1b", "--cost", "F=0,I=0,W=0"], 2, "every action costs 0"),
        (["missing.csv"], 2, "there is no schedule missing.csv"),
    ],
)
def test_a_wrong_question_gets_one_line_and_its_exit_code(phalanx, words, code, message):
    found, out, err = phalanx(*words)
    assert (found, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("contents", "code", "message"),
    [
        (b"0F0,0B0\n1F0\n", 3, "rank 1 never does 1B0"),
        (b"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", 3, "deadlock: rank 0 before 0B0, rank 1 before"),
        (b"0F0,what\n", 2, "cannot read 'what' as an action"),
        (b"\xff\xfe\x00", 2, "is no text"),
        (b"", 2, "has no actions"),
    ],
)
def test_a_file_that_cannot_be_obeyed_is_refused_by_name(
    phalanx, tmp_path, contents, code, message
):
    path = tmp_path / "mine.csv"
    path.write_bytes(contents)
    found, out, err = phalanx(path)
    assert (found, out) == (code, "")
    assert message in err


def test_sizes_that_contradict_the_file_are_wrong_usage(phalanx, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert phalanx(path, "-p", 2)[0] == 0
    code, _, err = phalanx(path, "-m", 3)
    assert code == 2
    assert "has m=1, not 3; leave out -m" in err


def test_a_lowered_file_is_checked_with_its_messages(phalanx, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    code, out, _ = phalanx(path)
    assert code == 0
    assert "2 messages meet in order" in out
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n")
    code, _, err = phalanx(path)
    assert code == 3
    assert "rank 1 never does 1SEND_B0" in err
