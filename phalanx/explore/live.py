"""What happens between two frames: an edit becomes a state, and a state what has changed on the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import UsageError
from phalanx.explore.board import SLOW, Board
from phalanx.explore.drags import DRAGS
from phalanx.explore.inputs import BY_KEY, INPUTS, fraction_of, show_plain
from phalanx.explore.page import LOADS, Shown, rows_html, shown_value, table_html
from phalanx.explore.records import Record
from phalanx.explore.state import State

MOST_SEEN = 64


def edited(state: State, edit: Mapping[str, Any]) -> State:
    """The state after one edit.

    Args:
        state: before.
        edit: `{"steps": [key, n]}`, `{"typed": [key, text]}`, `{"set": "tp=8;B=3M"}`,
            `{"drag": [picture, fraction]}` or `{"edge": [key, "low"]}`.

    Raises:
        UsageError: there is no such edit, or it names no input.
    """
    match edit:
        case {"steps": [str(key), int(n)]} if key in BY_KEY:
            return state.moved(key, n)
        case {"typed": [str(key), str(text)]} if key in BY_KEY:
            return state.typed(key, text)
        case {"edge": [str(key), str(side)]} if key in BY_KEY:
            item = BY_KEY[key]
            return state.typed(key, show_plain(item.low if side == "low" else item.high))
        case {"set": str(pairs)}:
            return after_set(state, pairs)
        case {"drag": [str(name), float(at) | int(at)]} if name in DRAGS:
            return state.set(DRAGS[name](state, min(max(float(at), 0.0), 1.0)))
    raise UsageError("an edit is steps, typed, edge, set or drag, of an input that there is")


def after_set(state: State, pairs: str) -> State:
    """The state with several inputs set: `tp=8;zero=3`.

    Args:
        state: before.
        pairs: of keys and values.
    """
    for pair in pairs.split(";"):
        key, _, text = pair.partition("=")
        if key in BY_KEY:
            state = state.typed(key, text)
    return state


@dataclass
class View:
    """What one open page shows, so that only what differs is sent to it.

    Attributes:
        board: where panels come from.
        sent: texts by id, as they stand on the page.
    """

    board: Board
    sent: dict[str, Any] = field(default_factory=dict)
    _last: tuple[State, Sequence[str], Sequence[str]] | None = None

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What a page has to change after a message of its script.

        Args:
            message: `n`, `state` (a query), and perhaps `edit`, `see` (panels), `open` (tables),
                `why` (a record) and `pin` (a query).

        Raises:
            UsageError: the message is none of ours.
        """
        state = State.parse(_text(message, "state"))
        if message.get("edit") is not None:
            edit = message["edit"]
            if not isinstance(edit, Mapping):
                raise UsageError("an edit is an object")
            state = edited(state, edit)
        problems, state = state.problems, State(state.chosen, state.unknown)
        seen, opened = _names(message, "see"), _names(message, "open")
        slow = [panel for part in seen for panel in SLOW.get(part, ())]
        self._last = (state, slow, opened) if slow else None
        shown = self.board.shown(state, seen)
        reply: dict[str, Any] = {
            "n": message.get("n"),
            "state": state.query(),
            "inputs": self._changed("i", _inputs(state)),
            "problems": list(problems),
            "flips": self._flips(shown.records),
            **self._parts(shown, opened),
        }
        why = message.get("why")
        if isinstance(why, str) and why in shown.records:
            reply["card"] = {"id": why, **shown.records[why].to_dict()}
        if isinstance(message.get("pin"), str):
            reply["pins"] = self._pins(_text(message, "pin"), seen, shown.records)
        return reply

    def slow(self) -> dict[str, Any] | None:
        """What takes longer, once nothing newer waits; None where there is nothing."""
        if self._last is None:
            return None
        (state, panels, opened), self._last = self._last, None
        return self._parts(self.board.shown(state, panels), opened)

    def _parts(self, shown: Shown, opened: Sequence[str]) -> dict[str, Any]:
        """Records, pictures and open tables that have changed."""
        pictures = shown.pictures.values()
        tables = {p.id: table_html(p) for p in pictures if p.id in opened}
        return {
            "records": self._changed("r", {r.id: _face(r) for r in shown.records.values()}),
            "pictures": self._changed("p", {p.id: _drawn(p) for p in pictures}),
            "tables": self._changed("t", tables),
        }

    def _changed(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those that the page does not have yet; they count as sent."""
        found = {id: value for id, value in values.items() if self.sent.get(kind + id) != value}
        self.sent |= {kind + id: value for id, value in found.items()}
        return found

    def _flips(self, records: Mapping[str, Record]) -> list[str]:
        """Verdicts that are others than before, in words, for a screen reader."""
        found = []
        for record in records.values():
            if record.verdict in ("good", "bad"):
                before = self.sent.get("v" + record.id)
                if before is not None and before != record.text:
                    found.append(f"{record.text}: {record.reason}")
                self.sent["v" + record.id] = record.text
        return found

    def _pins(
        self, query: str, seen: Sequence[str], records: Mapping[str, Record]
    ) -> dict[str, str]:
        """What records were in a pinned state, where that was something else."""
        pinned = self.board.shown(State.parse(query), seen).records
        return {
            id: pinned[id].text
            for id, record in records.items()
            if id in pinned and pinned[id].text != record.text
        }


def _face(record: Record) -> list[str]:
    """What a page prints of a record."""
    return [record.text, record.verdict, record.reason]


def _drawn(picture: Any) -> str:
    return rows_html(picture) if picture.id in LOADS else str(picture.svg)


def _inputs(state: State) -> dict[str, list[Any]]:
    found = {}
    for item in INPUTS:
        value = state[item.key]
        place = round(fraction_of(item, value), 4)
        found[item.key] = [shown_value(item, value), show_plain(value), place]
    return found


def _text(message: Mapping[str, Any], key: str) -> str:
    value = message.get(key, "")
    if not isinstance(value, str):
        raise UsageError(f"{key} is a text")
    return value


def _names(message: Mapping[str, Any], key: str) -> list[str]:
    value = message.get(key, [])
    if not isinstance(value, list) or len(value) > MOST_SEEN:
        raise UsageError(f"{key} is a list of at most {MOST_SEEN} names")
    return [str(name) for name in value]
