"""Why a layout cannot be: a value that a search counts and that a command prints."""

from dataclasses import dataclass

from phalanx.core.errors import RefusedError


@dataclass(frozen=True)
class Refusal:
    """One thing that clashes.

    Attributes:
        reason: in a few words without numbers, the same for all layouts that clash so.
        message: the numbers that clash, and the nearest that works.
    """

    reason: str
    message: str

    def error(self) -> RefusedError:
        """The exception that says so."""
        return RefusedError(self.message)
