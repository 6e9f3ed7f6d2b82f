"""Says why: what makes one layout slower than another, what refuses one, and what would fix it."""

from collections.abc import Iterator
from dataclasses import replace
from math import log
from typing import NamedTuple

from phalanx.core.errors import RefusedError, divisors
from phalanx.core.estimate import Estimate
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.recompute import FULL, MODES
from phalanx.core.units import show_bytes, show_seconds
from phalanx.planner.estimate import estimate
from phalanx.planner.sweep import Request
from phalanx.schedules.layouts import chunks, spec_of

NAMED = 3  # terms that a reason names
TELLING = 0.005  # share of a step below which a term is not worth a word


class Difference(NamedTuple):
    """How much longer one term lasts in one layout than in another."""

    name: str
    seconds: float

    def __str__(self) -> str:
        """As a reason says it: `+0.42 s tensor axis`."""
        return f"{show_signed(self.seconds)} {self.name}"


class Fix(NamedTuple):
    """A change that makes a layout fit.

    Attributes:
        changes: what has to be set, as in a layout line.
        estimate: the price after it.
    """

    changes: str
    estimate: Estimate


def differences(other: Estimate, base: Estimate) -> list[Difference]:
    """What one layout spends more than another, term by term, largest first; they add up exactly.

    Args:
        other: the layout that is asked about.
        base: the one that it is compared with; terms that only one has count as 0 in the other.
    """
    ours = {term.name: term.seconds for term in other.step.children}
    theirs = {term.name: term.seconds for term in base.step.children}
    names = dict.fromkeys((*theirs, *ours))
    found = [Difference(name, ours.get(name, 0.0) - theirs.get(name, 0.0)) for name in names]
    return sorted(found, key=lambda difference: -abs(difference.seconds))


def why_slower(other: Estimate, base: Estimate) -> tuple[str, ...]:
    """The largest differences of a layout from a better one, in words, at most three.

    Args:
        other: the layout that is asked about.
        base: the better one; a term that differs by less than 0.5 % of its step is not named.
    """
    least = TELLING * base.step_seconds
    telling = [d for d in differences(other, base) if abs(d.seconds) >= least]
    if not telling:
        return ("no different within 0.5 %",)
    return tuple(str(difference) for difference in telling[:NAMED])


def why_not_faster(found: Estimate) -> tuple[str, ...]:
    """What a layout spends most on beside arithmetic at the peak rate, in words."""
    least = TELLING * found.step_seconds
    spent = [
        (leaf.seconds, leaf.name if leaf is term else f"{term.name} {leaf.name}")
        for term in found.step.children
        for leaf in term.leaves()
        if leaf.name != "at the peak" and leaf.seconds >= least
    ]
    return tuple(
        f"{show_seconds(time)} {name}" for time, name in sorted(spent, reverse=True)[:NAMED]
    )


def show_signed(seconds: float) -> str:
    """A difference of durations: `+0.42 s`."""
    return ("+" if seconds >= 0 else "-") + show_seconds(abs(seconds))


def shortage(found: Estimate, *, binary: bool = False) -> str:
    """By how much a layout does not fit, and what fills the memory of its worst rank, in one line.

    Args:
        found: an estimate whose worst rank is over the capacity.
        binary: print GiB rather than GB.
    """
    worst = found.worst_rank
    sizes = sorted(worst.by_class, key=lambda part: -part[1])[:NAMED]
    parts = ", ".join(f"{name} {show_bytes(size, binary=binary)}" for name, size in sizes)
    return (
        f"pipeline rank {worst.stage} needs {show_bytes(worst.total, binary=binary)} of "
        f"{show_bytes(found.capacity, binary=binary)}, "
        f"{show_bytes(worst.total - found.capacity, binary=binary)} too much: {parts}"
    )


