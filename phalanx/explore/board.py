"""The panels of the page by name, computed anew only where what they read has changed."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from phalanx.core.errors import PhalanxError
from phalanx.explore.inputs import Value
from phalanx.explore.page import PARTS, PLACE, Shown, text_of
from phalanx.explore.panels.experts import experts
from phalanx.explore.panels.fabric import fabric
from phalanx.explore.panels.mixed import mixed
from phalanx.explore.panels.notation import notation
from phalanx.explore.panels.ours import ours
from phalanx.explore.panels.pipeline import pipeline, schedules
from phalanx.explore.panels.published import published
from phalanx.explore.panels.roofline import data, fsdp, tensor, two_clocks
from phalanx.explore.panels.schemes import schemes
from phalanx.explore.panels.systems import systems
from phalanx.explore.panels.worked import worked
from phalanx.explore.records import Panel, Picture, Record
from phalanx.explore.state import Reading, State

Maker = Callable[[Reading], Panel]

PANELS: Mapping[str, Maker] = {
    "notation": notation,
    "schemes": schemes,
    "clocks": two_clocks,
    "data": data,
    "fsdp": fsdp,
    "tensor": tensor,
    "mixed": mixed,
    "experts": experts,
    "pipeline": pipeline,
    "schedules": schedules,
    "fabric": fabric,
    "problems": worked,
    "systems": systems,
    "published": published,
    "estimate": ours,
}
SLOW: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("schedules",),
    "systems": ("published",),
    "plan": ("estimate",),
}  # of a part; they follow later
KEPT = 64  # states of a panel


class Board:
    """Computes panels, and keeps the newest ones by the inputs that they read."""

    def __init__(self, panels: Mapping[str, Maker] = PANELS) -> None:
        self._panels = panels
        self._reads: dict[str, set[str]] = {name: set() for name in panels}
        self._kept: dict[str, OrderedDict[tuple[Value, ...], Panel]] = {
            name: OrderedDict() for name in panels
        }
        self._lock = Lock()

    def panel(self, name: str, state: State) -> Panel:
        """One panel for one state.

        Args:
            name: of the panel.
            state: of the page.
        """
        with self._lock:
            kept, reads = self._kept[name], self._reads[name]
            key = tuple(state[item] for item in sorted(reads))
            if reads and key in kept:
                kept.move_to_end(key)
                return kept[key]
            reading = Reading(state)
            found = _made(name, self._panels[name], reading)
            if not reading.seen <= reads:  # what was kept says too little about what it depends on
                reads |= reading.seen
                kept.clear()
            kept[tuple(state[item] for item in sorted(reads))] = found
            if len(kept) > KEPT:
                kept.popitem(last=False)
            return found

    def shown(self, state: State, names: Iterable[str] | None = None) -> Shown:
        """Records and pictures of some panels.

        Args:
            state: of the page.
            names: of the panels; None for all.
        """
        records: dict[str, Record] = {}
        pictures: dict[str, Picture] = {}
        for name in self._panels if names is None else names:
            if name in self._panels:
                panel = self.panel(name, state)
                records |= {record.id: record for record in panel.records}
                pictures |= {picture.id: picture for picture in panel.pictures}
        return Shown(state, records, pictures)


def _made(name: str, maker: Maker, reading: Reading) -> Panel:
    """A panel; where the state cannot be, its places say so in words."""
    try:
        return maker(reading)
    except (PhalanxError, ArithmeticError) as error:
        return cannot_be(name, str(error))


def cannot_be(name: str, why: str) -> Panel:
    """A panel without numbers: every place says why there is none.

    Args:
        name: of the panel.
        why: in words.
    """
    if name not in {part.name for part in PARTS}:
        return Panel(())
    found = [(match[1], match[2]) for match in PLACE.finditer(text_of(name))]
    records = {
        id: Record(id, None, "—" if kind == "r" else "cannot be", verdict="bad", reason=why)
        for kind, id in found
        if kind in "rvw"
    }
    for kind, id in found:
        if kind == "v":
            records[id] = records[id]._replace(text="cannot be")
    pictures = [
        Picture(id, why, "", ("",), [(why,)]) for kind, id in found if kind in ("p", "x", "t")
    ]
    return Panel(tuple(records.values()), tuple(pictures))
