"""What the planner says about one layout: seconds as a tree that adds up, and bytes by rank."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.core.html import html_table
from phalanx.core.layout import Layout
from phalanx.core.units import show_bytes, show_seconds, show_share

SCHEMA = 1
SIGMAS_OF_80_PERCENT = 1.28  # standard deviations on each side that hold 80 %


@dataclass(frozen=True)
class Term:
    """One named part of a step; a term with children lasts exactly as long as they do.

    Attributes:
        name: what the time goes to.
        own: seconds of a leaf; 0 where there are children.
        children: the parts, in the order of a report.
        worth: seconds that the step would be shorter if this cost nothing on any rank; less than
            its own seconds where something else would then be waited for. NaN: not asked.
        reason: formula or rule that the seconds follow, with numbers.
    """

    name: str
    own: float = 0.0
    children: tuple["Term", ...] = ()
    worth: float = math.nan
    reason: str = ""

    @property
    def seconds(self) -> float:
        """How long it lasts: its own seconds, or those of its children."""
        return math.fsum(child.seconds for child in self.children) if self.children else self.own

    def leaves(self) -> Iterator["Term"]:
        """The terms that have no parts."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()

    def to_dict(self) -> dict[str, Any]:
        """The tree below this term, as `--json` prints it."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "worth": None if math.isnan(self.worth) else self.worth,
            "reason": self.reason,
            "children": [child.to_dict() for child in self.children],
        }

    def find(self, name: str) -> "Term | None":
        """The first term of this name, itself included."""
        if self.name == name:
            return self
        found = (child.find(name) for child in self.children)
        return next((term for term in found if term is not None), None)


class PricedMessage(NamedTuple):
    """One kind of message of the busiest rank in one step, and what it costs.

    Attributes:
        axis: data, tensor, context, pipeline or expert.
        collective: the operation.
        purpose: what it is for.
        bytes: of the full vector; see `core.message.Message`.
        times: how often in a step.
        seconds: of all of them, on the links that they cross.
        exposed: seconds of them that no arithmetic hides.
        ranks: of the group.
        bytes_per_rank: that one rank sends for one of them; see `cost.collectives.bytes_sent`.
    """

    axis: str
    collective: str
    purpose: str
    bytes: float
    times: float
    seconds: float
    exposed: float
    ranks: int
    bytes_per_rank: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """The message as `phalanx estimate --json` lists it under "traffic"."""
        return {
            "axis": self.axis,
            "collective": self.collective,
            "purpose": self.purpose,
            "bytes": self.bytes,
            "bytes_per_rank": self.bytes_per_rank,
            "times": self.times,
            "ranks": self.ranks,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed,
        }


@dataclass(frozen=True)
class RankBytes:
    """Bytes of the worst moment of one pipeline rank.

    Attributes:
        stage: pipeline rank.
        moment: which moment is the worst.
        by_class: weights, gradients, optimizer, activations, logits, buffers, reserve.
        in_flight: micro-batches whose activations are held, counted per stage.
    """

    stage: int
    moment: str
    by_class: tuple[tuple[str, float], ...]
    in_flight: float

    @property
    def total(self) -> float:
        """All of it: what must fit."""
        return math.fsum(size for _, size in self.by_class)

    def to_dict(self) -> dict[str, Any]:
        """The bytes of this rank, as `--json` prints them."""
        return {
            "stage": self.stage,
            "peak_bytes": self.total,
            "moment": self.moment,
            "in_flight": self.in_flight,
            "by_class": dict(self.by_class),
        }

    @property
    def allocated(self) -> float:
        """Without the reserve: what the program itself asks for."""
        return math.fsum(size for name, size in self.by_class if name != "reserve")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one optimizer step of a layout costs.

    Example:
        >>> import phalanx
        >>> found = phalanx.estimate("llama-3.1-8b", "h100x8", "tp=8", batch=8, seq=8192)
        >>> round(sum(term.seconds for term in found.terms.children) / found.step_seconds, 9)
        1.0
        >>> found.peak_bytes == sum(size for _, size in found.worst_rank.by_class)
        True

    Attributes:
        layout: with the precision resolved.
        tokens: of one step.
        step: the tree of seconds; its root is the step.
        mfu, hfu: shares of the peak, by `convention`.
        convention: what counts as needed.
        bubble: idle share of the time in the pipeline, on the rank that sets the pace.
        micro_batches: per rank and step.
        ranks: bytes of every pipeline rank.
        capacity: bytes of one device.
        messages: of the busiest rank.
        spread: standard deviation of ln(measured / predicted) over published runs of this kind, or
            what one of a kind that was not fitted shows.
        spread_reason: which runs that were, or what no fitted run shows; one line.
        notes: assumptions that a reader should know.
    """

    layout: Layout
    tokens: int
    step: Term
    mfu: float
    hfu: float
    convention: str
    bubble: float
    micro_batches: int
    ranks: tuple[RankBytes, ...]
    capacity: float
    messages: tuple[PricedMessage, ...]
    spread: float
    spread_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """One optimizer step."""
        return self.step.seconds

    @property
    def terms(self) -> Term:
        """The tree of seconds; its root is the step."""
        return self.step

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.tokens / self.step_seconds

    @property
    def worst_rank(self) -> RankBytes:
        """The pipeline rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def peak_bytes(self) -> float:
        """What the worst rank needs, reserve included."""
        return self.worst_rank.total

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits into its device."""
        return self.peak_bytes <= self.capacity

    def between(self, sigmas: float = SIGMAS_OF_80_PERCENT) -> tuple[float, float]:
        """Seconds between which the step should lie, so many sigmas on each side."""
        factor = math.exp(sigmas * self.spread)
        return self.step_seconds / factor, self.step_seconds * factor

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx estimate --json` prints."""
        return {
            "schema": SCHEMA,
            "layout": str(self.layout),
            "step_seconds": self.step_seconds,
            "step_seconds_80": list(self.between()),
            "spread_reason": self.spread_reason,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "convention": self.convention,
            "bubble": self.bubble,
            "micro_batches": self.micro_batches,
            "terms": self.step.to_dict(),
            "memory": {
                "peak_bytes": self.peak_bytes,
                "capacity_bytes": self.capacity,
                "fits": self.fits,
                "stage": self.worst_rank.stage,
                "by_class": dict(self.worst_rank.by_class),
                "stages": [rank.to_dict() for rank in self.ranks],
            },
            "traffic": [message.to_dict() for message in self.messages],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        """Seconds and bytes as a table, for a notebook."""
        rows = [(term.name, show_seconds(term.seconds)) for term in self.step.children]
        rows += [
            ("step", show_seconds(self.step_seconds)),
            ("MFU", show_share(self.mfu)),
            ("peak bytes", f"{show_bytes(self.peak_bytes)} of {show_bytes(self.capacity)}"),
        ]
        return html_table(str(self.layout), rows)
