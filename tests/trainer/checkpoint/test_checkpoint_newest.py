"""Which checkpoint is trusted, which are set aside, and which are kept."""

import json
import random
import shutil

import pytest
import torch
from checkpoint_ranks import make_savers, reseal, save_all, split_evenly

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint import newest
from phalanx.trainer.checkpoint.check import verify
from phalanx.trainer.checkpoint.manifest import DamagedError, Manifest

RANKS = split_evenly(
    {("w", field): torch.linspace(-1, 1, 60).reshape(6, 10) for field in ("weight", "exp_avg")}, 3
)


@pytest.fixture
def directory(tmp_path):
    """Two checkpoints, of steps 1 and 2."""
    savers = make_savers(tmp_path, 3)
    for step in (1, 2):
        save_all(savers, step, RANKS)
    return tmp_path


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def found_step(directory, events=None):
    found = newest(directory, pytest.fail if events is None else events.append)
    return None if found is None else found.step


def test_the_newest_is_chosen(directory):
    assert found_step(directory) == 2


def test_steps_are_compared_as_numbers(directory):
    text = (directory / "step-00000002" / "manifest.json").read_bytes()
    old = Manifest.decode(text)
    late = directory / "step-100000000"
    shutil.copytree(directory / "step-00000002", late)
    new = Manifest(100_000_000, {"step": 100_000_000}, old.files, old.stored)
    (late / "manifest.json").write_bytes(new.encode())
    assert found_step(directory) == 100_000_000


def test_a_directory_that_is_missing_or_empty_has_none(tmp_path):
    assert found_step(tmp_path / "nowhere") is None
    assert found_step(tmp_path) is None


def test_every_flipped_bit_is_noticed(directory):
    path, rng = directory / "step-00000002", random.Random(0)
    flips = 0
    for file in sorted(path.iterdir()):
        intact = file.read_bytes()
        for position in rng.sample(range(len(intact) * 8), 150):
            damaged = bytearray(intact)
            damaged[position // 8] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(DamagedError):
                verify(path)
            flips += 1
        file.write_bytes(intact)
    assert flips == 600
    verify(path)


def test_every_byte_of_the_manifest_counts(directory):
    text = (directory / "step-00000002" / "manifest.json").read_bytes()
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 0x20  # turns capitals into small letters, and the space into NUL
        with pytest.raises(DamagedError):
            Manifest.decode(bytes(damaged))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
@pytest.mark.parametrize(
    "damage",
    [flip, truncate, lambda p: p.unlink(), lambda p: p.write_bytes(b""), replace_by_directory],
)
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(directory, name, damage):
    damage(directory / "step-00000002" / name)
    events = []
    assert found_step(directory, events) == 1
    assert names(directory) == ["corrupt-step-00000002", "step-00000001"]
    (event,) = events
    assert event.startswith("step-00000002 is damaged: ")
    assert name in event
    assert event.endswith("; set aside as corrupt-step-00000002")


def test_when_all_are_damaged_there_is_none_and_nothing_is_deleted(directory):
    for step in (1, 2):
        flip(directory / f"step-0000000{step}" / "manifest.json")
    events = []
    assert found_step(directory, events) is None
    assert len(events) == 2
    assert names(directory) == ["corrupt-step-00000001", "corrupt-step-00000002"]


def test_a_second_damaged_one_of_the_same_step_is_set_aside_too(directory):
    for _ in range(2):
        flip(directory / "step-00000002" / "manifest.json")
        found_step(directory, [])
        save_all(make_savers(directory, 3, "b"), 2, RANKS)
    assert names(directory) == [
        "corrupt-step-00000002",
        "corrupt-step-00000002-2",
        "step-00000001",
        "step-00000002",
    ]


def test_a_file_in_the_place_of_a_checkpoint_is_set_aside(directory):
    (directory / "step-00000003").write_text("not a checkpoint")
    assert found_step(directory, []) == 2


def test_a_checkpoint_under_the_name_of_another_step_is_not_trusted(directory):
    (directory / "step-00000002").rename(directory / "step-00000009")
    events = []
    assert found_step(directory, events) == 1
    assert "manifest.json is of step 2" in events[0]


def test_files_that_are_none_of_ours_do_no_harm(directory):
    (directory / "step-00000002" / "notes.txt").write_text("the good one")
    (directory / "README").write_text("runs")
    assert found_step(directory) == 2


def test_a_checkpoint_of_a_later_version_is_an_error_not_damage(directory):
    manifest = directory / "step-00000002" / "manifest.json"
    reseal(manifest, lambda body: body.replace(b'"schema": 1', b'"schema": 2'))
    with pytest.raises(CheckpointError, match="schema 2; this version of Phalanx reads 1"):
        newest(directory, pytest.fail)
    assert "step-00000002" in names(directory)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rank-00001.safetensors"', b'"../../../etc/passwd"'),
        (b'"start": 0', b'"start": 1'),
        (b'"stop": 20', b'"stop": 6000'),
        (b'"pieces"', b'"peaces"'),
        (b'"sizes": [6, 10]', b'"sizes": "six"'),
        (b'"state": {', b'"state": [], "old": {'),
    ],
)
def test_a_manifest_that_makes_no_sense_is_damage(directory, old, new):
    manifest = directory / "step-00000002" / "manifest.json"
    assert old in manifest.read_bytes()
    reseal(manifest, lambda body: body.replace(old, new))
    assert found_step(directory, []) == 1


