"""The fault tests are tested too: take out one safeguard of a save, and a named one turns red."""

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import test_checkpoint_faults as tests

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.agreement import Save
from phalanx.trainer.checkpoint.check import set_aside
from phalanx.trainer.checkpoint.commit import commit
from phalanx.trainer.checkpoint.disk import write_file
from phalanx.trainer.checkpoint.retention import prune
from phalanx.trainer.checkpoint.saver import Saver

before = tests.before
RED = (AssertionError, CheckpointError, pytest.fail.Exception)
POWER_CUT = tests.test_after_a_power_cut_at_any_operation_the_old_or_the_new_one_is_whole

# what is taken out of which function, and the test that must notice
SAFEGUARDS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "fsync of what is in a file": (
        *(write_file, "disk.sync(file)"),
        partial(POWER_CUT, step=2, renames=False),
    ),
    "fsync of the names of files": (
        *(commit, "disk.sync_directory(save.partial)"),
        partial(POWER_CUT, step=2, renames=False),
    ),
    "fsync of the name of what is committed": (
        *(Saver._tidy, "save.disk.sync_directory(save.directory)"),
        lambda before, tmp_path: (
            tests.test_what_is_committed_when_rank_0_has_waited_survives_a_power_cut(tmp_path)
        ),
    ),
    "fsync before anything is deleted": (
        *(Save.discard, "self.disk.sync_directory(self.directory)"),
        partial(POWER_CUT, step=2, renames=True),
    ),
    "quarantine": (
        *(set_aside, "path.rename(aside)"),
        lambda before, tmp_path: (
            tests.test_what_is_saved_again_takes_the_place_of_one_that_is_damaged(before)
        ),
    ),
    "verification before others are removed": (
        *(prune, "verify(path, hashes=path not in trusted)"),
        lambda before, tmp_path: tests.test_at_least_two_verify_wherever_the_power_is_cut(
            tmp_path, newest_is_damaged=True
        ),
    ),
}


def take_out(monkeypatch: pytest.MonkeyPatch, function: FunctionType, line: str) -> None:
    """Let a function do without one of its lines, for whoever calls it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1
    known = dict(function.__globals__)
    exec(compile(source.replace(line, "pass"), function.__code__.co_filename, "exec"), known)
    monkeypatch.setattr(function, "__code__", known[function.__name__].__code__)


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_without_it_a_test_fails(name, before, tmp_path, monkeypatch):
    function, line, noticed = SAFEGUARDS[name]
    take_out(monkeypatch, function, line)
    room = tmp_path / "room"
    room.mkdir()
    with pytest.raises(RED):
        noticed(before=before, tmp_path=room)
