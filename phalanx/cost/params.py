"""How many parameters a model has, and how many of them one rank holds before ZeRO cuts them.

Every count is a sum over the parameters that the operators of a model name; see
`core/operators/`. Where tp cannot cut evenly, the first rank holds the most.

Symbols: E experts, e ep.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.operator import UNITS, ModelOperators, Operators, Parameter, UnitName
from phalanx.core.operators import parameters_of
from phalanx.cost.holdings import Holdings, Place
from phalanx.cost.table import Booleans, Integers, Table


class UnitSize(NamedTuple):
    """What data-parallel ranks gather and reduce together: a block, its experts, a table, a norm.

    Attributes:
        name: of a block "block" or "experts", else as the trainer calls it.
        unit: what it is counted by.
        params: elements that a rank holds of it.
        partial: elements held whole whose gradient on one tensor-parallel rank is a part of the
            sum, because the rank applies them to a part of the sequence, or of the heads.
        shared: elements that several tensor-parallel ranks hold, because there are more ranks than
            pieces; they add up the gradient.
        experts: only ranks with the same place along ep hold the same of it.
    """

    name: str
    unit: Place
    params: Integers
    partial: Integers
    shared: Integers
    experts: bool


class Cuts(NamedTuple):
    """Into how many parts the parameters of one rank are cut; columns, or single numbers.

    Attributes:
        t: over tp.
        experts_t: each expert over tp.
        e: experts over ep.
        place: which of the t parts; the first is the largest.
    """

    t: Integers
    experts_t: Integers
    e: Integers
    place: int = 0

    @classmethod
    def of(cls, sizes: Layout | Table, place: int = 0) -> "Cuts":
        """Those of a layout, or of every row of a table.

        ep takes ranks from dp x cp. If it does not divide them it also takes those of tp, as
        Megatron-LM does with an expert tensor-parallel size of 1: then each expert is whole.

        Args:
            sizes: of it dp, tp, cp and ep.
            place: tp rank, 0 to t - 1.
        """
        t, e = np.asarray(sizes.tp), np.asarray(sizes.ep)
        return cls(t, np.where(sizes.dp * sizes.cp % e == 0, t, 1), e, place)

    def held(self, parameter: Parameter) -> Integers:
        """Elements of a parameter on the rank, all its experts together."""
        experts = -(-parameter.experts // self.e) if parameter.experts else 1
        t = self.experts_t if parameter.experts else self.t
        elements: Integers = experts * parameter.held(t, self.place)
        return elements


def unit_sizes(table: Table, model: ModelOperators, tp_index: int = 0) -> Iterator[UnitSize]:
    """Every kind of unit, as one tp rank of every row holds it.

    Args:
        table: the layouts; tp, dp, cp, ep and sp are used.
        model: the operators of their model.
        tp_index: which of the tp ranks, 0 to t - 1; the first holds the most.
    """
    cuts, none = Cuts.of(table, tp_index), np.zeros_like(table.tp)
    is_partial = {"never": none, "sp": none + table.sp, "tp": none + 1}
    for unit in UNITS:
        for name, parameters in _by_unit(unit, model.of(unit)).items():
            params, partial, shared = none, none, none
            for parameter in parameters:
                held = cuts.held(parameter)
                params = params + held
                partial = partial + held * is_partial[parameter.tp_reduce]
                if parameter.cut:
                    shared = shared + held * parameter.cut.is_shared(table.tp)
            yield UnitSize(name, unit, params, partial, shared, name == "experts")


def is_apart(held: Holdings, size: UnitSize) -> Booleans:
    """In which rows a unit is one of its own: a tied head is not where one rank has both ends.

    Args:
        held: of the pipeline rank, of which `ends_together` is used.
        size: the unit.
    """
    is_tied_head = size.unit == "head" and size.name == "embedding"
    return ~held.ends_together | (not is_tied_head)


def _by_unit(unit: UnitName, operators: Operators) -> dict[str, list[Parameter]]:
    """The parameters of a block and those of its experts; of an end by the name of each unit."""
    units: dict[str, list[Parameter]] = {}
    for parameter in parameters_of(operators):
        of_block = "experts" if parameter.experts else "block"
        name = of_block if unit.endswith("block") else parameter.name.split(".")[0]
        units.setdefault(name, []).append(parameter)
    return units


class Sharers(NamedTuple):
    """Ranks that ZeRO spreads the state of parameters over; columns, or single numbers.

    Attributes:
        shared: of what all data-parallel ranks hold alike.
        experts: of experts, which only ranks with the same place along ep hold alike.
    """

    shared: Any
    experts: Any


def copies(layout: Layout | Table) -> Sharers:
    """Over how many ranks ZeRO spreads the state of shared parameters, and that of experts.

    Shared parameters are alike on all dp x cp ranks of one shard group, experts only on those
    of them that hold the same experts.

    Example:
        >>> found = copies(Layout(dp=8, cp=2, ep=4))
        >>> int(found.shared), int(found.experts)
        (16, 4)
    """
    group = layout.shards * layout.cp
    experts = group * layout.tp // (layout.ep * expert_tp(layout))
    return Sharers(group, np.maximum(experts, 1)[()])


def expert_tp(layout: Layout | Table) -> Any:
    """Over how many tp ranks one expert is cut."""
    return Cuts.of(layout).experts_t[()]