def test_the_manifest_can_be_read_by_people_and_by_any_json_reader(directory):
    text = (directory / "step-00000002" / "manifest.json").read_text()
    table = json.loads(text)
    assert list(table) == ["schema", "step", "state", "files", "pieces", "sha256"]
    assert len(text.splitlines()) < len(table["pieces"]) + len(table["files"]) + 12


def test_the_last_two_are_kept(directory):
    savers = make_savers(directory, 3, "b")
    for step in (3, 4):
        save_all(savers, step, RANKS)
    assert names(directory) == ["step-00000003", "step-00000004"]


def test_as_many_are_kept_as_one_asks_for(tmp_path):
    for keep in (1, 3):
        savers = make_savers(tmp_path / str(keep), 3, keep=keep)
        for step in range(1, 6):
            save_all(savers, step, RANKS)
        assert names(tmp_path / str(keep)) == [f"step-0000000{s}" for s in range(6 - keep, 6)]


def test_a_damaged_one_does_not_count_among_those_kept(directory):
    flip(directory / "step-00000002" / "rank-00000.safetensors")
    events = []
    save_all(make_savers(directory, 3, "b", on_event=events.append), 3, RANKS)
    assert names(directory) == ["corrupt-step-00000002", "step-00000001", "step-00000003"]
    assert "rank-00000.safetensors does not match its sha256" in events[0]


def test_one_that_is_cut_short_since_it_was_saved_does_not_count_either(tmp_path):
    savers = make_savers(tmp_path, 3)
    for step in (1, 2, 3):
        save_all(savers, step, RANKS)
        if step == 2:
            truncate(tmp_path / "step-00000002" / "rank-00002.safetensors")
    assert names(tmp_path) == ["corrupt-step-00000002", "step-00000001", "step-00000003"]


def test_later_steps_are_left_alone(directory):
    savers = make_savers(directory, 3, "b", keep=1)
    save_all(savers, 1, RANKS)
    assert names(directory) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("options", [{"keep": 0}, {"attempt": "a/b"}, {"attempt": ""}])
def test_impossible_options_are_refused(tmp_path, options):
    with pytest.raises(CheckpointError, match="keep at least 1"):
        make_savers(tmp_path, 1, **options)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save checkpoints in .*file"):
        make_savers(tmp_path / "file" / "checkpoints", 1)
