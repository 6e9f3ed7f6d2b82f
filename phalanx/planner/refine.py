"""The second stage of a search: keys that cost or save little, varied on what is near the front.

The first stage goes through every mesh, sharding, schedule and micro-batch, with the recomputation
of the papers. The keys of this stage multiply them by thousands, and each changes a price by a few
per cent; so they are varied on the fastest layouts that fit, and on the fastest of those that miss
the memory by little. That is not complete: a layout that is far from the front, or far too large,
might overtake with several of them at once. Prices are those of `planner/prices.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.offload import Offload
from phalanx.core.recompute import Recompute
from phalanx.cost.table import Booleans, Floats
from phalanx.planner.prices import price_layouts
from phalanx.planner.space import COMPLETE, Limits, base_layout
from phalanx.planner.workload import Workload
from phalanx.schedules.layouts import spec_of

# The values that are tried of each key, beside the one that a layout has.
TRIED: dict[str, tuple[object, ...]] = {
    "logits": (1024,),
    "reshard": (False,),
    "recompute": tuple(
        Recompute.parse(word)
        for word in ("norms", "activation", "norms+activation", "mlp", "full:2", "full:4")
    ),
    "context": ("gather", "ulysses"),
    "offload": (Offload.parse("activations"), Offload.parse("optimizer")),
    "optimistic": (True,),
    "compile": (True,),
}
SEARCHED_KEYS = (*COMPLETE, *(key for key in TRIED if key not in COMPLETE))
ROUNDS = 3  # keys that may change at once
KEPT = 48  # layouts that go on to the next round
GAIN = 1e-3  # share of a step below which a key is left at its default


class Refined(NamedTuple):
    """A layout that the second stage of a search has made.

    Attributes:
        seconds: of a step, by the closed formulas.
        layout: with the keys that were varied.
        origin: place of the layout that it was made of.
    """

    seconds: float
    layout: Layout
    origin: int


def refine(
    workload: Workload, limits: Limits, fitting: Sequence[Layout], missing: Sequence[Layout]
) -> list[Refined]:
    """Layouts that are faster than what they are made of, or fit where it does not.

    Args:
        workload: what is trained, and on what.
        limits: allowed values by key.
        fitting: the fastest that fit.
        missing: the fastest that miss the memory by little.

    Returns:
        The best of each origin, where it gains something; origins count `fitting` first.
    """
    origins = [*fitting, *missing]
    if not origins:
        return []
    seconds = price_layouts(workload, origins).seconds
    bars = np.where(np.arange(len(origins)) < len(fitting), seconds * (1 - GAIN), np.inf)
    best: dict[int, Refined] = {}
    front = list(enumerate(origins))
    for _ in range(ROUNDS):
        tried = list(_distinct(_changes(limits, front)))
        if not tried:
            break
        prices = price_layouts(workload, [layout for _, layout in tried])
        runs = prices.allowed & (prices.peaks <= workload.capacity)
        for place in np.flatnonzero(runs).tolist():
            origin, layout = tried[place]
            time = float(prices.seconds[place])
            known = best.get(origin)
            if time < (bars[origin] if known is None else known.seconds * (1 - GAIN)):
                best[origin] = Refined(time, layout, origin)
        front = [tried[i] for i in _promising(prices.seconds, prices.allowed)]
    return sorted(best.values(), key=lambda refined: refined.seconds)


def _promising(seconds: Floats, allowed: Booleans) -> list[int]:
    """The fastest that may run, whether they fit yet or not."""
    order = np.argsort(np.where(allowed, seconds, np.inf), kind="stable")[:KEPT]
    return [int(place) for place in order if np.isfinite(seconds[place])]


def _distinct(found: Iterable[tuple[int, Layout]]) -> Iterator[tuple[int, Layout]]:
    seen: set[Layout] = set()
    for origin, layout in found:
        if layout not in seen:
            seen.add(layout)
            yield origin, layout


def _changes(limits: Limits, front: Iterable[tuple[int, Layout]]) -> Iterator[tuple[int, Layout]]:
    """Every layout with one more key at another value that means something there."""
    default = base_layout(limits)
    for origin, layout in front:
        for key, values in TRIED.items():
            if key != "recompute" and getattr(layout, key) != getattr(default, key):
                continue  # changed already
            for value in values:
                allowed = key not in limits or value in limits[key]
                if allowed and value != getattr(layout, key) and _matters(layout, key):
                    yield origin, replace(layout, **{key: value})  # type: ignore[arg-type]  # of TRIED


def _matters(layout: Layout, key: str) -> bool:
    """Whether a key can change anything of a layout."""
    match key:
        case "reshard":
            return layout.zero_stage == 3
        case "context":
            return layout.cp > 1
        case "compile":
            return not spec_of(layout).splits_backward
        case "optimistic":
            return layout.pp > 1
        case _:
            return True
