"""A plan of faults: which point, which step, which rank, which attempt, and what happens there."""

import errno
import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from phalanx.core.errors import UsageError, unknown
from phalanx.trainer.faults.points import POINTS

ACTIONS: dict[str, str] = {
    "signal": "`value` is its name, such as SIGKILL: sent by the process to itself",
    "launcher": "`value` is the name of a signal, sent to the process that started the ranks",
    "kill later": "SIGKILL `value` seconds after this point, wherever the process then is",
    "exception": "a RuntimeError that nobody expects",
    "sleep": "`value` seconds, others may run",
    "loop": "busy in Python for `value` seconds",
    "gil": "asleep for `value` seconds while no other thread of the process may run",
    "exit": "the process ends at once with exit code `value`",
    "error": "an OSError; `value` is its name, such as ENOSPC or EIO",
    "flip": "bit `bit` of element `element` of the tensor whose name holds `tensor`",
    "set": "that element becomes `value`, such as nan",
    "skip": "the caller leaves out what it was about to do, such as a message",
    "double": "the caller does it twice",
    "short": "the caller writes only half of it",
}
NUMBERED = ("sleep", "loop", "gil", "exit", "kill later")
OBEYED = ("skip", "double", "short")  # by whoever calls the point


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        point: where, one of `POINTS`.
        action: what, one of `ACTIONS`.
        step: at which step, counted from 0 as the point counts it; None at any.
        rank: on which rank; None on every.
        attempt: at which start of the run; without it a fault would come again after a restart.
            None at every.
        times: how often at most, in one attempt.
        after: how often the process passes there first, in that attempt, and nothing happens.
        purpose: of the message; empty for any.
        value: of the action.
        tensor: part of the name of one, for `flip` and `set`.
        element: of that tensor.
        bit: of that element, for `flip`, from 0, the lowest.
    """

    point: str
    action: str
    step: int | None = None
    rank: int | None = None
    attempt: int | None = 0
    times: int = 1
    after: int = 0
    purpose: str = ""
    value: str | float = ""
    tensor: str = ""
    element: int = 0
    bit: int = 0

    def __post_init__(self) -> None:
        """Reject what can never happen: a fault that does not come proves nothing."""
        if self.point not in POINTS:
            raise unknown("point", self.point, POINTS)
        if self.action not in ACTIONS:
            raise unknown("action", self.action, ACTIONS)
        signals = signal.Signals.__members__
        named = {"signal": signals, "launcher": signals, "error": errno.errorcode.values()}
        if self.action in named and self.value not in named[self.action]:
            raise unknown(self.action, str(self.value), named[self.action])
        if self.action in NUMBERED and isinstance(self.value, str):
            raise UsageError(f"{self.action} at {self.point} needs a number as value")
        if self.action in ("flip", "set") and not self.tensor:
            raise UsageError(f"{self.action} at {self.point} needs the name of a tensor")


@dataclass(frozen=True)
class FaultPlan:
    """Faults, in the order in which they are tried at a point.

    Attributes:
        faults: all of them.
        hits: a folder in which each rank notes the points that it comes by, and what happened to
            it there; empty for none.
    """

    faults: tuple[Fault, ...] = ()
    hits: str = ""

    def to_json(self) -> str:
        """The document that `from_json` reads."""
        default = {f.name: f.default for f in fields(Fault)}
        shown = [
            {key: value for key, value in asdict(fault).items() if value != default[key]}
            for fault in self.faults
        ]
        return json.dumps({"faults": shown, "hits": self.hits})

    @classmethod
    def from_json(cls, text: str) -> "FaultPlan":
        """Read a plan.

        Raises:
            UsageError: it is no plan, or names a point, an action or a key that is not known.
        """
        try:
            document = json.loads(text)
            faults = tuple(_fault(row) for row in document.get("faults", ()))
            return cls(faults, str(document.get("hits", "")))
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"this is no plan of faults: {error}") from error


def _fault(row: Mapping[str, Any]) -> Fault:
    known = {f.name for f in fields(Fault)}
    for key in row:
        if key not in known:
            raise unknown("key of a fault", key, known)
    return Fault(**row)
