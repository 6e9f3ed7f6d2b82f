"""Every way into a checkpoint reads all of it before a tensor is used, and names one that works."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_jobs import small_run, train_job

from phalanx.cli.main import main
from phalanx.core.errors import CheckpointError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.run.continuity import Resume

pytestmark = pytest.mark.ranks


def flip_a_bit(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def zero_four_kilobytes(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-6000:-1904] = bytes(4096)
    shard.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """What a run trains that has checkpoints of steps 2 and 4, in `tmp_path/run`."""
    text = tmp_path / "book.txt"
    text.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    small = small_run(text)
    recipe = replace(small.recipe, checkpoint_every=2, stop_at=4)
    return replace(small, layout=Layout.parse("dp=2"), recipe=recipe)


@pytest.mark.parametrize("damage", [flip_a_bit, zero_four_kilobytes])
def test_a_damaged_checkpoint_is_refused_by_every_way_in(
    ranks: RankPool,
    tmp_path: Path,
    run: Run,
    damage: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "run"
    home.mkdir()
    ranks.run(2, train_job, run, home)
    path = home / "checkpoints" / "step-00000004"
    damage(path / "rank-00001.safetensors")
    refused = rf"{path}: rank-00001.* does not match its sha256; use .*step-00000002, which is"
    for may_differ in (False, True):  # --resume PATH, --from PATH
        (tmp_path / "new").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=refused):
            ranks.run(2, train_job, run, tmp_path / "new", Resume(str(path), may_differ))
        assert not (tmp_path / "new" / "metrics.jsonl").exists()
    assert main(["convert", str(path), str(tmp_path / "out")]) == 1
    assert "step-00000002, which is intact" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    longer = replace(run, recipe=replace(run.recipe, stop_at=5))
    resumed = ranks.run(2, train_job, longer, home, Resume(str(home)))[0]  # of a run: as auto
    assert len(resumed.losses) == 3
