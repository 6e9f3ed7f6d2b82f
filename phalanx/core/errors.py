"""What can go wrong, as one tree: every message names the numbers and ends with what works."""

from collections.abc import Iterable
from difflib import get_close_matches


class PhalanxError(Exception):
    """Something failed that the user can mend. The command line prints it as one line."""

    exit_code = 1


class UsageError(PhalanxError):
    """The question itself is wrong: an unknown key, a value of the wrong kind."""

    exit_code = 2


class RefusedError(PhalanxError):
    """The question is clear and the answer is no: it cannot be split so, or does not fit."""

    exit_code = 3


class ScheduleError(RefusedError):
    """A pipeline schedule that is incomplete, out of order, or waits for ever."""


class DataError(PhalanxError):
    """A corpus that cannot be read, or tokens that the model does not know."""


class CheckpointError(PhalanxError):
    """A checkpoint that cannot be written, or none that can be trusted."""


class StartError(PhalanxError):
    """Ranks did not find each other; fresh ones may."""


class LostMessageError(PhalanxError):
    """A rank waited for a message that never came: another is late, or waits for something else."""


class RankLeftError(PhalanxError):
    """A rank waited for another that is no longer there; the other one knows why."""


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Build the error for a name that nobody knows, with the nearest ones that exist.

    Args:
        what: the kind of thing, for example "key" or "model".
        name: what was asked for.
        known: every name that would have been accepted.

    Example:
        >>> print(unknown("axis", "tpp", ["tp", "pp", "dp"]))
        unknown axis 'tpp'; did you mean tp or pp?
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return UsageError(f"unknown {what} {name!r}; {hint}")


def require_whole(name: str, value: object) -> None:
    """Accept a whole number and nothing that only behaves like one: no 2.0, and no switch.

    Args:
        name: of the key, as the error calls it.
        value: what was given for it.

    Raises:
        UsageError: it is no `int`, or it is True or False.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is {value!r}; it is a whole number")


def require_type(name: str, value: object, kinds: type | tuple[type, ...], words: str) -> None:
    """Raise UsageError where a value is of another kind.

    Args:
        name: of what it is.
        value: what was given.
        kinds: what it may be.
        words: the same in words, as they end a sentence: "a name, or a file".

    Raises:
        UsageError: it is none of them.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is {value!r}; it is {words}")


def divisors(n: int) -> tuple[int, ...]:
    """All positive divisors of `n`, ascending: what a degree "can be".

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return tuple(sorted({*small, *(n // i for i in small)}))


def shorten(values: Iterable[object], limit: int = 8) -> str:
    """Print a list of values, cut after `limit` of them: `1, 2, 3, ...`.

    Args:
        values: in the order in which they are printed.
        limit: how many are printed.

    Example:
        >>> shorten(divisors(96), limit=4)
        '1, 2, 3, 4, ...'
    """
    all_values = list(values)
    shown = ", ".join(str(v) for v in all_values[:limit])
    return shown + (", ..." if len(all_values) > limit else "")
