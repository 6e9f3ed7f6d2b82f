"""Part 9: the estimate of the layout that the page shows: seconds as a fall, bytes by rank, messages."""

import math
from collections.abc import Iterator

from phalanx.api.planning import estimate
from phalanx.core.errors import PhalanxError
from phalanx.core.estimate import Estimate, RankBytes, Term
from phalanx.explore.asked import batch_of, cluster_of, layout_of, shape_of
from phalanx.explore.draw import Bar, BarPiece, bars, legend
from phalanx.explore.records import Panel, Picture, Record, number, show, word
from phalanx.explore.state import Reading

SOURCE = "phalanx estimate"
SMALL = 0.002  # share of a step that is not worth a row
SHOWN_RANKS = 8
AXES = {
    "data": "data",
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "context",
    "expert": "expert",
}
NUMBERS = (
    "step",
    "low",
    "high",
    "mfu",
    "hfu",
    "rate",
    "bubble",
    "peak",
    "capacity",
    "micro",
    "batch",
    "chips",
)


def ours(state: Reading) -> Panel:
    """What our planner says about this layout.

    Args:
        state: what is read.
    """
    try:
        return _priced(state)
    except PhalanxError as error:
        why = str(error)
        records = [Record(f"est.{name}", None, "—", verdict="bad", reason=why) for name in NUMBERS]
        records += [
            Record(f"est.{name}", "cannot be", "cannot be", verdict="bad", reason=why)
            for name in ("fits", "layout", "model")
        ]
        pictures = [
            Picture(f"est.{name}", why, "", ("",), [(why,)])
            for name in ("fall", "memory", "messages")
        ]
        return Panel(tuple(records), tuple(pictures))


def _priced(state: Reading) -> Panel:
    shape, cluster, layout = shape_of(state), cluster_of(state), layout_of(state)
    batch, seq = batch_of(state), state.whole("seq")
    found = estimate(shape, cluster, layout, batch=batch, seq=seq)
    low, high = found.between()
    text = "fits" if found.fits else "does not fit"
    worst = found.worst_rank
    records = (
        word("est.model", shape.name, reason=f"{shape.name} ({show(shape.params(), 'params')} parameters)"),
        word("est.layout", str(found.layout), reason=str(found.layout), source="phalanx help layout"),
        number("est.chips", cluster.count, "chips", formula="DP · TP · PP · CP"),
        number("est.step", found.step_seconds, "s", formula="sum of the terms below", source=SOURCE),
        number("est.low", low, "s", formula="80 % interval, from published runs", source=SOURCE),
        number("est.high", high, "s", formula="80 % interval, from published runs", source=SOURCE),
        number("est.mfu", found.mfu, "share", formula=found.convention, source=SOURCE),
        number("est.hfu", found.hfu, "share", formula=found.convention, source=SOURCE),
        number("est.rate", found.tokens_per_second, "", formula="tokens / step", source=SOURCE),
        number("est.bubble", found.bubble, "share", formula="idle time in the pipeline of the slowest rank", source=SOURCE),
        number("est.peak", found.peak_bytes, "bytes", formula="worst moment of the worst rank",
               numbers=f"rank {worst.stage} at its {worst.moment}", source=SOURCE),
        number("est.capacity", found.capacity, "bytes", source=SOURCE),
        number("est.micro", found.micro_batches, "micro-batches", source=SOURCE),
        number("est.batch", batch, "sequences", formula="B / seq, rounded to what DP · mb can share"),
        Record("est.fits", text, text, verdict="good" if found.fits else "bad",
               reason=f"rank {worst.stage} needs {show(found.peak_bytes, 'bytes')} of {show(found.capacity, 'bytes')}, at its {worst.moment}"),
    )  # fmt: skip
    return Panel(records, (_fall(found), _memory(found), _messages(found)))


def _leaves(step: Term) -> Iterator[tuple[str, Term]]:
    """The leaves with their names, those at the peak first, as the terminal shows them."""
    named = [
        (leaf.name if leaf is term else f"{term.name}: {leaf.name}", leaf)
        for term in step.children
        for leaf in term.leaves()
    ]
    return iter(sorted(named, key=lambda pair: not pair[0].endswith("at the peak")))


