"""Where the stages of a pipeline live: which rank holds which slices of the model."""

from typing import NamedTuple

from phalanx.core.schedule import Schedule


class Placement(NamedTuple):
    """The rank of each stage, and how often the stages hold the whole model.

    Attributes:
        ranks: of each stage, in stage order, one copy of the model behind the other.
        copies: of the model.
    """

    ranks: tuple[int, ...]
    copies: int = 1

    @property
    def depth(self) -> int:
        """Stages of one copy: stage s holds slice s mod depth of the layers."""
        return len(self.ranks) // self.copies

    @property
    def ends_together(self) -> bool:
        """Whether the ranks that embed are those that compute the loss."""
        depth = self.depth
        return set(self.ranks[::depth]) == set(self.ranks[depth - 1 :: depth])

    def begins(self, stage: int) -> bool:
        """Whether the stage embeds: the first of a copy of the model."""
        return stage % self.depth == 0

    def ends(self, stage: int) -> bool:
        """Whether the stage computes the loss: the last of a copy of the model."""
        return (stage + 1) % self.depth == 0

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)

    def slices_of(self, rank: int) -> tuple[int, ...]:
        """The slices of the layers that `rank` holds, in the order of `stages_of`."""
        return tuple(stage % self.depth for stage in self.stages_of(rank))

    def crosses(self, stage: int, step: int) -> bool:
        """Whether the stage before (`step` = -1) or behind (1) is there, on another rank.

        Args:
            stage: where the tensor is.
            step: -1 for the stage before, 1 for the one behind.
        """
        depth, other = self.depth, stage + step
        if not 0 <= stage % depth + step < depth:
            return False
        return self.ranks[other] != self.ranks[stage]


def looped(p: int, v: int) -> Placement:
    """Rank r holds the stages r, r + p, r + 2 p, ...

    Args:
        p: pipeline ranks.
        v: chunks of layers per rank.

    Example:
        >>> looped(p=4, v=2).stages_of(1)
        (1, 5)
    """
    return Placement(tuple(stage % p for stage in range(p * v)))


def folded(p: int, v: int = 2) -> Placement:
    """Rank r holds stage r on the way down and stage 2 p - 1 - r on the way up: a V.

    Args:
        p: pipeline ranks.
        v: not read: it is 2.

    Example:
        >>> folded(p=4).stages_of(1)
        (1, 6)
    """
    return Placement((*range(p), *reversed(range(p))))


def doubled(p: int, v: int = 1) -> Placement:
    """Rank r holds stage r of one copy of the model, and stage p - 1 - r of another.

    Args:
        p: pipeline ranks.
        v: not read: it is 1, in each copy.

    Example:
        >>> doubled(p=4).slices_of(1)
        (1, 2)
    """
    return folded(p)._replace(copies=2)


def placement_of(schedule: Schedule) -> Placement:
    """The placement of a schedule that stands already."""
    return Placement(schedule.ranks, schedule.copies)
