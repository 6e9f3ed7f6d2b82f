"""A rule says which rows of a table cannot be, and of one layout why not and what works."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.cost.table import Booleans, Table


class Scope(Enum):
    """Which programs a rule binds."""

    EVERY = "every program"
    OURS = "the trainer of this package"
    OTHERS = "every other program"

    def binds(self, *, ours: bool) -> bool:
        """Whether it binds our trainer, or another program."""
        return self is Scope.EVERY or (self is Scope.OURS) is ours


@dataclass(frozen=True)
class Rule:
    """Something that clashes, beside the feature that it belongs to.

    Attributes:
        reason: in a few words without numbers, by which a search counts.
        keys: the keys of a layout that decide; a search asks as soon as it knows them.
        clashes: of a table, which rows cannot be.
        says: of a run that clashes, the numbers and the nearest that works.
        scope: which programs it binds.
    """

    reason: str
    keys: frozenset[str]
    clashes: Callable[[Table], Booleans]
    says: Callable[[Run], str]
    scope: Scope = Scope.EVERY


def said(attempt: Callable[[], object]) -> str:
    """What an attempt is refused with; empty where it is not."""
    try:
        attempt()
    except RefusedError as error:
        return str(error)
    return ""


def keys(words: str) -> frozenset[str]:
    """The keys of a layout that stand in `words`."""
    return frozenset(words.split())
