"""Part 5, second half: layers per stage, the hop, and timelines of every schedule, two at once."""

from html import escape

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
    p, busy = len(found.levels), found.found
    label = (
        f"{found.title}: {busy.bubble_over_ideal:.1%} of the ideal time idle, "
        f"at most {max(found.peak)} in flight"
    )
    height = p * (ROW + CURVE)
    names = "".join(f"<span>{rank}</span>" for rank in range(p))
    if len(found.cells) > MOST_CELLS:
        body = f'<canvas class="timeline" data-timeline="{key}" height="{height}" aria-hidden="true"></canvas>'
    else:
        body = _svg(found, height)
    shown = [(name, colour) for name, colour in MEANINGS if _has(found, colour)]
    svg = (
        f'<div class="timeline"><div class="ranks" aria-hidden="true">{names}</div>{body}</div>'
        f"{legend([*shown, ('in flight', 'activations')])}"
    )
    rows = [(f"rank {r}", str(peak), f"{_idle(found, r):.1%}") for r, peak in enumerate(found.peak)]
    return Picture(f"pipe.{place}", label, svg, ("rank", "most in flight", "idle"), rows)


def _has(found: Drawn, colour: str) -> bool:
    wanted = {COLOURS.index(colour), COLOURS.index(colour) + 1}
    return any(cell.colour in wanted for cell in found.cells)


def _idle(found: Drawn, rank: int) -> float:
    return 1 - sum(cell.width for cell in found.cells if cell.rank == rank)


def _svg(found: Drawn, height: int) -> str:
    paths = ["" for _ in COLOURS]
    texts = []
    for cell in found.cells:
        top = cell.rank * (ROW + CURVE)
        paths[cell.colour] += (
            f"M{1e4 * cell.start:.0f} {top}h{1e4 * cell.width:.0f}v{ROW - 2}H{1e4 * cell.start:.0f}z"
        )
        if cell.width >= WIDE * len(str(cell.microbatch)):
            at = percent(cell.start + cell.width / 2)
            texts.append(
                f'<text x="{at}" y="{top + 12}" text-anchor="middle">{cell.microbatch}</text>'
            )
    most = max(max(level for _, level in row) for row in found.levels) or 1
    curves = "".join(_curve(rank, row, most) for rank, row in enumerate(found.levels))
    drawn_paths = "".join(
        f'<path d="{d}" class="c-{COLOURS[i]} pass"/>' for i, d in enumerate(paths) if d
    )
    return (
        f'<svg width="100%" height="{height}" aria-hidden="true">'
        f'<svg width="100%" height="{height}" viewBox="0 0 10000 {height}" preserveAspectRatio="none">'
        f'{drawn_paths}{curves}</svg><g class="numbers">{"".join(texts)}</g></svg>'
    )


def _curve(rank: int, levels: tuple[tuple[float, int], ...], most: int) -> str:
    """An area as high as micro-batches are in flight."""
    floor = rank * (ROW + CURVE) + ROW + CURVE - 2
    path, before = f"M0 {floor}", 0.0
    for at, level in levels:
        path += f"H{1e4 * at:.0f}V{floor - (CURVE - 2) * level / most:.1f}"
        before = at
    return f'<path d="{path}H{1e4 * max(before, 0):.0f}V{floor}z" class="c-activations held"/>'


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
