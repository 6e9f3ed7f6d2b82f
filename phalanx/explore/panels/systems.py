"""Part 8: what the other two documents add: state, activations, rings, utilization, failures."""

from phalanx.core.layout import Layout
from phalanx.cost.activations import paper_layer_bytes
from phalanx.cost.clocks import seconds_for
from phalanx.cost.collectives import LinkRate, bytes_sent, ring_seconds
from phalanx.cost.flops import flops_per_token, matmul_params, rate_from_share
from phalanx.cost.reliability import (
    checkpoint_bytes,
    daly_interval,
    lost_per_failure,
    write_seconds,
)
from phalanx.cost.state import sharded
from phalanx.explore.asked import shape_of
from phalanx.explore.draw import Bar, BarPiece, Curve, LogScale, Mark, Tick, bars, legend, plot
from phalanx.explore.machine import machine
from phalanx.explore.presets import STATES
from phalanx.explore.records import SYSTEMS, Panel, Picture, Record, number, show
from phalanx.explore.state import Reading

CLASSES = ("weights", "gradients", "optimizer")
WAYS = (
    ("nothing cut", Layout()),
    ("TP", Layout(tp=8, sp=False)),
    ("TP and SP", Layout(tp=8)),
    ("and selective recompute", Layout(tp=8, recompute="selective")),  # type: ignore[arg-type]  # words stand for types
    ("full recompute", Layout(tp=8, recompute="full")),  # type: ignore[arg-type]  # words stand for types
)
LATENCY = 10e-6  # seconds of a message, for the picture of α and β


def systems(state: Reading) -> Panel:
    """State, activations, rings, utilization and failures of this model on this cluster.

    Args:
        state: what is read.
    """
    m, recipe = machine(state), STATES[state.text("recipe")]
    shape = shape_of(state)
    params, chips = shape.params(), m.dp * m.tp * m.pp
    share, trained = state.number("share"), state.number("trained")
    each = flops_per_token(shape, state.whole("seq"), causal=True)
    peak = chips * m.peak
    rate = rate_from_share(share, each, peak)
    mine = 2.0 * params / (m.tp * m.pp)
    width = m.fabric.egress / m.fabric.G if m.dp * m.tp > m.fabric.G and not m.torus else m.local
    records = (
        number("sys.params", params, "params", source="phalanx.ModelShape.params"),
        number("sys.each", float(recipe.bytes.total), "bytes/param", numbers=recipe.text),
        number("sys.state", params * float(recipe.bytes.total), "bytes", formula="bytes of state · N",
               numbers=f"{float(recipe.bytes.total):g} · {show(params, 'params')}", source=f"{SYSTEMS}, Bytes per parameter"),
        number("sys.ring_bytes", bytes_sent("all_reduce", mine, m.dp), "bytes", formula="2 · S · (p − 1)/p",
               numbers=f"S = 2 · {show(params, 'params')} / ({m.tp} · {m.pp}), p = {m.dp}", source=f"{SYSTEMS}, The ring algorithm"),
        number("sys.ring", ring_seconds("all_reduce", mine, m.dp, LinkRate(0.0, width)), "s",
               formula="2 · (p − 1)/p · S / B", numbers=f"B = {show(width, 'B/s')}", source="phalanx.cost.collectives.ring"),
        number("sys.flops", each, "FLOP", formula="6 · N + 6 · L · a · d · s (causal half)", source="phalanx.cost.flops.flops_per_token"),
        number("sys.six", 6.0 * matmul_params(shape), "FLOP", formula="6 · N, N without the input embedding", source=f"{SYSTEMS}, MFU"),
        number("sys.rate", rate, "", formula="MFU · peak / FLOP per token",
               numbers=f"{share:.0%} · {show(peak, 'FLOP/s')} / {each:.3g}", source="phalanx.cost.flops.rate_from_share"),
        number("sys.step", m.tokens / rate, "s", formula="B / tokens per second"),
        number("sys.days", seconds_for(trained, each, peak, share), "s", formula="tokens / tokens per second",
               numbers=f"{trained:.3g} / {rate:.3g}"),
        *_failures(state, params, chips),
    )  # fmt: skip
    return Panel(records, (_zero(state, params), _activations(state), _alpha_beta(m.dp, width)))


