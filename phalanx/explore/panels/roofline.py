"""Part 3: two clocks, the roofline, and the meters of data, sharded and tensor parallelism."""

from phalanx.catalog import load
from phalanx.cost.clocks import (
    Clocks,
    data_clocks,
    estimated_params,
    tensor_clocks,
    tensor_width,
)
from phalanx.cost.roofline import tensor_limit, weights_floor
from phalanx.cost.state import largest_model, sharded
from phalanx.explore.draw import Bar, BarPiece, Curve, LogScale, Mark, Tick, bars, legend, plot
from phalanx.explore.machine import Hardware, machine
from phalanx.explore.presets import STATES
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show
from phalanx.explore.state import Reading

INTENSITY = LogScale(10, 1e6)  # tokens per chip, along the roofline
EXAMPLES = (("llama-3-70b", "llama-3.1-70b"), ("gemma-7b", "gemma-7b"))
NAMES = {"weights": "weights travel", "activations": "activations travel"}


def two_clocks(state: Reading) -> Panel:
    """The primer: one layer, two clocks, and the roofline.

    Args:
        state: what is read.
    """
    m, travels = machine(state), state.text("travels")
    clocks = _clocks(m, travels)
    ridge = m.peak / m.weights_bandwidth(m.dp)
    floor = weights_floor(ridge, m.block.sparsity)
    moved = "2 · D · E · F" if travels == "weights" else "2 · B · D"
    records = (
        number("roof.compute", clocks.compute, "s", formula="8 · B · D · k·F / (DP · C)"
               if travels == "weights" else "4 · B · D · k·F / (TP · C)",
               numbers=_clock_numbers(m, travels), source=f"{BOOK}, First, Feel the Roofline"),
        number("roof.network", clocks.network, "s", formula=f"2 · {moved} · 2 / W"
               if travels == "weights" else f"2 · {moved} / W",
               numbers=f"W = {show(_bandwidth(m, travels), 'B/s')}, {_where(m, travels)}",
               source=f"{BOOK}, First, Feel the Roofline"),
        number("roof.layer", clocks.seconds, "s", formula="max(compute, network)",
               numbers="perfect overlap: a layer costs the slower clock"),
        _verdict("roof.verdict", clocks, _where(m, travels)),
        number("roof.ridge", floor, "tokens", formula="(E/k) · C / W",
               numbers=f"{m.block.sparsity:g} · {show(m.peak, 'FLOP/s')} / {show(m.weights_bandwidth(m.dp), 'B/s')}",
               source="phalanx.cost.roofline.weights_floor"),
        number("roof.per_chip", m.tokens / m.dp, "tokens", formula="B / DP",
               numbers=f"{m.tokens:,.0f} / {m.dp:,}"),
    )  # fmt: skip
    return Panel(records, (_clock_bars(clocks, travels), _roofline(m)))


def _clocks(m: Hardware, travels: str) -> Clocks:
    if travels == "weights":
        return data_clocks(m.block, m.tokens, m.dp, m.peak, m.weights_bandwidth(m.dp))
    return tensor_clocks(m.block, m.tokens, m.tp, m.peak, m.activations_bandwidth(m.tp))


def _bandwidth(m: Hardware, travels: str) -> float:
    return m.weights_bandwidth(m.dp) if travels == "weights" else m.activations_bandwidth(m.tp)


def _where(m: Hardware, travels: str) -> str:
    return m.where(m.dp if travels == "weights" else m.tp)


def _clock_numbers(m: Hardware, travels: str) -> str:
    factor, degree = (8, m.dp) if travels == "weights" else (4, m.tp)
    return (
        f"{factor} · {m.tokens:,.0f} · {m.block.h:,} · {m.width:,} / "
        f"({degree:,} · {show(m.peak, 'FLOP/s')})"
    )


def _verdict(id: str, clocks: Clocks, where: str) -> Record:
    hidden = clocks.ratio >= 1
    text = "compute-bound" if hidden else "communication-bound"
    times = f"{clocks.ratio:.3g}" if clocks.ratio < 1e6 else "very many"
    reason = (
        f"arithmetic takes {show(clocks.compute, 's')}, messages {show(clocks.network, 's')} {where}: "
        f"{times} times as long" + ("; they hide" if hidden else "; they cannot hide")
    )
    return Record(id, text, text, verdict="good" if hidden else "bad", reason=reason)


