"""Part 4: FSDP and tensor parallelism together: the best mix, its floor, and all schemes by batch."""

from typing import NamedTuple

from phalanx.cost.clocks import data_clocks, mixed_best_dp, mixed_floor, mixed_ratio, tensor_clocks
from phalanx.explore.draw import Curve, LogScale, Mark, Tick, plot, powers
from phalanx.explore.machine import Hardware, machine
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show
from phalanx.explore.state import Reading

SECTION = f"{BOOK}, Combining FSDP and Tensor Parallelism"
BATCHES = LogScale(1, 1e5)  # tokens per chip
RATIOS = LogScale(0.01, 100)
SAMPLES = 25


class Mix(NamedTuple):
    """One way to share N chips between FSDP and TP, and its clocks for one forward layer."""

    dp: int
    tp: int
    compute: float
    weights: float
    activations: float

    @property
    def network(self) -> float:
        """Both kinds of messages at once, over different links."""
        return max(self.weights, self.activations)

    @property
    def ratio(self) -> float:
        """Arithmetic over communication."""
        return self.compute / self.network if self.network else float("inf")


def mixes(m: Hardware, tokens: float) -> list[Mix]:
    """Every power of two of FSDP that divides the chips.

    Args:
        m: the machine; dp x tp of it is shared.
        tokens: of one step.
    """
    n = m.dp * m.tp
    return [Mix(dp, n // dp, *m.mixed(dp, n // dp, tokens)) for dp in powers(n) if n % dp == 0]


def best(m: Hardware, tokens: float) -> Mix:
    """The mix whose messages take the least time; of equals the one with the fewest tp.

    Args:
        m: the machine.
        tokens: of one step.
    """
    return min(mixes(m, tokens), key=lambda mix: (mix.network, mix.tp))


def mixed(state: Reading) -> Panel:
    """The mixed scheme now, the sweep over dp, and ratios by batch.

    Args:
        state: what is read.
    """
    m = machine(state)
    n, now = m.dp * m.tp, Mix(m.dp, m.tp, *m.mixed(m.dp, m.tp, m.tokens))
    top = best(m, m.tokens)
    hidden = now.ratio >= 1
    text = "compute-bound" if hidden else "communication-bound"
    records: list[Record] = [
        number("mix.n", n, "chips", formula="DP · TP", numbers=f"{m.dp:,} · {m.tp}"),
        number("mix.math", now.compute, "s", formula="4 · B · D · k·F / (N · C)", source=SECTION),
        number("mix.weights", now.weights, "s", formula=_weights_formula(m), source=SECTION),
        number("mix.acts", now.activations, "s", formula=_activations_formula(m), source=SECTION),
        Record("mix.verdict", text, text, verdict="good" if hidden else "bad",
               reason=f"arithmetic {show(now.compute, 's')}, weights {show(now.weights, 's')}, "
               f"activations {show(now.activations, 's')}"),
        number("mix.best_dp", top.dp, "ranks", formula="the least of max(weights, activations), powers of two"),
        number("mix.best_tp", top.tp, "ranks", formula="N / DP"),
        number("mix.best_ratio", top.ratio, "x", formula="T_math / T_comms at the best mix"),
        number("mix.per_chip", m.tokens / n, "tokens", formula="B / N", numbers=f"{m.tokens:,.0f} / {n:,}"),
        *_closed(m, n),
    ]  # fmt: skip
    return Panel(tuple(records), (_sweep(m, top), _by_batch(m)))


def _weights_formula(m: Hardware) -> str:
    if m.torus:
        return "4 · D · E · F / (TP · W_ici · M_DP)"
    return "max( 4·D·E·F / (W · min(TP, G)), 4·D·E·F / (G · W_dcn · max(1, TP/G)) )"


def _activations_formula(m: Hardware) -> str:
    return (
        "4 · B · D / (DP · W_ici · M_TP)"
        if m.torus
        else "4 · B · D / (DP · W), over domains slower"
    )


def _closed(m: Hardware, n: int) -> list[Record]:
    """The closed form, which holds on a torus; on switches the search above is the answer."""
    if not m.torus:
        gone = "only on a torus: an outer FSDP does not get faster while TP stays inside a domain"
        return [Record(f"mix.{name}", None, "—", reason=gone, source=SECTION, verdict="note")
                for name in ("dp_opt", "floor", "ratio")]  # fmt: skip
    ridge = m.peak / m.local
    return [
        number("mix.dp_opt", mixed_best_dp(m.tokens, m.width, n, m.axes), "ranks",
               formula="√( B/F · M_DP/M_TP · N )",
               numbers=f"√( {m.tokens:,.0f}/{m.width:,} · {m.axes.dp}/{m.axes.tp} · {n:,} )", source=SECTION),
        number("mix.floor", mixed_floor(m.width, ridge, m.axes), "tokens",
               formula="α² / (M_DP · M_TP · F)",
               numbers=f"{ridge:,.0f}² / ({m.axes.dp} · {m.axes.tp} · {m.width:,})",
               source="phalanx.cost.clocks.mixed_floor"),
        number("mix.ratio", mixed_ratio(m.tokens, m.width, n, ridge, m.axes), "x",
               formula="√( B · F · M_DP · M_TP / N ) / α", source=SECTION),
    ]  # fmt: skip


def _sweep(m: Hardware, top: Mix) -> Picture:
    """Clocks of every split of the chips, in seconds of one layer."""
    found = mixes(m, m.tokens)
    values = [v for mix in found for v in (mix.compute, mix.weights, mix.activations) if v > 0]
    scale = LogScale(min(values) / 1.5, max(values) * 1.5)
    across = LogScale(1, max(found[-1].dp, 2))

    def line(name: str, colour: str, *, dashed: bool = False) -> Curve:
        kinds = {"compute": "T_math", "weights": "FSDP: weights", "activations": "TP: activations",
                 "network": "T_comms"}  # fmt: skip
        points = [
            (across.at(mix.dp), scale.at(getattr(mix, name)))
            for mix in found
            if getattr(mix, name) > 0
        ]
        return Curve(points, colour, kinds[name], dashed)

    lines = [line("weights", "data", dashed=True), line("activations", "tensor", dashed=True),
             line("network", "network"), line("compute", "compute")]  # fmt: skip
    now = next((mix for mix in found if mix.dp == m.dp), top)
    marks = [
        Mark(across.at(top.dp), "ridge", f"best DP = {top.dp:,}"),
        Mark(across.at(now.dp), "network", "", scale.at(now.network), "sweep"),
    ]
    xs = [
        Tick(across.at(mix.dp), f"{mix.dp:,}")
        for i, mix in enumerate(found)
        if i % _every(found) == 0
    ]
    ys = [Tick(scale.at(v), show(v, "s")) for v in _decades(scale)]
    drawn = plot(
        lines,
        marks,
        (xs, ys),
        (f"DP, of {m.dp * m.tp:,} chips; TP is the rest", "seconds of one layer"),
    )
    rows = [(f"{x.dp:,} × {x.tp:,}", show(x.compute, "s"), show(x.weights, "s"), show(x.activations, "s"),
             f"{x.ratio:.3g}") for x in found]  # fmt: skip
    return Picture("mix.sweep", f"clocks by DP; best at {top.dp:,}", drawn,
                   ("DP × TP", "T_math", "weights", "activations", "ratio"), rows)  # fmt: skip


def _every(found: list[Mix]) -> int:
    return max(1, -(-len(found) // 7))


def _decades(scale: LogScale) -> list[float]:
    return [value for e in range(-12, 6) if scale.low <= (value := 10.0**e) <= scale.high]


def _by_batch(m: Hardware) -> Picture:
    """Arithmetic over communication by tokens per chip: DP alone, TP alone, and the best mix."""
    n = m.dp * m.tp
    data_width, tensor_width = m.weights_bandwidth(n), m.activations_bandwidth(n)
    samples: dict[str, list[tuple[float, float]]] = {"data": [], "tensor": [], "mixed": []}
    rows = []
    for each in BATCHES.steps(SAMPLES):
        tokens = each * n
        ratios = {
            "data": data_clocks(m.block, tokens, n, m.peak, data_width).ratio,
            "tensor": tensor_clocks(m.block, tokens, n, m.peak, tensor_width).ratio,
            "mixed": best(m, tokens).ratio,
        }
        for name, ratio in ratios.items():
            samples[name].append((BATCHES.at(each), RATIOS.at(ratio)))
        rows.append((show(each, ""), *(f"{ratio:.3g}" for ratio in ratios.values())))
    names = {"data": f"DP or FSDP = {n:,}", "tensor": f"TP = {n:,}", "mixed": "the best mix"}
    colours = {"data": "data", "tensor": "tensor", "mixed": "mixed"}
    lines = [Curve(points, colours[name], names[name]) for name, points in samples.items()]
    level = Curve([(0.0, RATIOS.at(1.0)), (1.0, RATIOS.at(1.0))], "ridge", "", dashed=True)
    marks = [Mark(BATCHES.at(m.tokens / n), "ridge", f"now {show(m.tokens / n, '')}")]
    ys = [Tick(RATIOS.at(v), f"{v:g}×") for v in (0.01, 0.1, 1, 10, 100)]
    drawn = plot([level, *lines], marks, (BATCHES.ticks(), ys),
                 ("tokens per chip, B / N", "arithmetic over communication"))  # fmt: skip
    return Picture("mix.batch", "all schemes by batch: above 1× messages hide", drawn,
                   ("tokens per chip", "DP or FSDP", "TP", "best mix"), rows)  # fmt: skip
