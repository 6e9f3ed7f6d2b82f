"""Part 5, second half: layers per stage, the hop, and timelines of every schedule, two at once."""

from html import escape

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.cost.clocks import pipeline_hops
from phalanx.cost.roofline import weights_floor
from phalanx.explore.draw import Bar, BarPiece, bars, legend, percent
from phalanx.explore.machine import machine
from phalanx.explore.presets import SCHEDULES
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show
from phalanx.explore.state import Reading
from phalanx.explore.timelines import COLOURS, Drawn, drawn, pace_of
from phalanx.schedules.layouts import layers_of_stages

SECTION = f"{BOOK}, Pipelining"
MOST_CELLS = 1500  # of a drawing; more are sent as columns, to a canvas
ROW, CURVE = 18, 11  # pixels of a rank, and of its curve of memory
WIDE = 0.02  # share of the width that a digit needs, in half a page
MEANINGS = (("forward", "f"), ("backward", "b"), ("input gradient", "i"), ("weight gradient", "w"))


def pipeline(state: Reading) -> Panel:
    """Both halves: what pipelining costs this model, and schedules at any sizes.

    Args:
        state: what is read.
    """
    first, second = stages(state), timelines(state)
    return Panel((*first.records, *second.records), (*first.pictures, *second.pictures))


def stages(state: Reading) -> Panel:
    """What pipelining splits and sends: layers per stage, and whether a hop hides.

    Args:
        state: what is read.
    """
    m, layers = machine(state), state.whole("L")
    seq, mb = state.whole("seq"), state.whole("mb")
    micro = max(m.tokens / (m.dp * seq * mb), 1.0)
    each = seq * mb
    per_stage = layers / m.pp
    stage = 4.0 * each * m.block.h * m.width * per_stage / (m.tp * m.peak)
    width = m.fabric.egress / m.fabric.G if m.pp * m.tp > m.fabric.G and not m.torus else m.local
    hop = pipeline_hops(m.block.h, each, 2, 1, width).each / m.tp
    hidden = hop <= stage
    text = "hides" if hidden else "does not hide"
    ridge = m.peak / m.weights_bandwidth(m.dp)
    floor = weights_floor(ridge, m.block.sparsity, p=m.pp)
    records = (
        number("pp.layers", per_stage, "layers", formula="L / PP", numbers=f"{layers} / {m.pp}", source=SECTION),
        _uneven(layers, m.pp),
        number("pp.micro", micro, "micro-batches", formula="B / (DP · mb · seq)",
               numbers=f"{m.tokens:,.0f} / ({m.dp} · {mb} · {seq:,})"),
        number("pp.hop", hop, "s", formula="2 · mb · seq · D / (TP · W)",
               numbers=f"2 · {each:,} · {m.block.h:,} / ({m.tp} · {show(width, 'B/s')})", source=SECTION),
        number("pp.stage", stage, "s", formula="4 · mb · seq · D · k·F · (L/PP) / (TP · C)", source=SECTION),
        Record("pp.verdict", text, text, verdict="good" if hidden else "bad",
               reason=f"a hop takes {show(hop, 's')}, forward of a stage {show(stage, 's')}"),
        number("pp.bubble", (m.pp - 1) / (micro + m.pp - 1), "share", formula="(PP − 1) / (m + PP − 1)",
               numbers=f"({m.pp} − 1) / ({micro:g} + {m.pp} − 1)", source=f"{SECTION}; GPipe"),
        number("pp.bubble_over", (m.pp - 1) / micro, "share", formula="(PP − 1) / m",
               numbers=f"({m.pp} − 1) / {micro:g}", source="Megatron-LM"),
        number("pp.floor", floor, "tokens", formula="(E/k) · C / (W · PP)",
               numbers=f"each rank reduces 1/{m.pp} of the weights", source="phalanx.cost.roofline.weights_floor"),
    )  # fmt: skip
    return Panel(records)


