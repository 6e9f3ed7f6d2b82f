"""The JSON answers of the explorer: the same for a script, for curl and for `--json`."""

from typing import Any

from phalanx.explore.board import Board
from phalanx.explore.inputs import INPUTS, default_of
from phalanx.explore.state import State

SCHEMA = 1


def state_document(board: Board, state: State) -> dict[str, Any]:
    """Every record of a state, as `GET /api/v1/state` and `phalanx explore --json` give it.

    Args:
        board: where panels come from.
        state: of the page.
    """
    shown = board.shown(state)
    return {
        "schema": SCHEMA,
        "state": state.query(),
        "inputs": {item.key: state[item.key] for item in INPUTS},
        "unknown": dict(state.unknown),
        "problems": list(state.problems),
        "records": {id: record.to_dict() for id, record in shown.records.items()},
    }


def inputs_document() -> dict[str, Any]:
    """What can be changed, as `GET /api/v1/inputs` gives it."""
    first = State()
    defaults = {
        item.key: default_of(item.key, str(first["model"]), str(first["chip"])) for item in INPUTS
    }
    return {
        "schema": SCHEMA,
        "inputs": [{**item.to_dict(), "default": defaults[item.key]} for item in INPUTS],
    }
