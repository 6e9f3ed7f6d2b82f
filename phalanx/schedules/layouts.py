"""What follows from the schedule that a layout names: chunks, stages, where they live.

A `Layout` keeps what was asked; the planner and the trainer both ask here what that means, so that
they never disagree about it.

Symbols: p pipeline ranks, v chunks of layers per rank.
"""

from phalanx.core.errors import RefusedError
from phalanx.core.layout import Layout
from phalanx.schedules.placement import Placement
from phalanx.schedules.registry import find_schedule
from phalanx.schedules.spec import ScheduleSpec


def spec_of(layout: Layout) -> ScheduleSpec:
    """The schedule that the layout names.

    Raises:
        UsageError: there is none; the message has the nearest names.
    """
    return find_schedule(layout.schedule)


def chunks(layout: Layout) -> int:
    """v: what was asked, or as few as the schedule can have.

    Raises:
        UsageError: there is no such schedule.

    Example:
        >>> chunks(Layout(pp=4)), chunks(Layout(pp=4, schedule="zb-v"))
        (1, 2)
    """
    return layout.v or spec_of(layout).chunks.least


def placement(layout: Layout) -> Placement:
    """The rank of each stage, in every copy of the model that the schedule holds.

    Raises:
        UsageError: there is no such schedule.
    """
    return spec_of(layout).placement(layout.pp, chunks(layout))


def num_stages(layout: Layout) -> int:
    """Slices of layers, p v, in one copy of the model."""
    return layout.pp * chunks(layout)


def enough_micro_batches(layout: Layout, m: int) -> int:
    """The fewest micro-batches that the schedule takes, but at least `m`; a file has its own.

    Args:
        layout: names the schedule and its sizes.
        m: micro-batches that are wanted at least.
    """
    return spec_of(layout).micro_batches(layout.pp).fewest(m)


def is_asynchronous(layout: Layout) -> bool:
    """Whether every micro-batch moves the weights, rather than all of a step together."""
    return spec_of(layout).asynchronous


def reduces_every(layout: Layout) -> bool:
    """Whether the gradients of every micro-batch are reduced by themselves."""
    return layout.zero_stage >= 2 or is_asynchronous(layout)


def layers_of_stages(layout: Layout, layers: int) -> tuple[int, ...]:
    """How many blocks each of the p v stages holds, in order; sums to `layers`.

    Left-over blocks go to the middle stages, since the first also embeds and the last
    also computes the loss.

    Args:
        layout: says the stages, or how many there are.
        layers: blocks of the model.

    Raises:
        RefusedError: the stages named in the layout do not add up, or some would be empty.

    Example:
        >>> layers_of_stages(Layout(pp=4), 30)
        (7, 8, 8, 7)
    """
    n, v = num_stages(layout), chunks(layout)
    if layout.stages:
        _refuse_stages(layout, layers)
        return layout.stages
    if layers < n:
        raise RefusedError(
            f"{layers} layers cannot fill pp={layout.pp} x v={v} = {n} stages; "
            f"pp x v can be at most {layers}"
        )
    return _even(layers, n)


def _refuse_stages(layout: Layout, layers: int) -> None:
    """Raise where stages do not add up; only the first and the last may be empty."""
    stages, n = layout.stages, num_stages(layout)
    inner = min(stages[1:-1], default=1)
    if (len(stages), sum(stages)) != (n, layers) or inner < 1 or min(stages) < 0:
        raise RefusedError(
            f"stages={_join(stages)} is {len(stages)} stages of {sum(stages)} layers; "
            f"pp={layout.pp} v={chunks(layout)} needs {n} stages of {layers}: "
            f"for example {_join(_even(layers, n))}"
        )


def _even(layers: int, stages: int) -> tuple[int, ...]:
    share, left = divmod(layers, stages)
    first = (stages - left) // 2
    return (share,) * first + (share + 1,) * left + (share,) * (stages - first - left)


def _join(values: tuple[int, ...]) -> str:
    return "+".join(str(v) for v in values)
