"""Bytes against the plan: what rank 0 sent in one step, message by message."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from phalanx.core.message import Message


class ComparedMessage(NamedTuple):
    """One kind of message, as sent and as planned; bytes of all of them in a step.

    Attributes:
        axis: of the mesh.
        collective: the operation.
        purpose: what it is for.
        sent: bytes of full vectors; None where nothing says what was sent.
        planned: likewise; None where nothing was planned.
    """

    axis: str
    collective: str
    purpose: str
    sent: int | None
    planned: int | None

    @property
    def equal(self) -> bool | None:
        """Whether both are the same to the byte; None where one is not known."""
        return None if self.sent is None or self.planned is None else self.sent == self.planned

    def to_dict(self) -> dict[str, Any]:
        """One entry of `traffic`, as `--json` prints it."""
        return {
            "axis": self.axis,
            "collective": self.collective,
            "purpose": self.purpose,
            "bytes": self.sent,
            "planned_bytes": self.planned,
            "equal": self.equal,
        }


def compare(
    sent: Iterable[Message] | None, planned: Iterable[Message] | None
) -> tuple[ComparedMessage, ...]:
    """Hold what was sent against what was planned.

    Args:
        sent: in one step; None where nothing says.
        planned: likewise.

    Example:
        >>> one = Message("data", "all_reduce", "gradients", bytes=4096)
        >>> [found.equal for found in compare([one], [one._replace(times=2)])]
        [False]
    """
    ours, theirs = _sums(sent), _sums(planned)
    return tuple(
        ComparedMessage(
            *key,
            None if sent is None else ours.get(key, 0),
            None if planned is None else theirs.get(key, 0),
        )
        for key in sorted(ours.keys() | theirs.keys())
    )


def _sums(messages: Iterable[Message] | None) -> dict[tuple[str, str, str], int]:
    sums: dict[tuple[str, str, str], int] = {}
    for each in messages or ():
        key = each.axis, each.collective, each.purpose
        sums[key] = sums.get(key, 0) + each.bytes * each.times
    return sums