def _colour(name: str) -> str:
    axis = next((axis for axis in AXES if name.startswith(axis) or f"{axis} axis" in name), "")
    if axis:
        return AXES[axis]
    if "ZeRO" in name:
        return "data"
    return "compute" if name.endswith("at the peak") else "below"


def _fall(found: Estimate) -> Picture:
    """One bar for each term, beginning where the one before ended."""
    whole, begun = found.step_seconds, 0.0
    rows, table = [], []
    for name, leaf in _leaves(found.step):
        if leaf.seconds >= SMALL * whole:
            pieces = [
                BarPiece(begun / whole, "none"),
                BarPiece(leaf.seconds / whole, _colour(name), leaf.reason),
            ]
            rows.append(Bar(name, pieces, show(leaf.seconds, "s")))
            worth = "" if math.isnan(leaf.worth) else show(leaf.worth, "s")
            table.append(
                (name, show(leaf.seconds, "s"), f"{leaf.seconds / whole:.1%}", worth, leaf.reason)
            )
        begun += leaf.seconds
    rows.append(Bar("step", [BarPiece(1.0, "network")], show(whole, "s")))
    keys = [("arithmetic at the peak", "compute"), ("lost below it", "below")]
    keys += [(f"{axis} axis", colour) for axis, colour in AXES.items()]
    label = f"where the {show(whole, 's')} of a step go"
    return Picture("est.fall", label, bars(rows) + legend(keys),
                   ("term", "seconds", "share", "worth", "reason"), table)  # fmt: skip


def _shown(found: Estimate) -> list[RankBytes]:
    if len(found.ranks) <= SHOWN_RANKS:
        return list(found.ranks)
    last = len(found.ranks) - 1
    chosen = {0, 1, 2, found.worst_rank.stage, last // 4, last // 2, last - 1, last}
    return [rank for rank in found.ranks if rank.stage in chosen]


def _memory(found: Estimate) -> Picture:
    """A stacked bar for each pipeline rank, against the memory of its chip."""
    scale = max(found.capacity, found.peak_bytes) * 1.02
    rows = []
    for rank in _shown(found):
        pieces = [
            BarPiece(size / scale, name, f"{name}: {show(size, 'bytes')}")
            for name, size in rank.by_class
        ]
        note = f"at its {rank.moment}, {rank.in_flight:g} in flight"
        worst = rank.stage == found.worst_rank.stage and len(found.ranks) > 1
        rows.append(
            Bar(
                f"rank {rank.stage}",
                pieces,
                show(rank.total, "bytes"),
                note + (", the worst" if worst else ""),
            )
        )
    names = [name for name, _ in found.ranks[0].by_class]
    table = [
        (
            f"rank {rank.stage}",
            *(show(size, "bytes") for _, size in rank.by_class),
            show(rank.total, "bytes"),
            rank.moment,
        )
        for rank in found.ranks
    ]
    drawn = bars(rows, found.capacity / scale) + legend((name, name) for name in names)
    label = f"bytes of pipeline ranks, of {show(found.capacity, 'bytes')}"
    return Picture("est.memory", label, drawn, ("", *names, "together", "moment"), table)


def _messages(found: Estimate) -> Picture:
    """Seconds of messages by kind: exposed, and hidden behind arithmetic."""
    kinds = sorted(found.messages, key=lambda message: -message.seconds)
    longest = max((message.seconds for message in kinds), default=1.0) or 1.0
    rows = [
        Bar(
            f"{message.axis}: {message.purpose}",
            [
                BarPiece(message.exposed / longest, AXES.get(message.axis, "world"), "exposed"),
                BarPiece((message.seconds - message.exposed) / longest, "hidden", "hidden"),
            ],
            f"{show(message.exposed, 's')} of {show(message.seconds, 's')}",
        )
        for message in kinds[:10]
    ]
    table = [
        (m.axis, m.collective.replace("_", "-"), m.purpose, str(m.ranks), show(m.bytes, "bytes"), f"{m.times:,.0f}",
         show(m.seconds, "s"), show(m.exposed, "s"))
        for m in kinds
    ]  # fmt: skip
    drawn = bars(rows) + legend(
        [("exposed, in the colour of the axis", "tensor"), ("hidden", "hidden")]
    )
    headers = ("axis", "collective", "of", "ranks", "bytes", "times", "seconds", "exposed")
    return Picture("est.messages", "messages of the rank that sets the pace", drawn, headers, table)
