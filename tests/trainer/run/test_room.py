"""What cannot have room in memory is refused before it starts, with the bytes and a way out."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.catalog import load
from phalanx.core.errors import RefusedError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.trainer.run.room import free_bytes, least_bytes, ran_out, refuse_too_large
from phalanx.trainer.run.worker import describe

SMALL = Run(model=ModelShape(layers=2, hidden=32, heads=2), recipe=Recipe(seq=32, batch=4))


def test_a_small_run_has_room() -> None:
    room = refuse_too_large(SMALL, 1)
    assert 0 < room.needed < room.free


def test_a_model_of_terabytes_is_refused() -> None:
    run = replace(SMALL, model=load.model("deepseek-v3"))
    with pytest.raises(RefusedError, match=r"at least [\d.]+ TiB of memory for 1 rank, and"):
        refuse_too_large(run, 1)


def test_a_batch_that_no_memory_holds_is_refused_for_what_it_is() -> None:
    run = replace(SMALL, recipe=replace(SMALL.recipe, batch=99_999_999_999_999))
    with pytest.raises(RefusedError, match=r"smaller recipe\.batch than 99,999,999,999,999"):
        refuse_too_large(run, 1)


def test_more_ranks_than_a_machine_can_hold_are_refused() -> None:
    ranks = int(free_bytes() / (64 << 20)) + 1
    run = replace(SMALL, layout=Layout(dp=ranks), recipe=replace(SMALL.recipe, batch=ranks))
    with pytest.raises(RefusedError, match=f"memory for {ranks} ranks on this machine"):
        refuse_too_large(run, ranks)
    assert refuse_too_large(run, 1).needed < free_bytes()  # the others are elsewhere


def test_a_limit_of_the_shell_is_a_limit() -> None:
    program = (
        "import resource; from phalanx.core.run import Run; "
        "from phalanx.trainer.run.room import refuse_too_large; "
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); refuse_too_large(Run(), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "memory for a process (ulimit), and 1 GiB are free" in done.stderr


def test_the_count_is_less_than_what_states_alone_need() -> None:
    """Never more than a run takes: weights, gradients and two moments in fp32, and little else."""
    run = Run(model=ModelShape(layers=4, hidden=256, heads=4), recipe=Recipe(seq=8, batch=1))
    states = 16 * run.model.params()
    assert 0.8 * states < least_bytes(run, 0, "fp32") < 1.3 * states
    shares = [least_bytes(replace(run, layout=Layout(pp=2)), rank, "fp32") for rank in range(2)]
    assert max(shares) < 0.8 * least_bytes(run, 0, "fp32")


def test_a_container_has_less_room_than_its_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_bytes(tmp_path) > 1e8
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert free_bytes(tmp_path) == 2_400_000


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    ],
)
def test_what_means_that_memory_ran_out_is_one_line(error: Exception) -> None:
    line = describe(error)
    assert line is not None
    assert line.startswith("memory ran out (")
    assert "\n" not in line


def test_torch_itself_says_it_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert ran_out(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.EIO, "broken")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert ran_out(error) == ""
