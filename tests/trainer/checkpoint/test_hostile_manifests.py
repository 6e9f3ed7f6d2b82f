"""What only a program can write, every checksum right: rejected at once, the one before used."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import make_savers, reseal, same_bits, split_evenly

from phalanx.trainer.checkpoint import newest, open_verified
from phalanx.trainer.checkpoint.manifest import DamagedError
from phalanx.trainer.run.continuity import require_progress

WHOLE = torch.arange(40.0).reshape(8, 5)
SECONDS = 1.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of steps 4 and 8, as a run saves them."""
    savers = make_savers(tmp_path, 2)
    for step in (4, 8):
        for saver, pieces in zip(savers, split_evenly({("w", "weight"): WHOLE}, 2), strict=True):
            saver.save(step, pieces, {"step": step, "updates": step, "loss_scale": [1.0, 0]})
        for saver in savers:
            saver.wait()
    return tmp_path


Change = Callable[[dict[str, Any]], object]


def set_state(key: str, value: object) -> Change:
    return lambda table: table["state"].update({key: value})


def set_step(value: int) -> Change:
    def change(table: dict[str, Any]) -> None:
        table["step"] = table["state"]["step"] = value

    return change


CHANGES: dict[str, Change] = {
    "bytes are infinite": lambda t: t["files"]["rank-00000.safetensors"].update(bytes=float("inf")),
    "bytes are a text": lambda t: t["files"]["rank-00000.safetensors"].update(bytes="1"),
    "no updates": lambda t: t["state"].pop("updates"),
    "no step in state": lambda t: t["state"].pop("step"),
    "another step in state": set_state("step", 7),
    "negative updates": set_state("updates", -1),
    "a loss scale of infinity": set_state("loss_scale", [float("inf"), 0]),
    "a loss scale of one number": set_state("loss_scale", [1.0]),
    "a schedule that is none": set_state("schedule", {"steps": 3}),
    "negative step": set_step(-8),
    "a step that is true": set_step(True),
    "a step of 5,000 digits": set_step(10**4200),
    "a shape without end": lambda t: t["pieces"][0].update(shape=[10**18, 10**18]),
    "a piece without end": lambda t: t["pieces"][1].update(stop=10**18),
    "another dtype": lambda t: [piece.update(dtype="F16") for piece in t["pieces"]],
    "another key": lambda t: t["pieces"][0].update(key="weight/w#7"),
    "a name that leads elsewhere": lambda t: t["pieces"][0].update(name="../../w"),
    "a file that is none of ours": lambda t: t["pieces"][0].update(file="run.toml"),
    "no table": lambda t: t.update(files=[]),
}


def edit(path: Path, change: Change) -> None:
    """Change a manifest and give it a right checksum."""
    table = json.loads(path.read_bytes())
    del table["sha256"]
    change(table)
    reseal(path, lambda _: json.dumps(table)[:-1].encode() + b",\n")


def rejected(directory: Path) -> str:
    """What is told of the checkpoint of step 8; that of step 4 is found, and at once."""
    events: list[str] = []
    start = time.perf_counter()
    found = newest(directory, events.append, require_progress)
    assert time.perf_counter() - start < SECONDS
    assert found is not None
    with found:
        assert found.step == 4
        assert same_bits(found.tensor("w"), WHOLE)
    (event,) = events
    assert "\n" not in event
    assert len(event) < 600
    return event


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_would_lead_a_run_astray_is_rejected(
    directory: Path, change: Change
) -> None:
    edit(directory / "step-00000008" / "manifest.json", change)
    rejected(directory)


@pytest.mark.parametrize(
    "text",
    [
        b'{"schema": 1, "state": ' + b"[" * 10_000 + b"]" * 10_000 + b",\n",
        b'{"schema": 1, "state": ' + b'{"a":' * 100_000 + b"\n",
        b'{"schema": 1, "step": 1e999,\n',
        b"",
        b"\xff\xfe",
        b'"text",\n',
    ],
    ids=["lists", "tables", "infinite", "nothing", "no text", "a text"],
)
def test_a_manifest_that_is_no_table_is_rejected(directory: Path, text: bytes) -> None:
    reseal(directory / "step-00000008" / "manifest.json", lambda _: text)
    rejected(directory)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(directory: Path, name: str) -> None:
    path = directory / "step-00000008" / name
    path.unlink()
    os.mkfifo(path)
    assert "no plain file" in rejected(directory)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
def test_a_link_is_not_followed(directory: Path, tmp_path: Path, name: str) -> None:
    path, elsewhere = directory / "step-00000008" / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    rejected(directory)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: (2**40).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b'"F32"', b'"F64"'),
        lambda data: data.replace(b"[20]", b"[10]"),
        lambda data: data.replace(b"weight/w#0", b"weight/v#0"),
        lambda data: data.replace(b"[0,80]", b"[8,88]"),
        lambda data: data.replace(b"[0,80]", b"[0,72]"),
        lambda data: data[:8] + b"[" * (len(data) - 8),
    ],
)
def test_a_shard_whose_header_is_damaged_is_rejected_though_its_hash_is_right(
    directory: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = directory / "step-00000008" / "rank-00001.safetensors"
    data = path.read_bytes()
    assert damage(data) != data
    path.write_bytes(damage(data))
    digest = hashlib.sha256(damage(data)).hexdigest()
    edit(
        directory / "step-00000008" / "manifest.json",
        lambda t: t["files"]["rank-00001.safetensors"].update(sha256=digest),
    )
    assert "the header of rank-00001.safetensors" in rejected(directory)


def test_one_that_is_asked_for_is_refused_with_the_one_that_works(directory: Path) -> None:
    shard = directory / "step-00000008" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError, match=r"step-00000008: rank-00000.* sha256; use .*00000004, "):
        open_verified(directory / "step-00000008")
    assert (directory / "step-00000008").exists()
    (directory / "step-00000004" / "manifest.json").unlink()
    with pytest.raises(DamagedError, match="no other beside it is intact"):
        open_verified(directory / "step-00000008")


def test_one_that_was_copied_away_is_taken_under_any_name_but_that_of_another_step(
    directory: Path,
) -> None:
    (directory / "step-00000008").rename(directory / "my best")
    with open_verified(directory / "my best") as found:
        assert found.step == 8
    (directory / "my best").rename(directory / "step-00000009")
    with pytest.raises(DamagedError, match="is of step 8"):
        open_verified(directory / "step-00000009")
