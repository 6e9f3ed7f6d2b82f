"""What a drill does to a run: each injury is a plan of faults, and what is done by hand beside it.

Steps, ranks and instants are drawn from a seed, so that a drill can be repeated.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.core.errors import unknown
from phalanx.core.run import Run
from phalanx.trainer.faults.plan import Fault

KINDS: dict[str, str] = {
    "kill": "SIGKILL at every named point, of the first and of the last rank",
    "random": "SIGKILL of a drawn rank at drawn instants, as many as --kills says",
    "crash": "an exception that nobody foresaw",
    "hang": "a rank that is stopped, one in a loop, one that holds the interpreter",
    "preempt": "SIGTERM to the launcher, SIGUSR1 to one rank; then the run is resumed",
    "corrupt": "a bit of the newest checkpoint flips while nobody trains; then it is resumed",
}
_KILLED_AT = (
    *("start", "step.before", "forward", "reduce", "message", "loss", "step.before_update"),
    *("step.after", "step.told", "validation", "end"),
)
_KILLED_IN_A_SAVE = ("save.begin", "save.copied", "save.write", "save.written")
_KILLED_ON_RANK_0 = ("save.commit", "save.tidy")
_KILLED_IN_A_RESUME = ("resume.before", "resume.after")
_LONG = 3600.0  # seconds: until somebody ends it
_MOST_DELAY = 0.2  # seconds from the beginning of a step to a random kill


@dataclass(frozen=True)
class Injury:
    """One thing that a drill does to one run.

    Attributes:
        kind: one of `KINDS`.
        fault: what happens, in a word or two.
        where: at which point, and in which step.
        rank: to whom; None where it is the launcher or the disk.
        plan: what the ranks do to themselves.
        corrupts: a bit of the newest checkpoint flips before the run is resumed.
    """

    kind: str
    fault: str
    where: str
    rank: int | None
    plan: tuple[Fault, ...]
    corrupts: bool = False


def injuries(run: Run, kinds: Sequence[str], kills: int, seed: int) -> list[Injury]:
    """What a drill does to a run.

    Args:
        run: as it is drilled: its last step says how long.
        kinds: some of `KINDS`, or none for all of them.
        kills: how many at random.
        seed: of all that is drawn.

    Raises:
        UsageError: a kind that is not known.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind of fault", kind, KINDS)
    make = {
        "kill": _kills,
        "random": lambda run, dice: _random_kills(run, dice, kills),
        "crash": _crashes,
        "hang": _hangs,
        "preempt": _preemptions,
        "corrupt": _corruptions,
    }
    wanted = [kind for kind in KINDS if not kinds or kind in kinds]
    return [
        injury for kind in wanted for injury in make[kind](run, random.Random(f"{seed} {kind}"))
    ]


def _kills(run: Run, dice: random.Random) -> Iterator[Injury]:
    last, every = run.layout.ranks - 1, run.recipe.checkpoint_every
    saved = 2 * every  # one before it is complete
    ends = sorted({0, last})
    for rank in ends:
        for point in _KILLED_AT:
            free = point in ("start", "validation", "end")
            yield _kill(point, rank, None if free else _step(run, dice))
        for point in _KILLED_IN_A_SAVE:
            yield _kill(point, rank, saved)
    for point in _KILLED_ON_RANK_0:
        yield _kill(point, 0, saved)
    for rank in ends:
        for point in _KILLED_IN_A_RESUME:
            step = min(saved + 1, run.recipe.last_step - 1)
            first = Fault(
                point="step.after", action="signal", value="SIGKILL", step=step, rank=last
            )
            second = Fault(point=point, action="signal", value="SIGKILL", rank=rank, attempt=1)
            yield Injury("kill", "SIGKILL", point, rank, (first, second))


def _kill(point: str, rank: int, step: int | None) -> Injury:
    fault = Fault(point=point, action="signal", value="SIGKILL", rank=rank, step=step)
    return Injury("kill", "SIGKILL", _where(point, step), rank, (fault,))


def _random_kills(run: Run, dice: random.Random, kills: int) -> Iterator[Injury]:
    for _ in range(kills):
        rank, step = dice.randrange(run.layout.ranks), _step(run, dice)
        delay = dice.uniform(0, _MOST_DELAY)
        fault = Fault(point="step.before", action="kill later", value=delay, step=step, rank=rank)
        where = f"{delay * 1e3:.0f} ms after step {step} began"
        yield Injury("random", "SIGKILL", where, rank, (fault,))


def _crashes(run: Run, dice: random.Random) -> Iterator[Injury]:
    rank, step = dice.randrange(run.layout.ranks), _step(run, dice)
    fault = Fault(point="step.before_update", action="exception", step=step, rank=rank)
    yield Injury("crash", "exception", _where("step.before_update", step), rank, (fault,))


def _hangs(run: Run, dice: random.Random) -> Iterator[Injury]:
    actions: tuple[tuple[str, str | float], ...] = (
        ("signal", "SIGSTOP"),
        ("loop", _LONG),
        ("gil", _LONG),
    )
    for action, value in actions:
        rank, step = dice.randrange(run.layout.ranks), _step(run, dice, first=3)
        fault = Fault(point="step.before_update", action=action, value=value, step=step, rank=rank)
        name = str(value) if action == "signal" else action
        yield Injury("hang", name, _where("step.before_update", step), rank, (fault,))


def _preemptions(run: Run, dice: random.Random) -> Iterator[Injury]:
    step, rank = _step(run, dice), dice.randrange(run.layout.ranks)
    to_launcher = Fault(point="step.before", action="launcher", value="SIGTERM", step=step, rank=0)
    to_rank = Fault(point="step.before", action="signal", value="SIGUSR1", step=step, rank=rank)
    passed_on = Fault(point="step.before_update", action="sleep", value=1.0, step=step, rank=0)
    where = _where("step.before", step)
    yield Injury("preempt", "SIGTERM to all", where, None, (to_launcher, passed_on))
    yield Injury("preempt", "SIGUSR1", where, rank, (to_rank,))


def _corruptions(run: Run, dice: random.Random) -> Iterator[Injury]:
    step = max(_step(run, dice), min(2 * run.recipe.checkpoint_every, run.recipe.last_step - 2))
    fault = Fault(point="step.before", action="signal", value="SIGUSR1", step=step, rank=0)
    yield Injury("corrupt", "bit flip", "newest checkpoint", None, (fault,), corrupts=True)


def _step(run: Run, dice: random.Random, first: int = 1) -> int:
    """A step that has others before and behind it."""
    return dice.randrange(first, max(run.recipe.last_step - 1, first + 1))


def _where(point: str, step: int | None) -> str:
    return point if step is None else f"{point}, step {step}"