def _failures(state: Reading, params: int, chips: int) -> list[Record]:
    """Checkpoints and failures, to first order: 1 − δ/τ − (τ/2 + R)/M."""
    between = state.number("hours") * 3600 / chips
    size = checkpoint_bytes(float(params))
    write = write_seconds(size, state.number("store"))
    restart = state.number("restart")
    interval = daly_interval(write, between)
    lost = write / interval + lost_per_failure(interval, restart) / between
    kept = max(1 - lost, 0.0)
    text = f"{kept:.1%} of the time trains"
    good = kept >= 0.9
    return [
        number("sys.between", between, "s", formula="device-hours per failure / chips",
               numbers=f"{state.number('hours'):,.0f} h / {chips:,}", source=f"{SYSTEMS}, failures; arXiv:2407.21783, section 3.3.4"),
        number("sys.checkpoint", size, "bytes", formula="12 · N", source="phalanx.cost.reliability.checkpoint_bytes"),
        number("sys.write", write, "s", formula="bytes / storage"),
        number("sys.interval", interval, "s", formula="√(2 · δ · M), with Daly's two further terms",
               numbers=f"δ = {show(write, 's')}, M = {show(between, 's')}", source="phalanx.cost.reliability.daly_interval"),
        number("sys.kept", kept, "share", formula="1 − δ/τ − (τ/2 + R)/M"),
        Record("sys.verdict", text, text, verdict="good" if good else "bad",
               reason=f"a failure every {show(between, 's')} costs {show(lost_per_failure(interval, restart), 's')}"),
    ]  # fmt: skip


def _zero(state: Reading, params: int) -> Picture:
    """Bytes of state of one chip under ZeRO 0 to 3."""
    m, recipe, hbm = machine(state), STATES[state.text("recipe")], state.number("M")
    mine = params / (m.tp * m.pp)
    kept = [sharded(recipe.bytes, zero, m.dp) for zero in range(4)]
    longest = max(mine * float(kept[0].total), hbm) * 1.02
    rows, table = [], []
    for zero, one in enumerate(kept):
        sizes = [mine * float(getattr(one, name)) for name in CLASSES]
        total = mine * float(one.total)
        pieces = [
            BarPiece(s / longest, n, f"{n}: {show(s, 'bytes')}")
            for n, s in zip(CLASSES, sizes, strict=True)
        ]
        moved = "1.5×" if zero == 3 else "1×"
        rows.append(
            Bar(
                f"ZeRO-{zero}",
                pieces,
                show(total, "bytes"),
                f"{float(one.total):.4g} bytes per parameter, traffic {moved}",
            )
        )
        table.append(
            (f"ZeRO-{zero}", *(show(s, "bytes") for s in sizes), show(total, "bytes"), moved)
        )
    drawn = bars(rows, hbm / longest) + legend((name, name) for name in CLASSES)
    return Picture("sys.zero", "training state of one chip under ZeRO 0 to 3", drawn,
                   ("", *CLASSES, "together", "traffic"), table)  # fmt: skip


def _activations(state: Reading) -> Picture:
    """Bytes that one block keeps for one micro-batch, by the papers' formulas."""
    shape, seq, tp, mb = shape_of(state), state.whole("seq"), state.whole("tp"), state.whole("mb")
    found = []
    for name, way in WAYS:
        cut = Layout(tp=tp if way.tp > 1 else 1, sp=way.sp, mb=mb, recompute=way.recompute)
        found.append((name, paper_layer_bytes(shape, cut, seq)))
    longest = found[0][1]
    rows = [
        Bar(name, [BarPiece(size / longest, "activations")], show(size, "bytes"))
        for name, size in found
    ]
    table = [
        (name, show(size, "bytes"), show(size * shape.layers, "bytes")) for name, size in found
    ]
    return Picture("sys.acts", "activations of one layer and micro-batch", bars(rows),
                   ("", "one layer", "all layers"), table)  # fmt: skip


def _alpha_beta(ranks: int, bandwidth: float) -> Picture:
    """Seconds of a ring all-reduce by size: the latency of many messages, then bandwidth."""
    ranks = max(ranks, 2)
    across, up = LogScale(1e3, 1e11), LogScale(1e-5, 100)
    ring = [
        (s, ring_seconds("all_reduce", s, ranks, LinkRate(LATENCY, bandwidth)))
        for s in across.steps(17)
    ]
    pure = [
        (s, ring_seconds("all_reduce", s, ranks, LinkRate(0.0, bandwidth)))
        for s in across.steps(17)
    ]
    lines = [
        Curve(
            [(across.at(s), up.at(t)) for s, t in ring],
            "data",
            f"ring over {ranks} ranks, α = 10 us",
        ),
        Curve(
            [(across.at(s), up.at(t)) for s, t in pure], "network", "bandwidth alone", dashed=True
        ),
    ]
    bend = LATENCY * ranks * bandwidth
    marks = [Mark(across.at(bend), "ridge", f"α = S/(p·B) at {show(bend, 'bytes')}")]
    xs = [Tick(across.at(v), show(v, "bytes")) for v in (1e3, 1e5, 1e7, 1e9, 1e11)]
    ys = [Tick(up.at(v), show(v, "s")) for v in (1e-4, 1e-2, 1.0)]
    table = [
        (show(s, "bytes"), show(t, "s"), show(b, "s"))
        for (s, t), (_, b) in zip(ring, pure, strict=True)
    ]
    return Picture("sys.ab", "all-reduce by size", plot(lines, marks, (xs, ys), ("bytes of the vector", "seconds")),
                   ("bytes", "ring", "bandwidth alone"), table)  # fmt: skip