def suggest_fix(request: Request, layout: Layout) -> Fix | None:
    """The smallest change that makes a layout fit, and of those the fastest.

    One key that leaves the mesh as it is; two of them, or ranks moved from dp to another axis;
    ranks moved, and one more key.

    Args:
        request: model, devices, sequence, batch and program.
        layout: the one that does not fit.

    Returns:
        None where no such change makes it fit.
    """
    one = list(_on_each_rank(layout))
    moved = list(_between_axes(layout))
    two = [twice for once in one for twice in _on_each_rank(once)]
    three = [twice for once in moved for twice in _on_each_rank(once)]
    for changes in (one, two + moved, three):
        fitting = [
            found for change in dict.fromkeys(changes) if (found := _try(request, layout, change))
        ]
        if fitting:
            return min(fitting, key=lambda fix: fix.estimate.step_seconds)
    return None


def _try(request: Request, layout: Layout, changed: Layout) -> Fix | None:
    shape, cluster, seq, batch = request.shape, request.cluster, request.seq, request.batch
    try:
        found = estimate(shape, cluster, changed, seq, batch, request.framework)
    except RefusedError:
        return None
    return Fix(_changes(layout, changed), found) if found.fits else None


def _changes(before: Layout, after: Layout) -> str:
    """The keys that differ, with their new values."""
    keys = [word.split("=") for word in str(after).split()]
    old = dict(word.split("=") for word in str(before).split())
    changed = [f"{key}={value}" for key, value in keys if old.get(key) != value]
    gone = [key for key in old if key not in dict(keys)]
    return " ".join(changed + [f"{key}={_shown(getattr(after, key))}" for key in gone])


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _on_each_rank(layout: Layout) -> Iterator[Layout]:
    """One other value of a key that leaves the mesh as it is."""
    mode = layout.recompute
    stronger = MODES[MODES.index(mode) + 1 :] if mode in MODES else (FULL,)
    for mode in stronger:
        yield replace(layout, recompute=mode)
    for zero in range(layout.zero_stage + 1, 4):
        yield replace(layout, zero=zero, shard=0)
    if layout.shards < layout.dp:
        yield replace(layout, shard=0)
    for mb in divisors(layout.mb)[:-1]:
        yield replace(layout, mb=mb)
    if layout.tp > 1 and not layout.sequence_parallel:
        yield replace(layout, sp=None)
    if layout.stages:
        return
    if layout.schedule != DEFAULT_SCHEDULE:
        yield replace(layout, schedule=DEFAULT_SCHEDULE, v=0)
    for v in range(spec_of(layout).chunks.least, chunks(layout)):
        yield replace(layout, v=v)


def _between_axes(layout: Layout) -> Iterator[Layout]:
    """Some ranks of dp on another axis."""
    for factor in divisors(layout.dp)[1:]:
        dp = layout.dp // factor
        for key in ("tp", "pp", "cp"):
            degree = getattr(layout, key) * factor
            yield replace(layout, **{"dp": dp, "shard": 0, "stages": (), key: degree})


def nearest_mesh(layout: Layout, devices: int) -> Layout:
    """The layout for so many devices whose degrees are least multiplied or divided.

    Of the degrees of dp, pp and tp the sum of |log(new / old)| is least. cp stays, or is 1 where
    it does not divide the devices. Nothing but these four is taken over.

    Args:
        layout: whose degrees are asked for.
        devices: how many there are, at least 1.

    Example:
        >>> str(nearest_mesh(Layout(dp=8, tp=8), 96))
        'dp=12 pp=1 tp=8'
    """
    cp = layout.cp if devices % layout.cp == 0 else 1

    def distance(degrees: tuple[int, int, int]) -> float:
        asked = (layout.dp, layout.pp, layout.tp)
        return sum(abs(log(new / old)) for new, old in zip(degrees, asked, strict=True))

    meshes = [
        (devices // cp // pp // tp, pp, tp)
        for pp in divisors(devices // cp)
        for tp in divisors(devices // cp // pp)
    ]
    dp, pp, tp = min(meshes, key=distance)
    return Layout(dp=dp, pp=pp, tp=tp, cp=cp)