def _clock_bars(clocks: Clocks, travels: str) -> Picture:
    longest = max(clocks.compute, clocks.network) or 1.0
    rows = [
        Bar("compute", [BarPiece(clocks.compute / longest, "compute")], show(clocks.compute, "s")),
        Bar("network", [BarPiece(clocks.network / longest, "data" if travels == "weights" else "tensor")],
            show(clocks.network, "s")),
    ]  # fmt: skip
    cells = [(row.name, row.text) for row in rows]
    return Picture("roof.clocks", f"two clocks of one layer, {NAMES[travels]}", bars(rows),
                   ("clock", "seconds of one layer"), cells)  # fmt: skip


def _roofline(m: Hardware) -> Picture:
    """Share of the peak against tokens per chip; the dot can be dragged."""
    floor = weights_floor(m.peak / m.weights_bandwidth(m.dp), m.block.sparsity)
    tp = _tensor(m).ratio
    height = LogScale(0.01, 1.26)

    def roof(x: float) -> tuple[float, float]:
        return INTENSITY.at(x), height.at(min(1.0, x / floor))

    points = [
        roof(x)
        for x in (INTENSITY.low, min(max(floor, INTENSITY.low), INTENSITY.high), INTENSITY.high)
    ]
    flat = height.at(min(1.0, tp))
    x = m.tokens / m.dp
    lines = [
        Curve(points, "data", "DP and FSDP: weights travel"),
        Curve(
            [(0.0, flat), (1.0, flat)], "tensor", f"TP = {m.tp}: activations travel", dashed=True
        ),
    ]
    marks = [
        Mark(INTENSITY.at(floor), "ridge", f"ridge {show(floor, 'tokens')}"),
        Mark(roof(x)[0], "data", "", roof(x)[1], "roof"),
    ]
    shares = [Tick(height.at(v), f"{v:.0%}") for v in (0.01, 0.1, 1.0)]
    drawn = plot(
        lines, marks, (INTENSITY.ticks(), shares), ("tokens per chip, B / DP", "share of the peak")
    )
    rows = [(show(v, ""), f"{min(1.0, v / floor):.1%}", f"{min(1.0, tp):.1%}")
            for v in INTENSITY.steps(11)]  # fmt: skip
    return Picture("roof.plot", "roofline: share of the peak by tokens per chip", drawn,
                   ("tokens per chip", "DP, FSDP", "TP"), rows)  # fmt: skip


def _tensor(m: Hardware) -> Clocks:
    return tensor_clocks(m.block, m.tokens, m.tp, m.peak, m.activations_bandwidth(m.tp))


def _meter(id: str, clocks: Clocks, colour: str, title: str) -> Picture:
    longest = max(clocks.compute, clocks.network) or 1.0
    rows = [
        Bar("T_math", [BarPiece(clocks.compute / longest, "compute")], show(clocks.compute, "s")),
        Bar("T_comms", [BarPiece(clocks.network / longest, colour)], show(clocks.network, "s")),
    ]
    return Picture(
        id, title, bars(rows), ("", "seconds of one layer"), [(r.name, r.text) for r in rows]
    )


def data(state: Reading) -> Panel:
    """Data parallelism: the floor, the meter, and the largest model that fits without a cut.

    Args:
        state: what is read.
    """
    m = machine(state)
    recipe = STATES[state.text("recipe")]
    width = m.weights_bandwidth(m.dp)
    clocks = data_clocks(m.block, m.tokens, m.dp, m.peak, width)
    floor = weights_floor(m.peak / width, m.block.sparsity)
    three = weights_floor(m.peak / m.local, m.block.sparsity, axes=max(m.torus, 1))
    memory = state.number("M")
    section = f"{BOOK}, Data Parallelism"
    records = (
        number("dp.math", clocks.compute, "s", formula="8 · B · D · k·F / (DP · C)",
               numbers=_clock_numbers(m, "weights"), source=section),
        number("dp.comms", clocks.network, "s", formula="2 · 2 · 2 · D · E · F / W",
               numbers=f"8 · {m.block.h:,} · {m.block.E} · {m.block.f:,} / {show(width, 'B/s')}", source=section),
        _verdict("dp.verdict", clocks, m.where(m.dp)),
        number("dp.ratio", clocks.ratio, "x", formula="T_math / T_comms"),
        number("dp.per_chip", m.tokens / m.dp, "tokens", formula="B / DP", numbers=f"{m.tokens:,.0f} / {m.dp:,}"),
        number("dp.floor", floor, "tokens", formula="(E/k) · C / W",
               numbers=f"{m.block.sparsity:g} · {show(m.peak, 'FLOP/s')} / {show(width, 'B/s')}",
               source="phalanx.cost.roofline.weights_floor"),
        number("dp.floor1", weights_floor(m.peak / m.local), "tokens", formula="C / W_ici", source=section),
        number("dp.floor3", three, "tokens", formula="(E/k) · C / (axes · W_ici)",
               numbers=f"{max(m.torus, 1)} axes", source=section),
        number("dp.pod", three * m.fabric.G, "tokens", formula="floor · chips of a domain",
               numbers=f"{three:,.0f} · {m.fabric.G:,}", source=section),
        number("dp.penalty", m.block.sparsity, "x", formula="E / k", numbers=f"{m.block.E} / {m.block.k}",
               source=f"{BOOK}, Data Parallelism, mixture of experts"),
        number("dp.chips", m.tokens / floor, "chips", formula="B / floor", numbers=f"{m.tokens:,.0f} / {floor:,.0f}"),
        number("dp.largest", largest_model(memory, recipe.bytes), "params", formula="HBM / bytes of state",
               numbers=f"{show(memory, 'bytes')} / {recipe.bytes.total:g}", source=section),
        number("dp.hbm", memory, "bytes"),
        number("dp.state", float(recipe.bytes.total), "bytes/param", numbers=recipe.text),
    )  # fmt: skip
    return Panel(
        records, (_meter("dp.meter", clocks, "data", "data parallelism, backward of one layer"),)
    )


