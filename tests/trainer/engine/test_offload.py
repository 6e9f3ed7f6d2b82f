"""State and activations off the device: really gone from it, the same bits, nothing left behind."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.oracle.verify import default_case
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.offload import HostBuffers, OnDisk
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.state import own_pieces

CPU = torch.device("cpu")
MIB = 1 << 20


def resident_file_pages() -> int:
    """Bytes of files that this process holds in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssFile:\s+(\d+)", status)[1])


def saved_after_two_steps(line: str) -> list[Tensor]:
    run = default_case(Layout.parse(line)).run
    engine = build_engine(run, build_mesh(run.layout, CPU))
    stream = default_case(run.layout).stream()
    for step in range(2):
        train_step(engine, step, stream.batch(step, engine.positions()))
    return [piece.data for piece in own_pieces(engine)]


@pytest.mark.parametrize("offload", ["optimizer", "nvme", "activations+nvme"])
def test_a_checkpoint_holds_the_same_bits_wherever_the_state_lives(offload: str) -> None:
    here = saved_after_two_steps("mb=2 precision=bf16")
    away = saved_after_two_steps(f"mb=2 precision=bf16 offload={offload}")
    assert len(here) == len(away) > 0
    assert all(torch.equal(a, b) for a, b in zip(here, away, strict=True))


def test_pages_that_rest_leave_memory_and_come_back_as_they_were(tmp_path: Path) -> None:
    disk = OnDisk(CPU, str(tmp_path))
    x = disk.zeros(16 * MIB, torch.float32)
    before = resident_file_pages()
    x.fill_(3.0)
    assert resident_file_pages() - before >= 60 * MIB
    disk.rest(x)
    assert resident_file_pages() - before < 4 * MIB
    disk.expect(x)
    assert disk.load(x, torch.bfloat16).sum() == 3.0 * 16 * MIB
    assert resident_file_pages() - before < 4 * MIB


def test_files_have_no_name_that_could_be_left_behind(tmp_path: Path) -> None:
    x = OnDisk(CPU, str(tmp_path)).zeros(MIB, torch.float32)
    x.fill_(1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_full_says_so_before_the_first_step() -> None:
    shm = Path("/dev/shm")
    if not shm.exists():
        pytest.skip("needs a file system in memory, which refuses at once what it cannot hold")
    size = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    with pytest.raises(PhalanxError, match=r"no room for .* in /dev/shm; make room"):
        OnDisk(CPU, str(shm)).zeros(size + MIB, torch.uint8)


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="No such file or directory; name another folder"):
        OnDisk(CPU, str(tmp_path / "none")).zeros(1, torch.float32)


def test_buffers_of_the_host_are_used_again() -> None:
    host = HostBuffers(CPU)
    for value in range(3):
        buffer = host.put(torch.full((1000,), float(value)))
        assert host.memory.owns(buffer)
        assert host.get(buffer).tolist() == [float(value)] * 1000
    assert host.memory.bytes == 4000
