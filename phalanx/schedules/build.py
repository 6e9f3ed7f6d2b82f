"""The schedules by name: the one door through which the planner and the trainer get theirs."""

from collections.abc import Callable

from phalanx.core.errors import RefusedError, UsageError, unknown
from phalanx.core.layout import Layout
from phalanx.core.schedule import Schedule
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.dualpipe import dualpipe, dualpipev
from phalanx.schedules.file import schedule_to_train
from phalanx.schedules.forward_only import forward_only as forward_rows
from phalanx.schedules.gpipe import gpipe
from phalanx.schedules.interleaved import interleaved
from phalanx.schedules.lower import add_reductions, add_transfers
from phalanx.schedules.one_f_one_b import one_f_one_b
from phalanx.schedules.pipedream import pipedream
from phalanx.schedules.placement import Placement, looped
from phalanx.schedules.zero_bubble import zb_h1, zb_h2, zb_v

# The schedules of a fixed number of stages per rank; `interleaved` is the one that leaves it open.
ONE_STAGE: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "pipedream": pipedream,
}
TWO_STAGES: dict[str, Callable[[int, int], Schedule]] = {
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}
# All that can be drawn and priced; `trainer/run/limits.py` names those that the trainer obeys.
MOST_PASSES = 10_000_000  # of gigabytes; a step of more is priced by its period
NAMES = (*ONE_STAGE, "interleaved", *TWO_STAGES)


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Build the schedule `name` for `m` micro-batches over `p` ranks with `v` stages each.

    Args:
        name: one of `NAMES`.
        p: pipeline ranks.
        m: micro-batches per step.
        v: stages per rank; None means as few as the schedule can have.

    Raises:
        UsageError: nobody knows the name, or a size is below 1.
        RefusedError: the schedule cannot be had in these sizes.
    """
    if name not in NAMES:
        raise unknown("schedule", name, NAMES)
    least = 1 if name in ONE_STAGE else 2
    v = least if v is None else v
    _require_positive(p, m, v)
    if p * m * v > MOST_PASSES:
        raise UsageError(
            f"p={p} m={m} v={v} are {p * m * v:.3g} passes through a stage; a schedule that is "
            f"written out has at most {MOST_PASSES:,}"
        )
    if name == "interleaved":
        return interleaved(p, m, v)
    if v != least:
        raise RefusedError(
            f"{name} has {least} stage{'s' * (least > 1)} per rank, not v={v}; "
            f"v can be {least}, or use schedule interleaved"
        )
    return (ONE_STAGE | TWO_STAGES)[name](p, m)


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Build the rows of an evaluation: forwards only, in any sizes.

    Raises:
        UsageError: a size is below 1.
    """
    _require_positive(p, m, v)
    return forward_rows(looped(p, v), m)


def lowered(layout: Layout, m: int, reduce_every: bool) -> Schedule:
    """Build what the trainer obeys: the layout's schedule with messages and reductions, checked.

    Args:
        layout: names the schedule, the ranks and the chunks.
        m: micro-batches per step.
        reduce_every: reduce gradients in every backward, not only in the last of each stage.

    Raises:
        RefusedError: the schedule cannot be had in these sizes.
    """
    schedule = add_reductions(add_transfers(_of_layout(layout, m)), every=reduce_every)
    check_lowered(schedule)
    return schedule


def _of_layout(layout: Layout, m: int) -> Schedule:
    if layout.schedule.endswith(".csv"):
        return schedule_to_train(layout, m)
    chunks = 2 if layout.schedule in TWO_STAGES else layout.chunks
    return build(layout.schedule, layout.pp, m, chunks)


def lowered_forward_only(where: Placement, m: int) -> Schedule:
    """Build what an evaluation obeys: forwards with their messages, checked."""
    schedule = add_transfers(forward_rows(where, m))
    check_lowered(schedule, trains=False)
    return schedule


def _require_positive(p: int, m: int, v: int) -> None:
    for name, size in (("p", p), ("m", m), ("v", v)):
        if size < 1:
            raise UsageError(f"{name}={size}; a schedule needs {name} of at least 1")
