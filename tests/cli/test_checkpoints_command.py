"""`phalanx checkpoints` lists, verifies, shows, compares: without torch, and while a run trains."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx.api.checkpoints import compare_checkpoints
from phalanx.cli.main import main
from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint import Piece, Saver
from phalanx.trainer.checkpoint.check import verify
from phalanx.trainer.checkpoint.names import steps
from phalanx.trainer.checkpoint.raw import RawTensors, numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def pieces(whole: torch.Tensor, name: str, cut: int, rank: int) -> list[Piece]:
    """Rows of a matrix: those before `cut` are of rank 0."""
    rows = slice(0, cut) if rank == 0 else slice(cut, whole.shape[0])
    part = whole[rows].contiguous()
    offsets, count = (rows.start, 0), part.numel()
    return [
        Piece(name, "weight", tuple(whole.shape), offsets, tuple(part.shape), 0, count, p)
        for p in [part.reshape(-1)]
    ]


def save(home: Path, step: int, tensors: dict[str, torch.Tensor], cut: int = 2) -> None:
    state = {"step": step, "updates": step, "batch": 4, "seq": 16, "layout": f"dp={cut}"}
    savers = [Saver(home / "checkpoints", rank, 2, attempt="a", keep=9) for rank in (0, 1)]
    for saver in savers:
        mine = [p for name, whole in tensors.items() for p in pieces(whole, name, cut, saver.rank)]
        saver.save(step, mine, state)
    for saver in savers:
        saver.wait()


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {str(dtype): torch.full((5, 3), value).to(dtype) for dtype in DTYPES}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1, 2 and 3; the first two are equal, cut in other places."""
    for step, value, cut in ((1, 1.5, 2), (2, 1.5, 3), (3, 2.0, 2)):
        save(tmp_path, step, tensors(value), cut)
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["checkpoints", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def damage(home: Path) -> None:
    shard = home / "checkpoints" / "step-00000003" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_what_is_there_is_listed_newest_first(home: Path, capsys) -> None:
    found = asked(capsys, str(home))["checkpoints"]
    assert [(c["step"], c["verified"], c["layout"]) for c in found] == [
        (3, None, "dp=2"),
        (2, None, "dp=3"),
        (1, None, "dp=2"),
    ]
    for row in found:
        assert row["bytes"] == sum(f.stat().st_size for f in Path(row["path"]).iterdir())
    assert phalanx.checkpoints(home).to_dict() == asked(capsys, str(home))


def test_every_byte_is_looked_at_where_it_is_asked_for(home: Path, capsys) -> None:
    assert [c["verified"] for c in asked(capsys, str(home), "--verify")["checkpoints"]] == [
        True
    ] * 3
    damage(home)
    assert [c["verified"] for c in asked(capsys, str(home))["checkpoints"]] == [None] * 3
    found = asked(capsys, str(home), "--verify", code=4)["checkpoints"]
    assert [c["verified"] for c in found] == [False, True, True]
    assert found[0]["problem"] == "rank-00001.safetensors does not match its sha256"
    assert steps(home / "checkpoints")[0][0] == 3  # only looked at
    (home / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    assert [c["verified"] for c in asked(capsys, str(home), code=4)["checkpoints"]] == [
        None,
        False,
        None,
    ]


def test_what_is_inside_is_shown(home: Path, capsys) -> None:
    found = asked(capsys, str(home), "--show", "2")
    assert found["samples"] == 2 * 4
    assert found["state"]["updates"] == 2
    assert found["tensors"][0] == {
        "name": "torch.bfloat16",
        "field": "weight",
        "dtype": "BF16",
        "shape": [5, 3],
        "files": 2,
    }
    damage(home)
    shown = asked(capsys, str(home), "--show", "3", code=1)
    assert "does not match its sha256; step-00000002 is intact" in shown["error"]


def test_two_that_were_cut_in_other_places_are_equal_bit_for_bit(home: Path, capsys) -> None:
    found = asked(capsys, str(home), "--diff", "1", "2")
    assert found["equal"]
    assert found["tensors"] == []
    assert found["state"] == {"layout": ["dp=2", "dp=3"], "step": [1, 2], "updates": [1, 2]}


def test_two_that_differ_are_told_apart_by_how_much(home: Path, capsys) -> None:
    elsewhere = home.parent / f"{home.name}-copy"
    shutil.copytree(home / "checkpoints" / "step-00000003", elsewhere)
    for second in ("3", str(elsewhere)):
        found = asked(capsys, str(home), "--diff", "1", second, code=4)
        assert [t["changed"] for t in found["tensors"]] == [15] * 5
        by_name = {t["name"]: t["max_difference"] for t in found["tensors"]}
        assert by_name == {
            **dict.fromkeys(map(str, DTYPES), 0.5),
            "torch.int64": None,
        }
    damage(home)
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        compare_checkpoints(home, "1", "3")


@pytest.mark.parametrize("words", [(), ("--show", "1"), ("--diff", "1", "3")])
def test_a_person_can_read_it(home: Path, capsys, words: tuple[str, ...]) -> None:
    main(["checkpoints", str(home), *words])
    out = capsys.readouterr().out
    assert "step-00000001" in out
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--show", "7"), "has no checkpoint of step 7; it has 1, 2, 3"),
        (("--show", "elsewhere"), "elsewhere is neither a step nor the folder of a checkpoint"),
    ],
)
def test_what_is_not_there_is_said(
    home: Path, capsys, words: tuple[str, ...], message: str
) -> None:
    assert main(["checkpoints", str(home), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys) -> None:
    assert main(["checkpoints", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_it_needs_no_torch(home: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        "from phalanx.cli.main import main\n"
        f"sys.exit(main(['checkpoints', {str(home)!r}, '--verify'])"
        f" or main(['checkpoints', {str(home)!r}, '--show', '3'])"
        f" or main(['checkpoints', {str(home)!r}, '--diff', '1', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_that_is_copied_away_or_listed_while_others_come_and_go_is_whole(
    tmp_path: Path,
) -> None:
    """A watcher looks as often as it can: what is published is complete, and never changes."""
    stop, seen, wrong = threading.Event(), {}, []

    def watch() -> None:
        while not stop.is_set():
            for info in phalanx.checkpoints(tmp_path, verified=True).checkpoints:
                sums = (info.verified, info.bytes)
                if seen.setdefault(info.step, sums) != sums or not info.verified:
                    wrong.append((info, seen[info.step]))
            for _, path in steps(tmp_path / "checkpoints")[:1]:
                shutil.copytree(path, tmp_path / "copies" / path.name, dirs_exist_ok=True)

    (tmp_path / "checkpoints").mkdir()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(1, 101):
            save(tmp_path, step, {"w": torch.full((4, 3), step)})
    finally:
        stop.set()
        watcher.join()
    assert wrong == []
    assert len(seen) > 3
    for path in (tmp_path / "copies").iterdir():
        verify(path)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_numbers_are_what_torch_reads(values: list[float]) -> None:
    for dtype, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16")):
        tensor = torch.tensor(values).to(dtype)
        words = tensor.view(torch.int32 if name == "F32" else torch.int16).numpy()
        found = numbers(words.view("u4" if name == "F32" else "u2"), name)
        assert found is not None
        assert torch.equal(torch.from_numpy(found).nan_to_num(), tensor.double().nan_to_num())


def test_an_unknown_tensor_is_refused(home: Path) -> None:
    path = home / "checkpoints" / "step-00000001"
    with pytest.raises(CheckpointError, match="holds no exp_avg of w"):
        RawTensors(path, verify(path)).words("w", "exp_avg")
