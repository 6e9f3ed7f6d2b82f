"""Which rank is slow: what each computes, beside the ranks that have the same to do."""

import statistics
from typing import Any, NamedTuple

from phalanx.core.layout import Coordinates, Layout
from phalanx.reports.waterfall import MeasuredStep


class RankTime(NamedTuple):
    """What one rank did in a step.

    Attributes:
        rank: which.
        at: where it stands on each axis; None where the layout is not known.
        compute: seconds that it computed.
        waiting: seconds that it stood still for messages.
        over_peers: its compute over the median of the listed ranks of its stage; 1 if alone.
    """

    rank: int
    at: Coordinates | None
    compute: float
    waiting: float
    over_peers: float

    @property
    def coordinates(self) -> str:
        """As `dp=0 pp=1 cp=0 tp=0`; empty where they are not known."""
        places = self.at._asdict() if self.at else {}
        return " ".join(f"{axis}={place}" for axis, place in places.items())

    def to_dict(self) -> dict[str, Any]:
        """One entry of `ranks`, as `--json` prints it."""
        return {
            "rank": self.rank,
            "coordinates": self.at._asdict() if self.at else None,
            "compute_seconds": self.compute,
            "waiting_seconds": self.waiting,
            "over_peers": self.over_peers,
        }


def rank_times(found: MeasuredStep, layout: Layout | None) -> tuple[RankTime, ...]:
    """Every listed rank, in order.

    Args:
        found: what was measured.
        layout: how the step was cut; None where it is not known, so that all ranks are peers.
    """
    stages: dict[int, list[float]] = {}
    for rank, kinds in found.ranks.items():
        stages.setdefault(_stage(rank, layout), []).append(kinds.get("compute", 0.0))
    medians = {stage: statistics.median(each) for stage, each in stages.items()}
    return tuple(
        RankTime(
            rank,
            _at(rank, layout),
            kinds.get("compute", 0.0),
            sum(s for name, s in kinds.items() if name.startswith("waiting for ")),
            _ratio(kinds.get("compute", 0.0), medians[_stage(rank, layout)]),
        )
        for rank, kinds in found.ranks.items()
    )


def slowest(ranks: tuple[RankTime, ...]) -> RankTime | None:
    """The rank furthest above those that have the same to do; of equals the one that computes most.

    Args:
        ranks: all that are listed.
    """
    return max(ranks, key=lambda rank: (round(rank.over_peers, 3), rank.compute), default=None)


def _stage(rank: int, layout: Layout | None) -> int:
    at = _at(rank, layout)
    return at.pp if at else 0


def _at(rank: int, layout: Layout | None) -> Coordinates | None:
    return layout.coordinates(rank) if layout and 0 <= rank < layout.ranks else None


def _ratio(own: float, median: float) -> float:
    return own / median if median > 0 else 1.0