def fsdp(state: Reading) -> Panel:
    """Fully-sharded data parallelism: the same ratio, and what it does to memory.

    Args:
        state: what is read.
    """
    m = machine(state)
    width = m.weights_bandwidth(m.dp)
    both = data_clocks(m.block, m.tokens, m.dp, m.peak, width)
    clocks = Clocks(both.compute / 2, both.network / 2)
    records = [
        number("fsdp.math", clocks.compute, "s", formula="4 · B · D · k·F / (DP · C)",
               source=f"{BOOK}, Fully-Sharded Data Parallelism (FSDP)"),
        number("fsdp.comms", clocks.network, "s", formula="2 · 2 · D · E · F / W",
               numbers=f"W = {show(width, 'B/s')}, {m.where(m.dp)}"),
        _verdict("fsdp.verdict", clocks, m.where(m.dp)),
        number("fsdp.ratio", clocks.ratio, "x", formula="T_math / T_comms"),
    ]  # fmt: skip
    memory, picture = _memory(state, m)
    return Panel(
        (*records, *memory),
        (_meter("fsdp.meter", clocks, "data", "FSDP, forward of one layer"), picture),
    )


def _memory(state: Reading, m: Hardware) -> tuple[list[Record], Picture]:
    """Bytes of one chip by class, against its memory."""
    recipe, zero = STATES[state.text("recipe")], state.whole("zero")
    layers, hbm = state.whole("L"), state.number("M")
    params = estimated_params(m.block, layers)
    mine, kept = params / (m.tp * m.pp), sharded(recipe.bytes, zero, m.dp)
    alive = state.whole("mb") * state.whole("seq")
    activations = 2.0 * layers * alive * (m.block.h + 2 * m.width) / m.tp
    classes = {
        "weights": mine * kept.weights,
        "gradients": mine * kept.gradients,
        "optimizer": mine * kept.optimizer,
        "activations": activations,
    }
    total = sum(float(size) for size in classes.values())
    scale = max(total, hbm) * 1.02
    pieces = [
        BarPiece(float(s) / scale, name, f"{name}: {show(float(s), 'bytes')}")
        for name, s in classes.items()
    ]
    records = [
        number(f"mem.{name}", float(size), "bytes", formula=_memory_formula(name, zero),
               numbers=f"{show(params, 'params')} parameters, {recipe.text}" if name != "activations"
               else f"2 · {layers} · {alive:,} · ({m.block.h:,} + 2 · {m.width:,}) / {m.tp}",
               source="phalanx.cost.state.sharded" if name != "activations" else f"{BOOK}, Some Problems to Work")
        for name, size in classes.items()
    ]  # fmt: skip
    fits = total <= hbm
    text = "fits" if fits else "does not fit"
    reason = f"{show(total, 'bytes')} of {show(hbm, 'bytes')}"
    records += [
        number("mem.total", total, "bytes", formula="sum"),
        Record("mem.verdict", text, text, verdict="good" if fits else "bad", reason=reason),
        number("mem.zero", zero),
    ]
    drawn = bars([Bar("one chip", pieces, show(total, "bytes"))], hbm / scale)
    drawn += legend(
        (f"{name} {show(float(size), 'bytes')}", name) for name, size in classes.items()
    )
    rows = [(name, show(float(size), "bytes")) for name, size in classes.items()]
    rows += [("together", show(total, "bytes")), ("memory of a chip", show(hbm, "bytes"))]
    return records, Picture(
        "mem.meter", f"memory of one chip: {reason}, {text}", drawn, ("class", "bytes"), rows
    )


