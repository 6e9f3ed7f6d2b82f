"""A save that is stopped anywhere leaves a checkpoint that can be trusted, and nothing else."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from io import FileIO
from pathlib import Path

import checkpoint_faults
import pytest
import torch
from checkpoint_faults import (
    FullDisk,
    PowerCut,
    TrippingDisk,
    content,
    make_savers,
    pieces,
    save_all,
    start_all,
    told,
)

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint import Saver, newest
from phalanx.trainer.checkpoint.check import verify
from phalanx.trainer.checkpoint.disk import Disk
from phalanx.trainer.checkpoint.names import steps


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def found_value(directory):
    """Which `content` the newest checkpoint holds; none that can be seen may be damaged."""
    for _, path in steps(directory):
        verify(path)
    found = newest(directory, pytest.fail)
    if found is None:
        return None
    with found:
        assert torch.equal(found.tensor("w"), content(found.state["value"]))
        return found.state["value"]


@pytest.fixture
def before(tmp_path):
    """A directory with a checkpoint of step 1."""
    directory = tmp_path / "before"
    assert save_all(make_savers(directory, "a"), 1, 1) == ["", ""]
    return directory


def program(*arguments):
    command = [sys.executable, checkpoint_faults.__file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next step"])
def test_killed_at_any_operation_the_old_or_the_new_one_is_whole(before, tmp_path, step):
    room = tmp_path / "killed"
    killed = program("kill", before, room, step)
    assert len(killed) > 25  # so many operations were there to be killed at
    values = []
    for at in killed:
        directory = room / str(at)
        values.append(found_value(directory))
        assert save_all(make_savers(directory, "c", keep=1), 3, 3) == ["", ""]
        assert names(directory) == ["step-00000003"]
        assert found_value(directory) == 3
    assert values[0] == 1
    assert values[-1] == step
    assert set(values) == {1, step}


def fail():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def savers_on(directory, disks, **options):
    """Savers for a directory that is there already; None if even that fails."""
    try:
        return make_savers(directory, "b", disks, keep=1, **options)
    except CheckpointError:
        return None


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_any_operation_is_told_to_all_ranks_and_nothing_is_left(before, tmp_path, rank):
    told_of_tidying = []
    for at in itertools.count():
        directory = tmp_path / str(at)
        shutil.copytree(before, directory)
        disks = [Disk(), Disk()]
        disks[rank] = tripping = TrippingDisk(at, fail)
        savers = savers_on(directory, disks, on_event=told_of_tidying.append)
        if savers is None:
            assert found_value(directory) == 1
            continue
        messages = save_all(savers, 2, 2)
        if not tripping.tripped:
            break
        assert len(set(messages)) == 1
        if messages[0]:
            assert f"Input/output error; rank {rank} must write" in messages[0]
            assert found_value(directory) == 1
            assert names(directory) == ["step-00000001"]
        else:
            assert rank == 0
            assert "could not tidy" in told_of_tidying.pop()
            assert found_value(directory) == 2
        assert save_all(savers, 3, 3) == ["", ""]
        assert names(directory) == ["step-00000003"]
    assert at > (15 if rank == 0 else 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_told_to_all_ranks_with_path_need_and_cure(before, tmp_path, rank):
    for room in (0, 1, 100, 5000, 10_100, 10_300):
        directory = tmp_path / str(room)
        shutil.copytree(before, directory)
        disks = [Disk(), Disk()]
        disks[rank] = full = FullDisk(room)
        savers = make_savers(directory, "b", disks)
        messages = save_all(savers, 2, 2)
        assert f"cannot save step 2 in {directory}: No space left" in messages[rank]
        assert f"on device; rank {rank} needs 9.875 KiB there and " in messages[rank]
        assert messages[rank].endswith("are free; free some, or move the run to a larger disk")
        assert "\n" not in messages[rank]
        if room > 1000:  # enough to write down why
            assert messages[0] == messages[1]
        else:
            assert "a rank failed and could not write down why" in messages[1 - rank]
        assert names(directory) == ["step-00000001"]
        full.room = 1_000_000
        assert save_all(savers, 2, 2) == ["", ""]
        assert found_value(directory) == 2


class FullDevice(Disk):
    """Writes its shards to a device that the kernel says is full."""

    def create(self, path):
        return FileIO("/dev/full", "w") if path.suffix == ".safetensors" else super().create(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_the_kernel_says_of_a_full_device_is_told(before):
    messages = save_all(make_savers(before, "b", [Disk(), FullDevice()]), 2, 2)
    assert messages[0] == messages[1]
    assert "No space left on device; rank 1 needs 9.875 KiB" in messages[0]
    assert names(before) == ["step-00000001"]


def test_a_limit_on_file_sizes_is_told_with_its_cure(before):
    messages = program("limit", before, "-", 4096)
    assert messages[0] == messages[1]
    assert "File too large; rank " in messages[0]
    assert messages[0].endswith("raise the limit on file sizes (ulimit -f)")
    assert names(before) == ["step-00000001"]


@pytest.mark.parametrize("renames", [False, True], ids=["names kept", "names lost"])
@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next step"])
def test_after_a_power_cut_at_any_operation_the_old_or_the_new_one_is_whole(
    before, tmp_path, step, renames
):
    values = set()
    for at in itertools.count():
        directory = tmp_path / str(at)
        shutil.copytree(before, directory)
        disk = PowerCut(at)
        savers = savers_on(directory, [disk, disk], patience=0.05)
        if savers is not None:
            save_all(savers, step, 2)
        disk.lose(renames=renames)
        values.add(found_value(directory))
        if not disk.tripped:
            break
    assert values == {1, step}
    assert at > 25


def test_what_is_committed_when_rank_0_has_waited_survives_a_power_cut(tmp_path):
    disk = PowerCut(at=1000)
    savers = make_savers(tmp_path, "a", [disk, disk])
    for step in (1, 2, 3):
        assert save_all(savers, step, step) == ["", ""]
        disk.lose(renames=True)
        assert found_value(tmp_path) == step


@pytest.mark.parametrize("newest_is_damaged", [False, True])
def test_at_least_two_verify_wherever_the_power_is_cut(tmp_path, newest_is_damaged):
    """Retention removes nothing that two intact ones do not stand in for."""
    before = tmp_path / "before"
    savers = make_savers(before, "a", keep=3)
    for step in (1, 2, 3):
        assert save_all(savers, step, step) == ["", ""]
    if newest_is_damaged:
        (before / "step-00000003" / "rank-00000.safetensors").write_bytes(b"")
    for at in itertools.count():
        directory = tmp_path / str(at)
        shutil.copytree(before, directory)
        disk = PowerCut(at)
        savers = savers_on(directory, [disk, disk], patience=0.05)
        if savers is not None:
            for saver in savers:
                saver.keep = 2
            save_all(savers, 4, 4)
        disk.lose(renames=True)
        assert sum(is_intact(path) for _, path in steps(directory)) >= 2
        if not disk.tripped:
            break
    assert at > 25


def is_intact(path):
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def test_a_rank_that_comes_after_the_failure_learns_why(before):
    savers = make_savers(before, "b", [TrippingDisk(2, fail), Disk()])
    savers[0].save(2, pieces(2, 0), {})
    while not list(before.glob("*.failed")):
        time.sleep(0.001)
    savers[1].save(2, pieces(2, 1), {})
    messages = [told(saver) for saver in savers]
    assert messages[0] == messages[1]
    assert "Input/output error" in messages[0]
    assert names(before) == ["step-00000001"]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_start_and_save_in_any_order(before, late):
    (before / ".step-00000002.dead-1.partial").mkdir()
    (before / ".step-00000002.dead-1.partial" / "rank-00001.json").write_text("{}")
    early = Saver(before, 1 - late, 2, attempt="b")
    early.save(2, pieces(2, 1 - late), {"value": 2})
    time.sleep(0.05)
    saver = Saver(before, late, 2, attempt="b")
    saver.save(2, pieces(2, late), {"value": 2})
    assert [told(saver), told(early)] == ["", ""]
    assert names(before) == ["step-00000001", "step-00000002"]
    assert found_value(before) == 2


def test_a_rank_that_never_comes_is_named_when_patience_ends(before):
    savers = make_savers(before, "b", patience=0.1)
    savers[0].save(2, pieces(2, 0), {})
    message = told(savers[0])
    assert "no part from rank 1 after 0.1 s; see whether that rank lives" in message
    assert found_value(before) == 1
    make_savers(before, "c")
    assert names(before) == ["step-00000001"]


def test_a_rank_without_word_from_rank_0_says_so_and_harms_nothing(before):
    savers = make_savers(before, "b", patience=0.1)
    savers[1].save(2, pieces(2, 1), {})
    assert "no word from rank 0 after 0.1 s" in told(savers[1])
    savers[0].save(2, pieces(2, 0), {"value": 2})
    assert told(savers[0]) == ""
    assert found_value(before) == 2


def test_a_failure_is_noted_with_its_reason_and_the_next_save_goes_on(before):
    savers = make_savers(before, "b", [Disk(), TrippingDisk(2, fail)])
    assert [saver.failed for saver in savers] == [0, 0]
    for step in (2, 3):
        start_all(savers, step, step)
    for saver in savers:
        saver.join()
        assert (saver.failed, saver.spoiled, saver.step_of(1)) == (1, 0, 2)
        assert "cannot save step 2" in saver.reason(1)
        assert "Input/output error" in saver.reason(1)
        saver.wait()
    assert names(before) == ["step-00000001", "step-00000003"]
    assert found_value(before) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_is_not_finite_is_no_checkpoint_and_pushes_none_out(before, rank, bad):
    savers = make_savers(before, "b", finite=True, keep=1)
    spoiled = [pieces(2, 0), pieces(2, 1)]
    spoiled[rank][0].data[7] = bad
    for saver, mine in zip(savers, spoiled, strict=True):
        saver.save(2, mine, {})
    for saver in savers:
        saver.join()
    assert [saver.failed for saver in savers] == [1, 1]
    assert [saver.spoiled for saver in savers] == [1 - rank, rank]
    reason = f"cannot save step 2 in {before}: 1 value is nan or infinite in weight of w, on rank "
    assert {saver.reason(1) for saver in savers} == {f"{reason}{rank}"}
    assert names(before) == ["step-00000001"]
    assert found_value(before) == 1


def test_what_is_saved_again_is_equal_or_refused(before):
    for value, message in ((1, ""), (2, "is there already, with other values, and a checkpoint")):
        messages = save_all(make_savers(before, "b"), 1, value)
        assert all(message in told for told in messages)
        assert all(bool(told) == bool(message) for told in messages)
        assert names(before) == ["step-00000001"]
        assert found_value(before) == 1


def test_what_is_saved_again_takes_the_place_of_one_that_is_damaged(before):
    (before / "step-00000001" / "rank-00000.safetensors").write_bytes(b"")
    events = []
    assert save_all(make_savers(before, "b", on_event=events.append), 1, 2) == ["", ""]
    assert names(before) == ["corrupt-step-00000001", "step-00000001"]
    assert found_value(before) == 2
    assert "set aside" in events[0]


def test_an_error_that_nobody_expects_is_told_as_well(before):
    def surprise():
        raise RuntimeError("out of\nmemory")

    messages = save_all(make_savers(before, "b", [Disk(), TrippingDisk(2, surprise)]), 2, 2)
    assert messages[0] == messages[1]
    assert messages[0].endswith("rank 1: RuntimeError: out of memory")
    assert names(before) == ["step-00000001"]
