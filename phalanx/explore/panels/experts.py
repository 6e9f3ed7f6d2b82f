"""Part 5, first half: expert parallelism, its two regimes, and how far messages hide."""

from phalanx.cost.clocks import Clocks, expert_clocks, expert_width
from phalanx.cost.roofline import LayerSizes
from phalanx.explore.draw import Bar, BarPiece, Curve, LogScale, Mark, Tick, bars, plot, powers
from phalanx.explore.machine import Hardware, machine
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show
from phalanx.explore.state import Reading

SECTION = f"{BOOK}, Expert Parallelism"
RATIOS = LogScale(0.01, 100)


def experts(state: Reading) -> Panel:
    """All-to-alls of a mixture of experts, against the arithmetic of one layer.

    Args:
        state: what is read.
    """
    m, ep = machine(state), state.whole("ep")
    routed, chosen = m.block.E - m.shared, m.block.k - m.shared
    clocks = _clocks(m, ep)
    ridge = m.peak / m.fabric.egress
    records = (
        number("ep.routed", routed, "experts", formula="E − s", numbers=f"{m.block.E} − {m.shared}", source=SECTION),
        number("ep.chosen", chosen, "experts", formula="k − s", numbers=f"{m.block.k} − {m.shared}", source=SECTION),
        number("ep.math", clocks.compute, "s", formula="4 · B · D · k·F / (EP · C)",
               numbers=f"4 · {m.tokens:,.0f} · {m.block.h:,} · {m.width:,} / ({ep} · {show(m.peak, 'FLOP/s')})", source=SECTION),
        number("ep.comms", clocks.network, "s",
               formula="4·B·D · (EP − G)/(EP · W_domain) · min(G·k_r/EP, 1); inside, (EP − 1)/(EP · W) · min(k_r/EP, 1)",
               numbers=f"G = {m.fabric.G}, k_r = {chosen}, {m.where(ep)}", source="phalanx.cost.clocks.expert_clocks"),
        _verdict(m, ep, clocks),
        _needed(m, ep, ridge, chosen),
        number("ep.rule_large", m.fabric.G * ridge, "", formula="G · α: EP far above k_r",
               numbers=f"{m.fabric.G} · {ridge:,.0f}", source=SECTION),
        number("ep.alpha", ridge, "", formula="α = C / W_domain",
               numbers=f"{show(m.peak, 'FLOP/s')} / {show(m.fabric.egress, 'B/s')}", source=SECTION),
        _regime(m, ep, chosen),
    )  # fmt: skip
    return Panel(records, (_meter(clocks), _by_degree(m, ep, routed)))


def _clocks(m: Hardware, ep: int) -> Clocks:
    """Routed experts move; shared ones stay in the arithmetic."""
    chosen = max(m.block.k - m.shared, 1)
    block = LayerSizes(m.block.h, m.block.f, max(m.block.E - m.shared, 1), chosen)
    found = expert_clocks(block, m.tokens, ep, m.peak, m.fabric)
    return Clocks(found.compute * m.block.k / chosen, found.network)


def _verdict(m: Hardware, ep: int, clocks: Clocks) -> Record:
    if m.block.E <= 1:
        return Record("ep.verdict", "a dense model", "a dense model", verdict="note",
                      reason="there is nothing to route; load DeepSeek-V3")  # fmt: skip
    if ep == 1:
        return Record("ep.verdict", "nothing travels", "nothing travels", verdict="note",
                      reason="with EP = 1 every chip has all experts")  # fmt: skip
    hidden = clocks.ratio >= 1
    text = "compute-bound" if hidden else "communication-bound"
    reason = (
        f"arithmetic takes {show(clocks.compute, 's')}, the two all-to-alls "
        f"{show(clocks.network, 's')} {m.where(ep)}"
    )
    return Record("ep.verdict", text, text, verdict="good" if hidden else "bad", reason=reason)


def _needed(m: Hardware, ep: int, ridge: float, chosen: int) -> Record:
    if ep <= m.fabric.G or chosen < 1 or m.torus:
        return Record("ep.needed", None, "—", reason="EP stays inside one domain", source=SECTION)
    return number("ep.needed", expert_width(ridge, ep, m.fabric.G, chosen), "",
                  formula="α · (EP − G) · min(G/EP, 1/k_r)",
                  numbers=f"{ridge:,.0f} · ({ep} − {m.fabric.G}) · min({m.fabric.G}/{ep}, 1/{chosen})",
                  source="phalanx.cost.clocks.expert_width")  # fmt: skip


def _regime(m: Hardware, ep: int, chosen: int) -> Record:
    domain = m.fabric.G
    if m.block.E <= 1 or ep <= domain:
        text = f"inside one domain of {domain}: only the fast fabric counts"
    elif chosen * domain >= ep:
        text = f"few domains: k_r = {chosen} ≥ EP/G = {ep / domain:g}, so F > α · (EP − G)/k_r"
    else:
        text = f"many domains: EP/G = {ep / domain:g} > k_r = {chosen}, so F > G · α however large EP is"
    return Record("ep.regime", text, text, reason=text, source=SECTION)


def _meter(clocks: Clocks) -> Picture:
    longest = max(clocks.compute, clocks.network) or 1.0
    rows = [
        Bar("T_math", [BarPiece(clocks.compute / longest, "compute")], show(clocks.compute, "s")),
        Bar("T_comms", [BarPiece(clocks.network / longest, "expert")], show(clocks.network, "s")),
    ]
    return Picture("ep.meter", "expert parallelism, forward of one layer", bars(rows),
                   ("", "seconds of one layer"), [(r.name, r.text) for r in rows])  # fmt: skip


def _by_degree(m: Hardware, ep: int, routed: int) -> Picture:
    """Arithmetic over all-to-alls for every degree up to the number of experts."""
    degrees = [e for e in powers(max(routed, 2)) if e > 1]
    across = LogScale(1, max(degrees[-1], 4))
    ratios = [(e, _clocks(m, e).ratio) for e in degrees]
    points = [(across.at(e), RATIOS.at(min(r, 1e6))) for e, r in ratios]
    level = Curve([(0.0, RATIOS.at(1.0)), (1.0, RATIOS.at(1.0))], "ridge", "", dashed=True)
    marks = [
        Mark(across.at(e), "expert", "", RATIOS.at(min(r, 100.0))) for e, r in ratios if e == ep
    ]
    xs = [Tick(across.at(e), str(e)) for e in degrees]
    ys = [Tick(RATIOS.at(v), f"{v:g}×") for v in (0.01, 0.1, 1, 10, 100)]
    drawn = plot([level, Curve(points, "expert", "arithmetic over all-to-alls")], marks, (xs, ys),
                 ("EP", "above 1× messages hide"), 190)  # fmt: skip
    rows = [(str(e), f"{r:.3g}", m.where(e)) for e, r in ratios]
    return Picture("ep.plot", "expert parallelism by degree", drawn, ("EP", "ratio", "links"), rows)
