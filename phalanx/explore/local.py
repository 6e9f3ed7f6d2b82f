"""The page without a server: what its worker calls, in a Python that runs in the browser."""

import json

from phalanx.explore.answers import NAMES, answer, later, reply
from phalanx.explore.board import Board
from phalanx.explore.live import View
from phalanx.explore.page import notice
from phalanx.explore.pauses import spare_drags
from phalanx.explore.searching import found_by
from phalanx.explore.state import State

NO_RUNS = (
    "<p>This page has no server, so it opens no folders. <code>phalanx explore runs/NAME</code> does, "
    "on the machine where the run lies.</p>"
)
BOARD = Board()
VIEW = View(BOARD)
spare_drags()  # the worker runs nothing else


def live(text: str) -> str:
    """The answer to one live message.

    Args:
        text: JSON.
    """
    return reply(VIEW, text)


def slow() -> str | None:
    """What takes longer, once nothing newer waits."""
    return later(VIEW)


def asked(what: str) -> tuple[int, bytes]:
    """The status and body of an answer.

    Args:
        what: a name and a query, as `grade?problem=q1&answer=13B`.
    """
    name, _, query = what.partition("?")
    if name in NAMES:
        found = answer(name, query, BOARD)
        return found.status, found.body
    others = {
        "plan": lambda: json.dumps(found_by(query)),
        "runs": lambda: json.dumps({"list": NO_RUNS, "view": ""}),
        "notice": lambda: notice(state := State.parse(query), list(state.problems)),
    }
    if name not in others:
        return 404, f"there is no {name}".encode()
    return 200, others[name]().encode()