def _uneven(layers: int, pp: int) -> Record:
    """How many layers stages really have."""
    if pp > layers:
        why = f"{layers} layers cannot fill {pp} stages"
        return Record("pp.split", None, "cannot be", verdict="bad", reason=why)
    held = layers_of_stages(Layout(pp=pp), layers)
    low, high = min(held), max(held)
    text = f"{low}" if low == high else f"{low} to {high}"
    return Record(
        "pp.split", text, text, "layers", reason="as even as possible", source="phalanx estimate"
    )


def timelines(state: Reading) -> Panel:
    """Two schedules side by side, at the same costs.

    Args:
        state: what is read.
    """
    pictures, records = [], []
    for place, key in (("one", "schedule"), ("two", "beside")):
        name = state.text(key)
        try:
            found = _drawn(state, name)
        except PhalanxError as error:
            records += [
                Record(f"pipe.{place}.{what}", None, "—", verdict="bad", reason=str(error))
                for what in NUMBERS
            ]
            records.append(
                Record(
                    f"pipe.{place}.verdict",
                    "cannot be",
                    "cannot be",
                    verdict="bad",
                    reason=str(error),
                )
            )
            refusal = f'<p class="refused">{escape(str(error))}</p>'
            pictures.append(
                Picture(f"pipe.{place}", f"{name}: {error}", refusal, ("",), [(str(error),)])
            )
            continue
        records += _records(place, found)
        pictures.append(_timeline(place, key, found))
    return Panel(tuple(records), tuple(pictures))


NUMBERS = ("makespan", "bubble", "idle", "peak")


def _drawn(state: Reading, name: str) -> Drawn:
    return drawn(name, state.whole("p"), state.whole("m"), state.whole("v"), pace_of(state))


def _records(place: str, found: Drawn) -> list[Record]:
    busy, title = found.found, found.title
    text = f"{busy.bubble_over_ideal:.1%} bubble"
    return [
        number(f"pipe.{place}.makespan", busy.makespan, "", formula="start of the first pass to end of the last",
               source="phalanx schedule"),
        number(f"pipe.{place}.bubble", busy.bubble_over_ideal, "share", formula="(makespan − ideal) / ideal",
               numbers=f"({busy.makespan:g} − {busy.ideal:g}) / {busy.ideal:g}", source="phalanx schedule"),
        number(f"pipe.{place}.idle", busy.idle_fraction, "share", formula="(makespan − ideal) / makespan",
               source="phalanx schedule"),
        number(f"pipe.{place}.peak", max(found.peak), "", formula="most micro-batches × stages in flight on a rank",
               numbers=" ".join(map(str, found.peak)), source="phalanx schedule"),
        Record(f"pipe.{place}.verdict", title, title, verdict="note", reason=text),
    ]  # fmt: skip


def _timeline(place: str, key: str, found: Drawn) -> Picture:
    """Rows of cells, and below each the micro-batches in flight."""
    p, busy = len(found.peak), found.found
    label = (
        f"{found.title}: {busy.bubble_over_ideal:.1%} of the ideal time idle, "
        f"at most {max(found.peak)} in flight"
    )
    height = p * (ROW + CURVE)
    names = "".join(f"<span>{rank}</span>" for rank in range(p))
    if len(found.cells.rank) > MOST_CELLS:
        body = f'<canvas class="timeline" data-timeline="{key}" data-of="{busy.makespan!r}" height="{height}" aria-hidden="true"></canvas>'
    else:
        body = _svg(found, height)
    shown = [(name, colour) for name, colour in MEANINGS if _has(found, colour)]
    svg = (
        f'<div class="timeline"><div class="ranks" aria-hidden="true">{names}</div>{body}</div>'
        f"{legend([*shown, ('in flight', 'activations')])}"
    )
    work = np.bincount(found.cells.rank, weights=found.cells.width, minlength=p)
    rows = [(f"rank {r}", str(peak), f"{1 - work[r]:.1%}") for r, peak in enumerate(found.peak)]
    return Picture(f"pipe.{place}", label, svg, ("rank", "most in flight", "idle"), rows)