def _memory_formula(name: str, zero: int) -> str:
    cut = {"weights": 3, "gradients": 2, "optimizer": 1}
    if name == "activations":
        return (
            "2 · L · mb · seq · (D + 2 · k·F) / TP: three kept per layer, whole pipeline in flight"
        )
    return f"P_w / (TP · PP) · bytes{' / DP' if zero >= cut[name] else ''}"


def tensor(state: Reading) -> Panel:
    """Tensor parallelism: freights, the meter, the limit, and the book's examples.

    Args:
        state: what is read.
    """
    m = machine(state)
    clocks, width = _tensor(m), m.activations_bandwidth(m.tp)
    axes = m.axes.tp if m.torus else 1
    ridge, limit = m.peak / m.local, tensor_limit(m.width, m.peak / m.local, axes)
    weights, acts = 2.0 * m.block.h * m.block.E * m.block.f, 2.0 * m.tokens * m.block.h
    lighter = "activations" if acts < weights else "weights"
    section = f"{BOOK}, Tensor Parallelism"
    records = [
        number("tp.math", clocks.compute, "s", formula="4 · B · D · k·F / (TP · C)",
               numbers=_clock_numbers(m, "activations"), source=section),
        number("tp.comms", clocks.network, "s", formula="4 · B · D / W",
               numbers=f"W = {show(width, 'B/s')}, {m.where(m.tp)}", source=section),
        _verdict("tp.verdict", clocks, m.where(m.tp)),
        number("tp.ratio", clocks.ratio, "x", formula="k·F / (TP · α_TP)"),
        number("tp.limit", limit, "ranks", formula="M_TP · k·F · W_ici / C",
               numbers=f"{axes} · {m.width:,} / {ridge:,.0f}", source="phalanx.cost.roofline.tensor_limit"),
        number("tp.width", tensor_width(ridge / axes, m.tp, 0 if m.torus else m.fabric.G), "",
               formula="F > α · TP; over domains α · (TP − G)", source="phalanx.cost.clocks.tensor_width"),
        number("tp.acts", acts, "bytes", formula="2 · B · D", numbers=f"2 · {m.tokens:,.0f} · {m.block.h:,}"),
        number("tp.weights", weights, "bytes", formula="2 · D · E · F",
               numbers=f"2 · {m.block.h:,} · {m.block.E} · {m.block.f:,}"),
        Record("tp.lighter", lighter, lighter, verdict="note",
               reason=f"activations {show(acts, 'bytes')}, weights {show(weights, 'bytes')} a layer"),
        number("tp.int8", tensor_limit(m.width, (2 * m.peak) / (2 * m.local), axes), "ranks",
               formula="(2·C) / (2·W): int8 doubles the rate and halves the bytes", source=section),
    ]  # fmt: skip
    for name, entry in EXAMPLES:
        records += list(_example(name, load.model(entry).ffn, ridge / axes))
    return Panel(tuple(records), (_freight(acts, weights), _meter("tp.meter", clocks, "tensor",
                 "tensor parallelism, forward of one layer")))  # fmt: skip


def _example(name: str, width: int, ridge: float) -> list[Record]:
    found = [
        number(f"tp.{name}", tensor_limit(width, ridge), "ranks", formula="F / α", numbers=f"{width:,} / {ridge:,.0f}",
               source=f"{BOOK}, Tensor Parallelism"),
        number(f"tp.{name}.needed", tensor_width(ridge, 8), "", formula="8 · α", numbers=f"8 · {ridge:,.0f}"),
    ]  # fmt: skip
    for t in (8, 16):
        hidden = tensor_width(ridge, t) <= width
        text = "compute-bound" if hidden else "communication-bound"
        reason = f"tp={t} needs F of {tensor_width(ridge, t):,.0f}; the model has {width:,}"
        found.append(
            Record(f"tp.{name}.{t}", text, text, verdict="good" if hidden else "bad", reason=reason)
        )
    return found


def _freight(acts: float, weights: float) -> Picture:
    longest = max(acts, weights)
    rows = [
        Bar("activations", [BarPiece(acts / longest, "tensor")], show(acts, "bytes")),
        Bar("weights", [BarPiece(weights / longest, "data")], show(weights, "bytes")),
    ]
    return Picture("tp.freight", "freight of one layer", bars(rows), ("freight", "bytes of one layer"),
                   [(r.name, r.text) for r in rows])  # fmt: skip
