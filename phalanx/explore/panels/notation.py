"""Part 1: what the letters stand for right now, and which models and chips can be loaded."""

from phalanx.core.errors import PhalanxError
from phalanx.cost.clocks import estimated_params, stack_params
from phalanx.explore.asked import shape_of
from phalanx.explore.machine import machine
from phalanx.explore.presets import accelerators, chip_facts, model_facts, models
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show, word
from phalanx.explore.state import Reading

SECTION = f"{BOOK}, What Do We Mean By Scaling?"
KNOWN_MODELS = (
    "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b", "llama-2-13b", "deepseek-v3", "gemma-7b",
    "gpt-oss-120b", "gpt-3-175b", "mixtral-8x7b", "qwen3-235b-a22b",
)  # fmt: skip
KNOWN_CHIPS = (
    "h100-sxm", "h800-sxm", "h200-sxm", "b200", "gb200-nvl72", "a100-sxm-80gb", "tpu-v5p", "tpu-v5e",
    "tpu-v6e", "mi300x",
)  # fmt: skip


def notation(state: Reading) -> Panel:
    """Sizes and rates, and the few numbers that follow from them at once.

    Args:
        state: what is read.
    """
    m = machine(state)
    layers, h, f, E = state.whole("L"), m.block.h, m.block.f, m.block.E
    cp = state.whole("cp")
    chips = m.dp * m.tp * m.pp * cp
    moved = stack_params(m.block, layers)
    held = estimated_params(m.block, layers)
    records = [
        number("n.P", moved, "params", formula="2 · D · E · F · L",
               numbers=f"2 · {h:,} · {E:,} · {f:,} · {layers}", source=SECTION),
        number("n.Pw", held, "params", formula="3 · D · E · F · L + 2.5 · D² · L",
               numbers=f"3 · {h:,} · {E:,} · {f:,} · {layers} + 2.5 · {h:,}² · {layers}", source=SECTION),
        _exact(state),
        number("n.chips", chips, "chips", formula="DP · TP · PP · CP", numbers=f"{m.dp:,} · {m.tp} · {m.pp} · {cp}"),
        number("n.per_chip", m.tokens / chips, "tokens", formula="B / (DP · TP · PP · CP)",
               numbers=f"{m.tokens:,.0f} / {chips:,}"),
        number("n.per_replica", m.tokens / m.dp, "tokens", formula="B / DP",
               numbers=f"{m.tokens:,.0f} / {m.dp:,}"),
        number("n.ridge", m.peak / m.local, "FLOP/B", formula="C / W_ici",
               numbers=f"{show(m.peak, 'FLOP/s')} / {show(m.local, 'B/s')}", source=SECTION),
        number("n.routed", m.block.E - m.shared, "experts", formula="E − s", numbers=f"{E} − {m.shared}"),
        _fabric(m.torus, m.fabric.G),
        _impossible(state),
    ]  # fmt: skip
    return Panel(tuple(records), (_models(state), _chips(state)))


def _exact(state: Reading) -> Record:
    """Parameters of the model as the catalog has it, with all that a block consists of."""
    try:
        shape = shape_of(state)
    except PhalanxError as error:
        return word("n.params", "no such model", reason=str(error), verdict="bad")
    return number("n.params", shape.params(), "params", formula="sum over the operators of the model",
                  source="phalanx.ModelShape.params, which the trainer's own count is held against")  # fmt: skip


def _fabric(torus: int, domain: int) -> Record:
    text = (
        f"a torus of {torus} axes"
        if torus
        else f"switched domains of {domain} chips, joined by a network"
    )
    return word("n.fabric", text, reason=text, source="phalanx clusters")


def _impossible(state: Reading) -> Record:
    """What cannot be, in words."""
    heads, tp, ep = state.whole("heads"), state.whole("tp"), state.whole("ep")
    E, k, s = (state.whole(key) for key in ("E", "k", "s"))
    dp, pp, layers = state.whole("dp"), state.whole("pp"), state.whole("L")
    wrong = [
        (heads % tp > 0, f"TP = {tp} does not divide {heads} heads"),
        (k > E, f"a token cannot visit {k} of {E} experts"),
        (s >= k and E > 1, f"{s} shared experts leave none of {k} to choose"),
        (ep > max(E - s, 1), f"EP = {ep} is more than {max(E - s, 1)} routed experts"),
        (ep > dp, f"EP = {ep} borrows its ranks from DP = {dp}"),
        (pp > layers, f"PP = {pp} is more than {layers} layers"),
    ]
    found = [text for is_wrong, text in wrong if is_wrong]
    if not found:
        return word(
            "n.possible", "can be", verdict="good", reason="every degree divides what it splits"
        )
    return word(
        "n.possible", "cannot be: " + "; ".join(found), verdict="bad", reason="; ".join(found)
    )


def _models(state: Reading) -> Picture:
    chosen = state.text("model")
    rows = [_model_row(name, chosen) for name in KNOWN_MODELS if name in {m.name for m in models()}]
    return Picture("n.models", "models of the catalog", "", (), rows)


def _model_row(name: str, chosen: str) -> list[str]:
    facts = model_facts(name)
    sizes = [f"{facts[key]:,}" for key in ("D", "F", "L", "E", "k", "heads")]
    shape = next(shape for shape in models() if shape.name == name)
    return [name, *sizes, show(shape.params(), "params"), "loaded" if name == chosen else ""]


def _chips(state: Reading) -> Picture:
    chosen = state.text("chip")
    known = {device.name for device in accelerators()}
    rows = [_chip_row(name, chosen) for name in KNOWN_CHIPS if name in known]
    return Picture("n.chips_table", "accelerators of the catalog", "", (), rows)


def _chip_row(name: str, chosen: str) -> list[str]:
    facts = chip_facts(name)
    rates = [show(facts["C"], "FLOP/s"), show(facts["W"], "B/s"), show(facts["Wn"], "B/s")]
    rest = [show(facts["M"], "bytes"), f"{facts['G']:,}", f"{facts['C'] / facts['W']:,.0f}"]
    return [name, *rates, *rest, "loaded" if name == chosen else ""]
