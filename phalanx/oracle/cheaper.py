"""The same pairs for less: a covering set, taken apart here and there and put together cheaper.

Of a set some cases are left out, and what then does not meet any more is covered anew by cases that
are built for it: drawn or former ones, altered step by step for as long as that gains. What is no
dearer stays (large neighbourhood search: Shaw 1998, CP'98, LNCS 1520).
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from random import Random
from typing import NamedTuple

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.oracle.cases import CaseSpec, altered, write_case
from phalanx.oracle.covering import Pair, cost, pairs_of
from phalanx.oracle.verify import refuse_unprovable

_LEFT_OUT = (2, 3, 5, 8)  # cases of one round
_STRANGERS = 12  # cases from which new ones are built, beside those left out
_BUILT = 3  # cases that are altered, before the best of them is taken
_ALTERED = 60  # times


class Worth(NamedTuple):
    """What a case brings: a set of pairs, one bit each, and what it costs."""

    pairs: int
    cost: float

    def rate(self, missing: int) -> float:
        """How many of the missing pairs it has, for what it costs."""
        return (self.pairs & missing).bit_count() / self.cost


class Worths:
    """What each case brings, worked out once."""

    def __init__(self) -> None:
        self._bits: dict[Pair, int] = {}
        self._known: dict[str, Worth] = {}

    def __call__(self, spec: CaseSpec) -> Worth:
        """What `spec` brings; nothing, where it cannot be run."""
        line = write_case(spec)
        if line not in self._known:
            self._known[line] = self._of(spec)
        return self._known[line]

    def _of(self, spec: CaseSpec) -> Worth:
        try:
            refuse_unprovable(spec.case().run)
        except PhalanxError:
            return Worth(0, 1.0)
        bits = (1 << self._bits.setdefault(pair, len(self._bits)) for pair in pairs_of(spec))
        return Worth(reduce(or_, bits, 0), cost(spec))

    def met(self, specs: Iterable[CaseSpec]) -> int:
        """The pairs that meet in any of `specs`."""
        return reduce(or_, (self(spec).pairs for spec in specs), 0)

    def total(self, specs: Iterable[CaseSpec]) -> float:
        """What `specs` cost together."""
        return sum(self(spec).cost for spec in specs)


def cheaper(
    specs: Sequence[CaseSpec],
    rounds: int,
    first: Sequence[CaseSpec] = (),
    seed: int = 1,
) -> list[CaseSpec]:
    """Cases in which the same pairs meet, that cost no more than `specs`.

    Args:
        specs: a covering set; new cases need no more ranks than the largest of these.
        rounds: how often some are replaced.
        first: cases that are there in any case; they are not among the chosen.
        seed: of what is drawn.
    """
    random, worth = Random(seed), Worths()
    given = worth.met(first)
    wanted = worth.met(specs) & ~given
    best = _needed(worth, specs, wanted)
    for _ in range(rounds):
        order = random.sample(best, len(best))
        out = min(random.choice(_LEFT_OUT), len(order))
        kept = order[out:]
        sources = [*order[:out], *random.choices(specs, k=_STRANGERS)]
        built = _covering(random, worth, sources, wanted & ~worth.met(kept))
        tried = _needed(worth, [*kept, *built], wanted)
        if worth.total(tried) <= worth.total(best):
            best = tried
    return sorted(best, key=lambda spec: worth(spec).cost)


def _covering(
    random: Random, worth: Worths, sources: Sequence[CaseSpec], missing: int
) -> list[CaseSpec]:
    """Cases in which all that is missing meets, built from sources in which it does."""
    built = []
    most = max(Layout.parse(spec.layout).ranks for spec in sources)
    while missing:
        best = sorted(sources, key=lambda spec: -worth(spec).rate(missing))[:_BUILT]
        climbed = [_climb(random, worth, spec, missing, most) for spec in best]
        chosen = max(climbed, key=lambda spec: worth(spec).rate(missing))
        built.append(chosen)
        missing &= ~worth(chosen).pairs
    return built


def _climb(random: Random, worth: Worths, spec: CaseSpec, missing: int, most: int) -> CaseSpec:
    """The case, altered for as long as more of what is missing meets for its cost."""
    for _ in range(_ALTERED):
        try:
            other = altered(random, spec, most)
        except PhalanxError:
            continue
        small = Layout.parse(other.layout).ranks <= most
        if small and worth(other).rate(missing) >= worth(spec).rate(missing):
            spec = other
    return spec


def _needed(worth: Worths, specs: Sequence[CaseSpec], wanted: int) -> list[CaseSpec]:
    """Without those, the dearest first, whose pairs all meet elsewhere."""
    left = sorted(specs, key=lambda spec: -worth(spec).cost)
    for behind in reversed(range(len(left))):
        place = len(left) - 1 - behind
        others = left[:place] + left[place + 1 :]
        if not wanted & ~worth.met(others):
            left = others
    return left
