"""Where the ranks stand that take part in a message: how many, and how far apart.

Ranks are numbered with tp fastest, then cp, then pp and dp; some programs put pp outermost.
"""

from collections.abc import Callable

import numpy as np

from phalanx.cost.framework import Framework
from phalanx.cost.links import Fabric, Path, RankGroup
from phalanx.cost.messages.unit import Among
from phalanx.cost.params import copies
from phalanx.cost.table import Column, Table


def group_of(table: Table, among: Among, framework: Framework) -> RankGroup:
    """The ranks of a message in every row.

    Args:
        table: the layouts.
        among: what they have in common.
        framework: whose order of ranks it is.
    """
    inner = table.tp * table.cp
    outside = framework.pipeline_outside
    to_stage = inner * table.dp if outside else inner
    to_replica = inner if outside else inner * table.pp
    ends = RankGroup(np.minimum(table.pp, 2), to_stage * np.maximum(table.pp - 1, 1))
    over_data = np.where(table.cp > 1, table.tp, to_replica)
    known: dict[Among, Callable[[], RankGroup]] = {
        "tp": lambda: RankGroup(table.tp, 1),
        "kv replicas": lambda: RankGroup(np.maximum(table.tp // table.model.kv_heads, 1), 1),
        "cp": lambda: RankGroup(table.cp, table.tp),
        "pp neighbours": lambda: RankGroup(table.pp, to_stage),
        "embedding group": lambda: ends,
        "pp replicas": lambda: ends,
        "dp": lambda: RankGroup(table.dp * table.cp, over_data),
        "shards": lambda: RankGroup(table.sharers, over_data),
        "replicas": lambda: RankGroup(table.dp // table.shards, to_replica * table.shards),
        "ep": lambda: _expert_group(table, to_replica, outside=outside),
        "world": lambda: RankGroup(table.dp * table.pp * inner, 1),
    }
    return known[among]() if among in known else _of_experts(table, among, to_replica)


class Routes:
    """The ways of all messages of a table: each group and each path is found once.

    Args:
        table: the layouts.
        framework: whose order of ranks it is.
        fabric: what messages cross.
    """

    def __init__(self, table: Table, framework: Framework, fabric: Fabric) -> None:
        self.table, self.fabric, self.framework = table, fabric, framework
        self._groups: dict[Among, RankGroup] = {}
        self._paths: dict[tuple[str, Among], Path] = {}

    def group(self, among: Among) -> RankGroup:
        """The ranks that take part."""
        if among not in self._groups:
            self._groups[among] = group_of(self.table, among, self.framework)
        return self._groups[among]

    def seconds(self, collective: str, among: Among, size: Column) -> Column:
        """How long one message takes in every row, with nothing else on its links.

        Args:
            collective: one of `collectives.NAMES`, or "send".
            among: the ranks that take part.
            size: bytes of the full vector, a column; of the message for a send.

        Returns:
            Seconds, a column; 0 for a group of one, and for nothing to send.
        """
        key = collective, among
        if key not in self._paths:
            self._paths[key] = Path(collective, self.group(among), self.fabric)
        return self._paths[key].seconds(size)


def _expert_group(table: Table, to_replica: Column, *, outside: bool) -> RankGroup:
    """The ranks that share the experts, from dp x cp, and from tp if need be."""
    near = outside | (table.pp == 1) | (table.ep <= table.cp)
    stride = np.where(near, table.tp, to_replica)
    return RankGroup(table.ep, np.where(_borrows(table), 1, stride))


def _borrows(table: Table) -> Column:
    """Where experts take their ranks from tp too."""
    return table.dp * table.cp % table.ep != 0


def _of_experts(table: Table, among: Among, to_replica: Column) -> RankGroup:
    """Those of the data-parallel ranks that hold the same experts."""
    if among == "expert replicas":
        return RankGroup(table.dp // table.shards, to_replica * table.shards)
    size: Column = copies(table).experts
    if among == "expert dp":
        size = size * (table.dp // table.shards)
    within = table.tp * np.minimum(table.ep, table.cp)
    stride = np.where(table.ep < table.cp, within, to_replica * np.maximum(table.ep // table.cp, 1))
    return RankGroup(size, np.where(_borrows(table), np.maximum(table.tp, to_replica), stride))
