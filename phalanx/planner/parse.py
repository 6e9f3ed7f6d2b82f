"""Turns what a user asks for into numbers: tokens into sequences, words into limits of a search."""

from collections.abc import Mapping
from dataclasses import fields
from math import gcd

from phalanx.core.errors import RefusedError, UsageError, divisors, shorten, unknown
from phalanx.core.layout import Layout
from phalanx.core.units import show_count
from phalanx.planner.refine import SEARCHED_KEYS
from phalanx.planner.space import SEARCHED, Limits
from phalanx.schedules.registry import find_schedule

NEAR = 0.05  # share by which a step that is no whole number of sequences may be rounded
MUCH = 4  # times as many devices that share a batch are worth a word
MOST_SEQUENCES = 10**9


def sequences_per_step(tokens: float, seq: int, devices: int) -> int:
    """Sequences of a step of so many tokens.

    Where they come out whole, exactly that many. "16M" tokens of sequences of 8,192 do not, since
    2,048 sequences are 16.8M: then the multiple of the largest divisor of the devices that has one
    within 5 %.

    Args:
        tokens: per step.
        seq: tokens per sequence.
        devices: how many there are.

    Raises:
        UsageError: less than one sequence, or absurdly many.

    Example:
        >>> sequences_per_step(16e6, seq=8192, devices=1024)
        2048
    """
    if seq < 1:
        raise UsageError(f"a sequence of {seq} tokens; it has at least 1")
    exact = tokens / seq
    if exact < 1 - NEAR:
        raise UsageError(
            f"{show_count(tokens)} tokens per step are less than one sequence of {seq:,}; "
            f"use at least {seq:,} tokens, or shorter sequences"
        )
    if exact > MOST_SEQUENCES:
        raise UsageError(
            f"{tokens:.3g} tokens per step are {exact:.3g} sequences of {seq:,}; "
            f"a step has at most {MOST_SEQUENCES:,} sequences"
        )
    if exact == round(exact):
        return round(exact)
    for unit in reversed(divisors(devices)):
        count = round(exact / unit) * unit
        if count and abs(count - exact) <= NEAR * exact:
            return count
    return max(round(exact), 1)


def better_batch(batch: int, devices: int) -> int:
    """A batch within 5 % that devices can share far better; the same one if there is none.

    Args:
        batch: sequences per step.
        devices: of which at least four times as many are to share the batch evenly as do now.

    Example:
        >>> better_batch(2047, devices=1024), better_batch(2048, devices=1024)
        (2048, 2048)
    """
    shared = gcd(batch, devices)
    for unit in reversed(divisors(devices)):
        count = round(batch / unit) * unit
        if unit < MUCH * shared:
            return batch
        if count and abs(count - batch) <= NEAR * batch:
            return count
    return batch


def read_limits(text: str) -> Limits:
    """Read `pp=16 schedule=1f1b|interleaved`: the values that a key may have, by key.

    Raises:
        UsageError: an unknown key, a key twice, or a value of the wrong kind.
    """
    known = [field.name for field in fields(Layout)]
    limits: dict[str, frozenset[object]] = {}
    for word in text.replace(",", " ").split():
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise UsageError(f"cannot read {word!r}; write key=value, as in pp=16 or tp=4|8")
        if key not in known:
            raise unknown("layout key", key, known)
        if key not in (*SEARCHED_KEYS, "precision"):
            raise UsageError(
                f"the search leaves {key} at its default; it varies {', '.join(SEARCHED_KEYS)}, "
                f"and phalanx estimate prices one layout with {word}"
            )
        if key in limits:
            raise UsageError(f"{key} stands twice in {text!r}; write {key}=4|8 to allow several")
        limits[key] = frozenset(_read(key, value) for value in values.split("|"))
    for name in sorted(map(str, limits.get("schedule", frozenset()))):
        if not find_schedule(name).can_be_searched:
            raise UsageError(
                f"the search has no schedule={name}, which is another update and not another "
                f"order, or has no formulas; it has {', '.join(SEARCHED)}"
            )
    return limits


def _read(key: str, value: str) -> object:
    given: dict[str, object] = {key: value}
    if key == "shard":
        given["dp"] = value
    if key == "sp":
        given["tp"] = 2
    return getattr(Layout.from_mapping(given), key)


def both(one: Limits, other: Limits) -> dict[str, frozenset[object]]:
    """What both allow, key by key; a key of only one of them is as that one says.

    Args:
        one: allowed values by key.
        other: likewise; the error says that `one` is to be what only `other` can be.

    Raises:
        RefusedError: nothing is left for some key.
    """
    merged = dict(one)
    for key, values in other.items():
        merged[key] = merged[key] & values if key in merged else values
        if not merged[key]:
            asked, allowed = (_listed(limits[key]) for limits in (one, other))
            raise RefusedError(f"{key} is to be {asked}, and can only be {allowed}")
    return merged


def _listed(values: frozenset[object]) -> str:
    ordered = sorted(values, key=lambda value: (value if isinstance(value, int) else 0, str(value)))
    return shorten(ordered)


def show_limits(limits: Mapping[str, frozenset[object]]) -> str:
    """The words that `read_limits` reads."""
    return " ".join(
        f"{key}={'|'.join(str(value) for value in sorted(values, key=str))}"
        for key, values in limits.items()
    )
