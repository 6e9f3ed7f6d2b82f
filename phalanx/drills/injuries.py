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
    "random": "SIGKILL of drawn ranks at drawn instants, as many as --kills says, and in a row",
    "crash": "an exception that nobody foresaw",
    "hang": "a rank that is stopped, one in a loop, one that holds the interpreter",
    "preempt": "SIGTERM to the launcher, SIGUSR1 to one rank; then the run is resumed",
    "corrupt": "a bit of the newest checkpoint flips while nobody trains; then it is resumed",
}
_KILLED_AT = (
    *("start", "step.before", "forward", "reduce", "message", "loss", "step.before_update"),
    *("step.after", "step.told", "validation", "product", "end"),
)
_KILLED_IN_A_SAVE = ("save.begin", "save.copied", "save.write", "save.written")
_KILLED_ON_RANK_0 = ("save.commit", "save.tidy")
_KILLED_IN_A_RESUME = ("resume.before", "resume.after")
_LONG = 3600.0  # seconds: until somebody ends it
_MOST_DELAY = 0.05  # seconds from the beginning of a step to a random kill
_MOST_START = 0.5  # and from that of a start, before anything is built or loaded
_SHARE_OF_STARTS = 0.2  # of random kills; never two in a row, so that the run gets on
_SPREAD = 3  # steps of the window in which a random kill falls
_STEPS_OF_A_KILL = 4  # of the run: about so many are kept up to it


@dataclass(frozen=True)
class Injury:
    """One thing that a drill does to one run.

    Attributes:
        kind: one of `KINDS`.
        fault: what happens, in a word or two.
        where: at which point, and in which step.
        rank: to whom; None where it is the launcher or the disk.
        plan: what the ranks do to themselves.
        kills: where each of several kills comes, one for every start of the run, in the order of
            `plan`; empty where the whole of the plan is one fault.
        corrupts: a bit of the newest checkpoint flips before the run is resumed.
    """

    kind: str
    fault: str
    where: str
    rank: int | None
    plan: tuple[Fault, ...]
    kills: tuple[str, ...] = ()
    corrupts: bool = False

    @property
    def stops(self) -> bool:
        """Whether it asks the run to stop, so that it has to be resumed."""
        return self.kind in ("preempt", "corrupt")


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
            free = point in ("start", "validation", "product", "end")
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
    """As many kills in a row as a run has room for: each meets what the one before has left."""
    most = max(run.recipe.last_step // _STEPS_OF_A_KILL, 1)
    for first in range(0, kills, most):
        count = min(most, kills - first)
        plan: list[Fault] = []
        for attempt in range(count):
            starts = dice.random() < _SHARE_OF_STARTS and not (plan and plan[-1].point == "start")
            make = _kill_of_a_start if starts else _kill_of_a_step
            plan.append(make(run, dice, attempt))
        where = f"{count} instants of one run"
        yield Injury("random", "SIGKILL", where, None, tuple(plan), tuple(map(_instant, plan)))


def _kill_of_a_start(run: Run, dice: random.Random, attempt: int) -> Fault:
    rank, delay = dice.randrange(run.layout.ranks), dice.uniform(0, _MOST_START)
    return Fault(point="start", action="kill later", value=delay, rank=rank, attempt=attempt)


def _kill_of_a_step(run: Run, dice: random.Random, attempt: int) -> Fault:
    """Late enough that the run has saved something new, unless it is the first."""
    least = run.recipe.checkpoint_every + 1 if attempt else 1
    after = min(least + dice.randrange(_SPREAD), max(run.recipe.last_step - 2, 0))
    rank, delay = dice.randrange(run.layout.ranks), dice.uniform(0, _MOST_DELAY)
    return Fault(
        point="step.before",
        action="kill later",
        value=delay,
        rank=rank,
        attempt=attempt,
        after=after,
    )


def _instant(fault: Fault) -> str:
    """Where a random kill comes."""
    begin = f"its step {fault.after}" if fault.point == "step.before" else "it"
    return f"start {fault.attempt}, {float(fault.value) * 1e3:.0f} ms after {begin} began"


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
