"""What the page asks for beside its live numbers, by name: the same with a server and without one."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qs

from phalanx.core.errors import PhalanxError
from phalanx.explore.board import Board
from phalanx.explore.copies import command_of, run_file_of
from phalanx.explore.documents import inputs_document, state_document
from phalanx.explore.live import View
from phalanx.explore.problems import BY_ID, grade
from phalanx.explore.state import Reading, State
from phalanx.explore.timelines import columns, drawn, pace_of

JSON, TEXT, COLUMNS = "application/json", "text/plain; charset=utf-8", "application/octet-stream"
OK, MISSING, CONFLICT = 200, 404, 409
LONGEST_MESSAGE = 64 * 1024
LONGEST_ANSWER = 100


class Answer(NamedTuple):
    """What comes back: as HTTP has it."""

    status: int
    kind: str
    body: bytes


def answer(name: str, query: str, board: Board) -> Answer:
    """The answer to one question of the page.

    Args:
        name: one of `NAMES`.
        query: of the URL: a state, and what the question needs besides.
        board: where panels come from.
    """
    return _ANSWERS[name](query, board)


def _document(found: object, status: int = OK) -> Answer:
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Answer(status, JSON, text.encode())


def _text(text: str, status: int = OK) -> Answer:
    return Answer(status, TEXT, text.encode())


def _state(query: str, board: Board) -> Answer:
    return _document(state_document(board, State.parse(query)))


def _inputs(_query: str, _board: Board) -> Answer:
    return _document(inputs_document())


def _timeline(query: str, _board: Board) -> Answer:
    """A drawn schedule as binary columns; `of` says which of the two."""
    reading = Reading(State.parse(query))
    which = "beside" if _first(query, "of") == "beside" else "schedule"
    sizes = [reading.whole(key) for key in ("p", "m", "v")]
    try:
        found = drawn(reading.text(which), *sizes, pace_of(reading))
    except PhalanxError as error:
        return _text(str(error), MISSING)
    return Answer(OK, COLUMNS, columns(found))


def _grade(query: str, _board: Board) -> Answer:
    """The grade of an answer to a worked problem."""
    problem = BY_ID.get(_first(query, "problem"))
    if problem is None:
        return _text(f"problem is one of {', '.join(BY_ID)}", MISSING)
    return _document(grade(problem, _first(query, "answer")[:LONGEST_ANSWER])._asdict())


def _copy(make: Callable[[State], str]) -> Callable[[str, Board], Answer]:
    def copied(query: str, _board: Board) -> Answer:
        try:
            return _text(make(State.parse(query)))
        except PhalanxError as error:
            return _text(f"# {error}", CONFLICT)

    return copied


def _first(query: str, key: str) -> str:
    """The first value of a key that is no input."""
    return parse_qs(query, keep_blank_values=True).get(key, [""])[0]


_ANSWERS: Mapping[str, Callable[[str, Board], Answer]] = {
    "state": _state,
    "inputs": _inputs,
    "timeline": _timeline,
    "grade": _grade,
    "command": _copy(command_of),
    "run": _copy(run_file_of),
}
NAMES = tuple(_ANSWERS)


def reply(view: View, text: str) -> str:
    """The answer to one message of an open page; a bad one is answered, and nothing ends.

    Args:
        view: what that page shows.
        text: JSON, as its script sent it.
    """
    try:
        if len(text) > LONGEST_MESSAGE:
            return json.dumps({"error": f"a message has at most {LONGEST_MESSAGE} characters"})
        message = json.loads(text)
        if not isinstance(message, dict):
            return json.dumps({"error": "a message is an object"})
        return json.dumps(view.answer(message), separators=(",", ":"))
    except (PhalanxError, ValueError, RecursionError) as error:
        return json.dumps({"error": str(error)})


def later(view: View) -> str | None:
    """What takes longer, once nothing newer waits; None where there is nothing.

    Args:
        view: what that page shows.
    """
    found = view.slow()
    return None if found is None else json.dumps(found, separators=(",", ":"))
