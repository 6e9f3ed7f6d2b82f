"""Part 6: switched fabrics: effective bandwidths, ridges, small corrections, and collectives."""

from phalanx.cost.clocks import tensor_width
from phalanx.cost.collectives import (
    Level,
    LinkRate,
    gather_bandwidth,
    in_network_seconds,
    ring_seconds,
)
from phalanx.cost.roofline import SwitchedFabric, domain_weights_floor, tensor_limit, weights_floor
from phalanx.explore.draw import Bar, BarPiece, LogScale, bars
from phalanx.explore.machine import machine
from phalanx.explore.presets import accelerators, chip_facts
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show
from phalanx.explore.state import Reading

SECTION = f"{BOOK}, The GPU Network Model"
SHOWN = ("h100-sxm", "h800-sxm", "h200-sxm", "b200", "gb200-nvl72", "a100-sxm-80gb", "mi300x")
ASKED = 16384  # GPUs of the book's example


def fabric(state: Reading) -> Panel:
    """Where the bounds land on this chip's switched fabric.

    Args:
        state: what is read.
    """
    m = machine(state)
    node, out = m.peak / m.local, domain_weights_floor(m.peak, m.fabric)
    egress = m.peak / m.fabric.egress
    domains = max(-(-m.dp * m.tp // m.fabric.G), 1)
    matrix = 2.0 * m.block.h * m.block.f
    two = tensor_limit(m.width, egress) + m.fabric.G
    records: list[Record] = [
        number("fab.node", node, "tokens", formula="C / W", numbers=f"{show(m.peak, 'FLOP/s')} / {show(m.local, 'B/s')}", source=SECTION),
        number("fab.egress", m.fabric.egress, "B/s", formula="G · W_dcn", numbers=f"{m.fabric.G} · {show(m.fabric.egress / m.fabric.G, 'B/s')}"),
        number("fab.egress_ridge", egress, "tokens", formula="C / (G · W_dcn)", source=SECTION),
        number("fab.out", out, "tokens", formula="C · max(1 / W, 1 / (G · W_dcn))", source="phalanx.cost.roofline.domain_weights_floor"),
        number("fab.domains", domains, "domains", formula="DP · TP / G", numbers=f"{m.dp:,} · {m.tp} / {m.fabric.G}"),
        number("fab.small", egress * (domains - 1) / domains, "tokens", formula="C / W_domain · (X − 1) / X",
               numbers=f"{egress:,.0f} · ({domains} − 1) / {domains}", source=SECTION),
        number("fab.small_max", m.peak / _gather(m.fabric, domains), "tokens",
               formula="C · max over levels of (D − 1) / (D · W)", source="phalanx.cost.collectives.gather_bandwidth"),
        number("fab.big", ASKED * m.block.sparsity * out, "tokens", formula="16,384 · E/k · floor",
               numbers=f"{ASKED:,} · {m.block.sparsity:g} · {out:,.0f}", source=SECTION),
        number("fab.pp", weights_floor(out, m.block.sparsity, p=m.pp), "tokens", formula="E/k · floor / PP",
               numbers=f"PP = {m.pp}", source=f"{BOOK}, What does Llama 3.1 405B do?"),
        number("fab.tp", tensor_limit(m.width, node), "ranks", formula="k·F · W / C", source=SECTION),
        number("fab.tp_two", two, "ranks", formula="k·F / α + G: (TP − G)/TP of the bytes leave a domain",
               numbers=f"{m.width:,} / {egress:,.0f} + {m.fabric.G}", source=SECTION),
        number("fab.tp16", tensor_width(egress, 2 * m.fabric.G, m.fabric.G), "", formula="α · (2·G − G)", source=SECTION),
        number("fab.S", matrix, "bytes", formula="2 · D · F", numbers=f"2 · {m.block.h:,} · {m.block.f:,}"),
        number("fab.gather_node", matrix / _gather(m.fabric, 1), "s", formula="S · (G − 1) / (G · W)",
               source="phalanx.cost.collectives.gather_bandwidth"),
        number("fab.gather_out", matrix / _gather(m.fabric, 32), "s", formula="S / W_domain, 32 domains",
               source="phalanx.cost.collectives.gather_bandwidth"),
        number("fab.ring", ring_seconds("all_reduce", matrix, m.fabric.G, LinkRate(0.0, m.local)), "s",
               formula="2 · (G − 1)/G · S / W", source="phalanx.cost.collectives.ring"),
        number("fab.sharp", in_network_seconds(matrix, LinkRate(0.0, m.local)), "s", formula="2 · S / (1.3 · W)",
               source="phalanx.cost.collectives.in_network_seconds"),
    ]  # fmt: skip
    return Panel(tuple(records), (_table(state), _bandwidths(state)))


def _gather(fabric: SwitchedFabric, domains: int) -> float:
    """Bytes/s of an all-gather in one domain, or over several."""
    levels = [Level(fabric.G, fabric.local)] if fabric.G > 1 else []
    if domains > 1:
        levels.append(Level(domains, fabric.egress))
    return gather_bandwidth(tuple(levels))


def _table(state: Reading) -> Picture:
    chosen, known = state.text("chip"), {device.name for device in accelerators()}
    rows = []
    for name in SHOWN:
        if name not in known:
            continue
        facts = chip_facts(name)
        fabric = SwitchedFabric(int(facts["G"]), facts["W"], facts["Wn"] * facts["G"])
        peak = facts["C"]
        rows.append([
            name, str(int(facts["G"])), show(fabric.local, "B/s"), show(fabric.egress, "B/s"),
            f"{peak / fabric.local:,.0f}", f"{peak / fabric.egress:,.0f}",
            f"{domain_weights_floor(peak, fabric):,.0f}", "loaded" if name == chosen else "",
        ])  # fmt: skip
    return Picture("fab.chips", "effective bandwidths of switched fabrics", "", (), rows)


def _bandwidths(state: Reading) -> Picture:
    """What an all-gather sees, level by level."""
    m = machine(state)
    found = [("in one domain", _gather(m.fabric, 1))]
    found += [(f"over {n} domains", _gather(m.fabric, n)) for n in (2, 4, 32)]
    scale = LogScale(1e9, 3e12)
    rows = [Bar(name, [BarPiece(scale.at(min(rate, 3e12)), "network")], show(rate, "B/s") if rate < 1e15 else "no limit")
            for name, rate in found]  # fmt: skip
    return Picture("fab.levels", "bandwidth that an all-gather sees", bars(rows), ("group", "bytes/s"),
                   [(row.name, row.text) for row in rows])  # fmt: skip
