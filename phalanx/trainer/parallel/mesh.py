"""The ranks as a grid with named axes, and the groups of ranks along each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from phalanx.core.errors import StartError, shorten
from phalanx.core.layout import Coordinates, Layout
from phalanx.core.message import Axis
from phalanx.schedules.layouts import placement
from phalanx.trainer.parallel.comm import DirectGroup, Group
from phalanx.trainer.parallel.expert import ExpertParallel
from phalanx.trainer.parallel.ledger import Ledger

GroupType = Callable[[Axis, Sequence[int], dist.ProcessGroup | None, Ledger], Group]


@dataclass(frozen=True)
class Copies:
    """Ranks that hold the same parameters, and see other tokens.

    Attributes:
        all: every one of them.
        shard: those of them that share one sharded copy.
        replica: those of them that hold the same shard of different copies (HSDP).
    """

    all: Group
    shard: Group
    replica: Group


@dataclass(frozen=True)
class Mesh:
    """This process's place in a layout.

    Attributes:
        layout: how the step is cut.
        at: coordinates of this rank.
        device: where its tensors live.
        world: all ranks.
        tensor, pipeline, context: the groups along tp, pp and cp.
        kv_replicas: the tp ranks that hold the same keys and values, where tp is more than these.
        data: the ranks along dp and cp, which hold the same weights and see other tokens.
        shard: those of them that share one sharded copy.
        replica: those of them that hold the same shard of different copies (HSDP).
        expert: the ranks along ep, which hold all experts of their layers together; ep borrows
            neighbours from `shard`.
        expert_copies: the ranks that hold the same experts.
        embedding_group: the ranks of the first and the last stage, which share tied embeddings.
        pipeline_replicas: the two ranks that hold the same stages, in two copies of the model
            (DualPipe).
        ledger: what this rank sent.
        expert_type: how ranks along ep share experts; a rehearsal, which has no tokens to route,
            brings its own.
    """

    layout: Layout
    at: Coordinates
    device: torch.device
    world: Group
    tensor: Group
    kv_replicas: Group
    pipeline: Group
    context: Group
    data: Group
    shard: Group
    replica: Group
    expert: Group
    expert_copies: Copies
    embedding_group: Group
    pipeline_replicas: Group
    ledger: Ledger
    expert_type: Callable[[Group], ExpertParallel] = ExpertParallel

    @property
    def copies(self) -> Copies:
        """The ranks that hold the same parameters as this one, but for those of experts."""
        return Copies(self.data, self.shard, self.replica)


def build_mesh(
    layout: Layout, device: torch.device, group_type: GroupType | None = None, kv_heads: int = 0
) -> Mesh:
    """Make the groups that this rank belongs to; every rank of the layout calls it.

    Args:
        layout: its `ranks` must equal the size of the process group; with 1 a rank is alone.
        device: where tensors live.
        group_type: how messages are carried; by default NCCL's way on GPUs, direct on CPU.
        kv_heads: of the model; needed where tp is more.
    """
    rank = dist.get_rank() if dist.is_initialized() and layout.ranks > 1 else 0
    at = layout.coordinates(rank)
    ledger = Ledger()
    make = group_type or (Group if device.type == "cuda" else DirectGroup)

    def along(axis: Axis, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1 or rank not in ranks:
            return make(axis, (rank,), None, ledger)
        handle = dist.group.WORLD if axis == "world" else _new_group(ranks)
        return make(axis, ranks, handle, ledger)

    def copies(ranks: Sequence[int], sharers: int) -> Copies:
        """Groups of `ranks`, of which neighbours share one sharded copy."""
        copy, within = divmod(ranks.index(rank), sharers)
        every = along("data", ranks)
        shard = ranks[copy * sharers : (copy + 1) * sharers]
        return Copies(
            all=every,
            shard=every if sharers == len(ranks) else along("data", shard),
            replica=every if sharers == 1 else along("data", ranks[within::sharers]),
        )

    places = product(range(layout.dp), range(layout.cp))
    data = [layout.rank_at(at._replace(dp=i, cp=j)) for i, j in places]
    pipeline = [layout.rank_at(at._replace(pp=i)) for i in range(layout.pp)]
    tensor = [layout.rank_at(at._replace(tp=i)) for i in range(layout.tp)]
    shared, ep = copies(data, layout.sharers), layout.ep
    team, member = divmod(data.index(rank), ep)
    where = placement(layout)
    ends = {where.ranks[0], where.ranks[where.depth - 1]} if not where.ends_together else {0}
    replicas = {at.pp, layout.pp - 1 - at.pp} if where.copies > 1 else {at.pp}
    return Mesh(
        layout=layout,
        at=at,
        device=device,
        world=along("world", range(layout.ranks)),
        tensor=along("tensor", tensor),
        kv_replicas=along("tensor", tensor[_same_kv_heads(layout, at, kv_heads)]),
        pipeline=along("pipeline", pipeline),
        context=along("context", [layout.rank_at(at._replace(cp=i)) for i in range(layout.cp)]),
        data=shared.all,
        shard=shared.shard,
        replica=shared.replica,
        expert=along("expert", data[team * ep : (team + 1) * ep]),
        expert_copies=shared if ep == 1 else copies(data[member::ep], layout.sharers // ep),
        embedding_group=along("pipeline", [pipeline[i] for i in sorted(ends)]),
        pipeline_replicas=along("pipeline", [pipeline[i] for i in sorted(replicas)]),
        ledger=ledger,
    )


def _same_kv_heads(layout: Layout, at: Coordinates, kv_heads: int) -> slice:
    """Which tp ranks hold the same of so many key and value heads as this one."""
    alike = max(layout.tp // kv_heads, 1) if kv_heads else 1
    first = at.tp // alike * alike
    return slice(first, first + alike)


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """How long ranks wait for a message of a group, by default of the one of all ranks.

    torch gives every new group 30 minutes, whatever its world has. None where ranks are made up
    and send nothing.
    """
    joined = group or dist.group.WORLD
    if joined is None:
        raise ValueError("no process group is initialised")
    options = joined._get_backend(torch.device("cpu")).options
    return None if options is None else options._timeout


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Connect some ranks, who wait for each other as long as all ranks do.

    Raises:
        StartError: they cannot connect.
    """
    try:
        group = dist.new_group(list(ranks), timeout=group_timeout(), use_local_synchronization=True)
    except RuntimeError as error:
        raise StartError(f"ranks {shorten(ranks)} cannot connect: {error}") from error
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"torch gave {group!r} for the ranks {list(ranks)}")
    return group