def _has(found: Drawn, colour: str) -> bool:
    return bool((found.cells.colour // 2 == COLOURS.index(colour) // 2).any())


def _svg(found: Drawn, height: int) -> str:
    paths = ["" for _ in COLOURS]
    texts = []
    for rank, start, width, colour, micro in zip(*(c.tolist() for c in found.cells), strict=True):
        top = rank * (ROW + CURVE)
        left = f"{1e4 * start:.0f}"
        paths[colour] += f"M{left} {top}h{1e4 * width:.0f}v{ROW - 2}H{left}z"
        if width >= WIDE * len(str(micro)):
            at = percent(start + width / 2)
            texts.append(f'<text x="{at}" y="{top + 12}" text-anchor="middle">{micro}</text>')
    drawn_paths = "".join(
        f'<path d="{d}" class="c-{COLOURS[i]} pass"/>' for i, d in enumerate(paths) if d
    )
    return (
        f'<svg width="100%" height="{height}" aria-hidden="true">'
        f'<svg width="100%" height="{height}" viewBox="0 0 10000 {height}" preserveAspectRatio="none">'
        f'{drawn_paths}{_curves(found)}</svg><g class="numbers">{"".join(texts)}</g></svg>'
    )


def _curves(found: Drawn) -> str:
    """For each rank an area as high as micro-batches are in flight."""
    most = int(found.levels.level.max()) or 1
    paths, before = [""] * len(found.peak), [0.0] * len(found.peak)
    for rank, at, level in zip(*(column.tolist() for column in found.levels), strict=True):
        floor = rank * (ROW + CURVE) + ROW + CURVE - 2
        paths[rank] += f"H{1e4 * at:.0f}V{floor - (CURVE - 2) * level / most:.1f}"
        before[rank] = at
    areas = []
    for rank, path in enumerate(paths):
        floor = rank * (ROW + CURVE) + ROW + CURVE - 2
        areas.append(
            f'<path d="M0 {floor}{path}H{1e4 * before[rank]:.0f}V{floor}z" class="c-activations held"/>'
        )
    return "".join(areas)


def schedules(state: Reading) -> Panel:
    """Every schedule at these sizes: its bubble, and what it holds.

    Args:
        state: what is read.
    """
    rows, table = [], []
    found: list[tuple[str, Drawn | str]] = []
    for name in SCHEDULES:
        try:
            found.append((name, _drawn(state, name)))
        except PhalanxError as error:
            found.append((name, str(error)))
    played = [one for _, one in found if isinstance(one, Drawn)]
    longest = 1 + max((one.found.bubble_over_ideal for one in played), default=0.0)
    for name, one in found:
        if isinstance(one, str):
            rows.append(Bar(name, [], "cannot be", one))
            table.append((name, "cannot be", "", one))
            continue
        busy = one.found
        pieces = [BarPiece(1 / longest, "compute", "work"),
                  BarPiece(busy.bubble_over_ideal / longest, "bubble", "bubble")]  # fmt: skip
        note = f"{max(one.peak)} in flight, in {one.v} chunk{'s' * (one.v > 1)}"
        rows.append(Bar(name, pieces, f"{busy.bubble_over_ideal:.1%}", note))
        table.append(
            (name, f"{busy.makespan:.4g}", f"{busy.bubble_over_ideal:.1%}", str(max(one.peak)))
        )
    drawn_bars = bars(rows) + legend([("work", "compute"), ("bubble", "bubble")])
    headers = ("schedule", "makespan", "bubble", "most in flight")
    label = "every schedule at these sizes"
    return Panel((), (Picture("pipe.all", label, drawn_bars, headers, table),))
