"""The model, cluster and layout of a state, as the values that the planner takes."""

from dataclasses import replace

from phalanx.catalog import load
from phalanx.core.cluster import Cluster
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.explore.presets import FORMAT, chip_facts, model_facts
from phalanx.explore.state import Reading

KEYS = ("dp", "pp", "tp", "cp", "ep", "zero", "mb")  # of a layout, which are inputs of their own


def shape_of(state: Reading) -> ModelShape:
    """The model: one of the catalog, with the sizes that were changed.

    Args:
        state: what is read.

    Raises:
        UsageError: no model can have such sizes.
    """
    name = state.text("model")
    shape, facts = load.model(name), model_facts(name)
    sizes = {key: state.whole(key) for key in facts}
    changed = {key for key, value in sizes.items() if value != facts[key]}
    if not changed:
        return shape
    heads = sizes["heads"]
    groups = shape.kv_heads if heads % shape.kv_heads == 0 else heads
    common = replace(
        shape, name="custom", layers=sizes["L"], hidden=sizes["D"], heads=heads, kv_heads=groups,
        dense_layers=min(shape.dense_layers, sizes["L"]),
    )  # fmt: skip
    if sizes["E"] <= 1:
        return replace(common, ffn=sizes["F"], experts=0, top_k=0, shared_experts=0, moe_ffn=0)
    return replace(
        common,
        experts=sizes["E"] - sizes["s"],
        top_k=sizes["k"] - sizes["s"],
        shared_experts=sizes["s"],
        moe_ffn=sizes["F"],
        expert_groups=1,
        groups_kept=1,
    )


def cluster_of(state: Reading) -> Cluster:
    """The devices: as many as the degrees need, of the chip with the rates that were changed.

    Args:
        state: what is read.

    Raises:
        UsageError: no such cluster can be built.
    """
    name = state.text("chip")
    device, facts = load.accelerator(name), chip_facts(name)
    count = state.whole("dp") * state.whole("tp") * state.whole("pp") * state.whole("cp")
    rates = {key: state.number(key) for key in ("C", "W", "Wn", "M", "G")}
    if not any(rates[key] != facts[key] for key in rates):
        return load.cluster(f"{name}x{count}")
    peaks = tuple((f, p * rates["C"] / facts["C"]) for f, p in device.peaks)
    link = device.domain.link
    fast, slow = rates["W"] / facts["W"], rates["Wn"] / facts["Wn"]
    domain = replace(
        device.domain,
        size=int(rates["G"]),
        link=replace(link, bandwidth=link.bandwidth * fast, sustained=link.sustained * fast),
    )
    net = device.network
    network = replace(net, bandwidth=net.bandwidth * slow, sustained=net.sustained * slow)
    changed = replace(device, peaks=peaks, memory=rates["M"], domain=domain, network=network)
    return Cluster(name=f"{name}-changed-x{count}", accelerator=changed, count=count)


def layout_of(state: Reading) -> Layout:
    """The layout: degrees and keys that are inputs, then what stands under other keys.

    Args:
        state: what is read.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
    """
    pairs = {key: str(state.whole(key)) for key in KEYS}
    pairs["recompute"] = state.text("recompute")
    pairs["schedule"] = state.text("schedule")
    if state.whole("v"):
        pairs["v"] = str(state.whole("v"))
    pairs["precision"] = FORMAT
    for item in state.text("more").split():
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{item!r} is no key of a layout; write key=value")
        pairs[key] = value
    return Layout.parse(" ".join(f"{key}={value}" for key, value in pairs.items()))


def batch_of(state: Reading) -> int:
    """Sequences of one step: the nearest number that the layout's replicas can share.

    Args:
        state: what is read.
    """
    share = state.whole("dp") * state.whole("mb")
    wanted = state.number("B") / state.whole("seq")
    return max(round(wanted / share), 1) * share


def inputs_of(layout: Layout) -> dict[str, int | str]:
    """The inputs that a layout stands for: the way back from a line to the page.

    Args:
        layout: that is loaded.
    """
    values: dict[str, int | str] = {key: getattr(layout, key) for key in KEYS}
    values |= {"schedule": layout.schedule, "v": layout.v}
    simple = str(layout.recompute) in ("none", "selective", "full")
    values["recompute"] = str(layout.recompute) if simple else "none"
    own = {*KEYS, "schedule", "v", "precision", *(("recompute",) if simple else ())}
    rest = [item for item in str(layout).split() if item.partition("=")[0] not in own]
    return values | {"more": " ".join(rest)}
