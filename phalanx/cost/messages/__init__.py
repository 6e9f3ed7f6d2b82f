"""Messages made once: what every rank sends in a step, kind by kind, for a table of layouts.

Each axis yields its messages (`data`, `tensor`, `context`, `pipeline`, `expert`, `precision`):
collective, bytes, times, the pass and the unit that sends them, and what may hide them. Whatever
else is said about messages is a fold over this list: the ledger that a run is held against
(`rank_messages`), the seconds of an estimate and of a search. What another program sends instead
is a transformation of it, see `frameworks`.
"""

from collections.abc import Container, Iterable, Iterator

import numpy as np

from phalanx.core.layout import Coordinates
from phalanx.core.message import Message
from phalanx.core.operator import ModelOperators
from phalanx.core.operators import describe
from phalanx.core.run import Run
from phalanx.cost.holdings import Holdings, holdings
from phalanx.cost.messages import context, data, expert, pipeline, precision, tensor
from phalanx.cost.messages.unit import Setting, UnitMessage
from phalanx.cost.precision import element_bytes
from phalanx.cost.table import Integers, Table

AXES = {
    "data": data,
    "tensor": tensor,
    "context": context,
    "pipeline": pipeline,
    "expert": expert,
    "precision": precision,
}
ALL = (*AXES, "world")
FIRST = Coordinates(0, 0, 0, 0)


def setting(
    table: Table,
    at: Coordinates = FIRST,
    model: ModelOperators | None = None,
    held: Holdings | None = None,
) -> Setting:
    """What the messages of a table follow from.

    Args:
        table: the layouts.
        at: the coordinates of the rank that sends; the first along tp and cp has the most.
        model: the operators; by default those of the table's model.
        held: what its pipeline rank holds; by default counted.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.
    """
    element, wide = element_bytes(table.precision)
    held = holdings(table, at.pp) if held is None else held
    return Setting(table, model or describe(table.model), at, held, element, wide)


def messages(where: Setting, axes: Container[str] = ALL) -> list[UnitMessage]:
    """Every kind of message of every kind of unit, but for those that no row sends.

    Args:
        where: the layouts.
        axes: the modules that are asked.

    Returns:
        With columns that broadcast with those of the table.
    """
    found = [sent for name, axis in AXES.items() if name in axes for sent in axis.messages(where)]
    if "world" in axes:
        found += _of_the_world(where)
    return [message for message in found if message.times.any()]


def _of_the_world(where: Setting) -> Iterator[UnitMessage]:
    table = where.table
    ranks = table.dp * table.pp * table.cp * table.tp
    for purpose in ("gradient norm", "loss"):
        yield UnitMessage(
            axis="world",
            among="world",
            collective="all_reduce",
            purpose=purpose,
            bytes=np.full_like(ranks, 8),
            times=np.where(ranks > 1, 1, 0),
            when="step",
            unit="rank",
        )


def times_in_step(message: UnitMessage, held: Holdings, m: Integers) -> Integers:
    """How often a rank sends such messages in a step, all its units and micro-batches together.

    Args:
        message: of each unit.
        held: the units of the rank.
        m: micro-batches of a step, which the copies of the model divide between them.
    """
    count = held.count(message.unit, message.share)
    passes = 1 if message.when == "step" else m // held.copies
    return message.times * count * passes


def rank_messages(run: Run, at: Coordinates) -> list[Message]:
    """What the rank at `at` sends in one optimizer step, equal messages added up.

    Args:
        run: with a precision that is resolved.
        at: coordinates of the rank.

    Returns:
        In a stable order, as the ledger of a run gives them.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.

    Example:
        >>> from phalanx.catalog.load import model
        >>> from phalanx.core.layout import Layout
        >>> layout = Layout(tp=2, precision="bf16")
        >>> sent = rank_messages(Run(model=model("gpt-3-175b"), layout=layout), FIRST)
        >>> {message.axis for message in sent} == {"tensor", "world"}
        True
    """
    table = Table.of_run(run)
    where = setting(table, at)
    return _added_up(messages(where), where.held, table.m)


def _added_up(found: Iterable[UnitMessage], held: Holdings, m: Integers) -> list[Message]:
    totals: dict[Message, int] = {}
    joined: dict[Message, int] = {}
    for each in found:
        times = int(times_in_step(each, held, m).item())
        size = int(np.asarray(each.bytes).item())
        key = Message(each.axis, each.collective, each.purpose, 0 if each.together else size, 0)
        if each.together:
            joined[key] = joined.get(key, 0) + size * times
        elif times:
            totals[key] = totals.get(key, 0) + times
    sent = [key._replace(times=times) for key, times in totals.items()]
    return sorted(
        sent + [key._replace(bytes=size, times=1) for key, size in joined.items() if size]
    )
