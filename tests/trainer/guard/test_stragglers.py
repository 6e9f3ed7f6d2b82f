"""A slow rank is named with its cause within twenty steps; noise and waiting name nobody."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corruption_jobs import train_injured
from test_corruption import small

from phalanx.core.layout import Layout
from phalanx.oracle.pool import RankPool
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.guard.stragglers import EVERY, OwnTime, StragglerJudge, typical
from phalanx.trainer.run import session
from phalanx.trainer.run.events import read_events

STEP = 0.1
Slow = Callable[[int, int, OwnTime], OwnTime]  # rank, step, its time


def steps_of(
    layout: Layout, steps: int, slow: Slow, noise: float = 0.0, seed: int = 0
) -> list[tuple[int, str, int]]:
    """Who is named, with the cause, after which step; stages have other work than each other."""
    judge, rng = StragglerJudge(layout), np.random.default_rng(seed)
    found, window = [], []
    for step in range(steps):
        rows = []
        for rank in range(layout.ranks):
            work = STEP * (0.6 + 0.2 * layout.coordinates(rank).pp)
            compute, data, link = (t * (1 + noise * rng.normal()) for t in (work, 0.001, 0.002))
            rows.append(slow(rank, step, OwnTime(compute, data, link, 0.0)))
        longest = max(sum(row) for row in rows)  # all wait for the slowest
        window.append([row._replace(step=longest) for row in rows])
        if len(window) == EVERY:
            table = [typical([rows[rank] for rows in window]) for rank in range(layout.ranks)]
            found += [(s.rank, s.cause, step + 1) for s in judge.judge(table)]
            window.clear()
    return found


def nobody(rank: int, step: int, row: OwnTime) -> OwnTime:
    return row


def slowed(rank: int, cause: str, share: float, since: int) -> Slow:
    """From some step on a rank takes longer for one thing, by a share of a step."""

    def slow(other: int, step: int, row: OwnTime) -> OwnTime:
        if other != rank or step < since:
            return row
        return row._replace(**{cause: getattr(row, cause) + share * STEP})

    return slow


LINES = ("dp=2", "dp=4", "tp=2 pp=2", "dp=8 pp=4", "pp=4")


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("cause", ["compute", "data", "link"])
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("since", [30, 33])
def test_the_right_rank_and_cause_are_named_within_twenty_steps(
    line: str, cause: str, share: float, since: int
) -> None:
    layout = Layout.parse(line)
    rank = layout.ranks - 1
    ((named, why, after),) = steps_of(layout, 60, slowed(rank, cause, share, since))
    assert (named, why) == (rank, cause)
    assert after - since <= 20


@pytest.mark.parametrize("line", LINES)
def test_noise_of_five_percent_names_nobody_in_ten_thousand_steps(line: str) -> None:
    layout = Layout.parse(line)
    steps = 10_000 if layout.ranks < 8 else 2_000
    assert steps_of(layout, steps, nobody, noise=0.05) == []


def test_a_delay_in_noise_is_named_too() -> None:
    found = steps_of(Layout(dp=4), 60, slowed(2, "compute", 0.3, 20), noise=0.05)
    assert [(rank, cause) for rank, cause, _ in found] == [(2, "compute")]


def test_one_that_keeps_up_again_can_be_named_again() -> None:
    def slow(rank: int, step: int, row: OwnTime) -> OwnTime:
        on = rank == 1 and (20 <= step < 50 or step >= 80)
        return row._replace(compute=row.compute + 0.05) if on else row

    assert [step for _, _, step in steps_of(Layout(dp=4), 120, slow)] == [35, 95]


def test_a_hiccup_of_one_step_names_nobody() -> None:
    def slow(rank: int, step: int, row: OwnTime) -> OwnTime:
        return row._replace(compute=row.compute + 5.0) if step % EVERY == rank == 1 else row

    assert steps_of(Layout(dp=4), 100, slow) == []


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    return path


@pytest.mark.ranks
@pytest.mark.skipif(session.num_cores() < 2, reason="ranks that share a core are not compared")
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(point="step.before", action="sleep", value=0.1, rank=1, times=99), "compute"),
        (
            Fault(
                point="message",
                purpose="gradients",
                action="sleep",
                value=0.1,
                rank=1,
                times=999,
            ),
            "link",
        ),
    ],
    ids=["compute", "link"],
)
@pytest.mark.parametrize("policy", ["tell", "stop"])
def test_a_rank_that_sleeps_is_named_in_a_run_and_the_policy_is_followed(
    ranks: RankPool, tmp_path: Path, text: Path, fault: Fault, cause: str, policy: str
) -> None:
    run = small(text, "dp=2", steps=20, straggler=policy, checkpoint_every=0)
    run = replace(run, model=replace(run.model, layers=1))
    codes = ranks.run(2, train_injured, run, tmp_path, FaultPlan((fault,)))
    found = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "straggler"]
    assert (found[0]["rank"], found[0]["data"]["cause"], found[0]["step"]) == (1, cause, 15)
    assert codes == ([75, 75] if policy == "stop" else [0, 0])
    assert (tmp_path / "checkpoints" / f"step-000000{15 if policy == 'stop' else 20}").exists()
