"""Where a run starts from: numbers are numbers, names are exact, and no run gets two futures."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from phalanx.cli.origin import Origin, origin_of
from phalanx.cli.train import arguments
from phalanx.core.errors import RefusedError, UsageError
from phalanx.trainer.run.continuity import Resume


def origin(*words: str) -> Origin:
    parser = ArgumentParser()
    arguments(parser)
    return origin_of(parser.parse_args(words))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a" / "checkpoints"
    folder.mkdir(parents=True)
    (folder.parent / "run.toml").touch()
    return folder


def test_the_newest_checkpoint_goes_on_beside_the_one_it_replaced(checkpoints: Path) -> None:
    for name in (
        "step-00000004",
        "step-00000008",
        "step-00000008.replaced",
        "corrupt-step-00000012",
    ):
        (checkpoints / name).mkdir()
    path = checkpoints / "step-00000008"
    found = origin("--resume", str(path))
    assert (found.fresh, found.name, found.resume) == (False, "a", Resume(str(path)))


@pytest.mark.parametrize(
    ("older", "newer"),
    [("step-00000003", "step-00000005"), ("step-99999999", "step-100000000")],
)
def test_an_older_checkpoint_may_not_go_on_beside_a_newer_one(
    checkpoints: Path, older: str, newer: str
) -> None:
    for name in (older, newer):
        (checkpoints / name).mkdir()
    with pytest.raises(RefusedError, match=f"a has gone on to {newer}; .*--from .*{older} --name"):
        origin("--resume", str(checkpoints / older))
    assert origin("--resume", str(checkpoints / newer)).resume == Resume(str(checkpoints / newer))
    apart = origin("--resume", str(checkpoints / older), "--name", "b")
    assert (apart.fresh, apart.name) == (True, "b")


def test_what_is_no_checkpoint_is_said(checkpoints: Path) -> None:
    (checkpoints / "corrupt-step-00000012").mkdir()
    with pytest.raises(UsageError, match="is no checkpoint"):
        origin("--resume", str(checkpoints / "corrupt-step-00000012"))


@pytest.mark.parametrize("part", ["", "checkpoints/step-00000008"])
def test_a_fork_may_differ_and_reads_the_run_file_it_came_from(
    checkpoints: Path, part: str
) -> None:
    (checkpoints / "step-00000008").mkdir()
    path = checkpoints.parent / part
    found = origin("--from", str(path), "--name", "b")
    assert (found.fresh, found.name) == (True, "b")
    assert found.resume == Resume(str(path), may_differ=True)
    assert found.stored == checkpoints.parent / "run.toml"


def test_force_lets_a_resume_differ(checkpoints: Path) -> None:
    runs = ("--runs-dir", str(checkpoints.parents[1]), "--resume", "auto")
    assert origin(*runs).resume == Resume("auto")
    assert origin(*runs, "--force").resume == Resume("auto", may_differ=True)
