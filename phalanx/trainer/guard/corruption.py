"""Silent corruption: a bit that flips without an error, found by a copy or a memory of it.

Two looks are by checksums of eight bytes, which any one flipped bit changes; a third is not exact:

    at rest   what the update left on this rank is what the next step finds; if not, the memory of
              this rank has changed by itself, and no other is to blame
    copies    ranks that hold the same (dp replicas of weights, all of the state under zero=0 and
              HSDP, what tp leaves whole) have the same checksums; the few that differ from most are
              to blame, and where there is no majority all of them are named
    products  one product in every tenth of the steps between two looks is held against a checksum
              of its own (`precision/sampled.py`); the rank that computed it is to blame

What none of them shows, a wrong product or a wrong gradient from which every rank learns alike,
may be found by doing passes again: see `repeat.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.errors import shorten
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.engine.unit import Slot
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.data import ShardedUnit
from phalanx.trainer.parallel.mesh import Mesh

_COLUMNS = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Held(NamedTuple):
    """Something that several ranks hold alike.

    Attributes:
        group: those ranks.
        what: in words.
        checksum: int64 [], of this rank's.
    """

    group: Group
    what: str
    checksum: Tensor


class Suspicion(NamedTuple):
    """Ranks of which one has wrong numbers.

    Attributes:
        ranks: one where it is known, all that may be otherwise.
        what: that is wrong, and how that shows.
    """

    ranks: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"one of ranks {self._list}"
        return f"{who} has wrong numbers: {self.what}"

    @property
    def _list(self) -> str:
        return shorten(self.ranks)


def checksum(x: Tensor) -> Tensor:
    """A number that changes with any one bit of `x`, int64 [], on its device.

    Words are added up in columns, and columns with odd weights, modulo 2^64: a flipped bit changes
    one word by a power of two, and an odd weight cannot make that vanish.
    """
    words = x.detach().reshape(-1).view(_WORDS[x.element_size()])
    whole = len(words) // _COLUMNS * _COLUMNS
    weights = 2 * torch.arange(_COLUMNS, device=x.device) + 1
    columns = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    rest = words[whole:].to(torch.int64)
    columns[: len(rest)] += rest * 3
    return (columns * weights).sum()


class CorruptionWatch:
    """Looks for silent corruption on one rank, together with the others.

    Attributes:
        every: steps between two looks; 0 never looks.
    """

    def __init__(self, engine: Engine) -> None:
        self.every = engine.run.recipe.check_every
        self._engine = engine
        self._left: list[tuple[str, Tensor]] = []

    def is_due(self, step: int) -> bool:
        """Whether there is a look before step `step`, counted from 0."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def begin_step(self, step: int) -> None:
        """Choose which product of a step is held against its checksum, if one is.

        Args:
            step: from 0.
        """
        self._engine.arithmetic.sampler.begin_step(step)

    def remember(self) -> None:
        """Note what the update has left, for `find` to come back to."""
        self._left = [(what, checksum(x)) for what, x in self._own()]

    def find(self) -> Suspicion | None:
        """Look; every rank calls it, and all get the same answer.

        Returns:
            None where nothing is wrong.
        """
        mine = self._changed_at_rest() or self._wrong_product()
        differing = self._unlike_copies()
        return agree_on(self._engine.mesh, mine or differing, certain=mine is not None)

    def _changed_at_rest(self) -> Suspicion | None:
        left, self._left = self._left, []
        if not left:
            return None
        now = [checksum(x) for _, x in self._own()]
        same = torch.stack([a == b for (_, a), b in zip(left, now, strict=True)]).tolist()
        for (what, _), equal in zip(left, same, strict=True):
            if not equal:
                return Suspicion((_rank(),), f"{what} changed since the update that made it")
        return None

    def _wrong_product(self) -> Suspicion | None:
        found = self._engine.arithmetic.sampler.found()
        return Suspicion((_rank(),), found) if found else None

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank keeps from step to step, by name."""
        if self._engine.run.layout.offload.nvme:  # reading it all would take as long as a step
            return
        for sharded in self._engine.units:
            unit = sharded.unit
            if sharded.policy.retains_weights:
                sharded.acquire()
                yield f"weights of {unit.name}", unit.weights
            if not _shares_memory(unit.weights, unit.master):
                yield f"master weights of {unit.name}", unit.master
            for field, moment in self._engine.optimizer.moments(unit).items():
                yield f"{field} of {unit.name}", moment

    def _unlike_copies(self) -> Suspicion | None:
        """Compare with the ranks that hold the same; all ranks of a group get the same answer."""
        by_group: dict[tuple[int, ...], list[Held]] = {}
        for held in self._held():
            if held.group.size > 1:
                by_group.setdefault((held.group.size, *held.group.ranks), []).append(held)
        for found in by_group.values():
            group = found[0].group
            mine = torch.stack([held.checksum for held in found])
            everyone = mine.new_empty(group.size * len(mine))
            group.all_gather(everyone, mine, "checksums").wait()
            rows = everyone.view(group.size, -1).T.tolist()
            for held, row in zip(found, rows, strict=True):
                if len(set(row)) > 1:
                    what = f"{held.what} differ between ranks {shorten(group.ranks)}"
                    return Suspicion(blame(row, group.ranks), what)
        return None

    def _held(self) -> Iterator[Held]:
        mesh = self._engine.mesh
        for sharded in self._engine.units:
            yield from self._held_of(sharded)
        for router in self._engine.balancer.routers:
            yield Held(mesh.data, f"biases of {router.prefix}", checksum(router.bias))

    def _held_of(self, sharded: ShardedUnit) -> Iterator[Held]:
        unit, mesh, copies = sharded.unit, self._engine.mesh, sharded.copies
        weights = sharded.policy.retains_weights
        if weights:
            sharded.acquire()
            yield Held(copies.all, f"weights of {unit.name}", checksum(unit.weights))
            whole = [s for s in unit.slots if s.declaration.tp_dim is None]
            shared = [s for s in unit.slots if _is_shared(s, mesh.tensor.size)]
            for group, slots, of in (
                (mesh.tensor, whole, "whole parameters"),
                (mesh.kv_replicas, shared, "shared heads"),
            ):
                if slots and group.size > 1:
                    parts = torch.cat([unit.weights[s.start : s.stop] for s in slots])
                    yield Held(group, f"{of} of {unit.name}", checksum(parts))
            yield Held(mesh.pipeline_replicas, f"weights of {unit.name}", checksum(unit.weights))
            if sharded.tied:
                yield Held(mesh.embedding_group, f"tied {unit.name}", checksum(unit.weights))
        group = copies.replica if sharded.policy.partitions else copies.all
        if group.size > 1 and not self._engine.run.layout.offload.nvme:
            yield Held(group, f"master weights of {unit.name}", checksum(unit.master))
            for field, moment in self._engine.optimizer.moments(unit).items():
                yield Held(group, f"{field} of {unit.name}", checksum(moment))


def blame(row: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Who of those that should hold the same is wrong: the few, or all where there is no majority.

    Args:
        row: what each holds.
        ranks: their numbers, in the same order.
    """
    value, count = Counter(row).most_common(1)[0]
    if 2 * count <= len(row):
        return tuple(ranks)
    return tuple(rank for rank, held in zip(ranks, row, strict=True) if held != value)


def agree_on(mesh: Mesh, mine: Suspicion | None, *, certain: bool) -> Suspicion | None:
    """Let all ranks know what any of them suspects; every rank calls it.

    Args:
        mesh: all ranks.
        mine: what this one suspects.
        certain: it is this rank itself that is wrong, and no other.

    Returns:
        What is certain before what is not. Where several ranks suspect something of which none is
        certain, all that they name, of whoever names the fewest.
    """
    flag = torch.tensor(float(mine is not None), device=mesh.device)
    mesh.world.all_reduce(flag, "suspicion", largest=True).wait()
    if not flag.item():
        return None
    found: list[tuple[Suspicion | None, bool]] = [(mine, certain)]
    if mesh.world.size > 1:
        found *= mesh.world.size
        dist.all_gather_object(found, (mine, certain))
    seen = [(not sure, len(one.ranks), one) for one, sure in found if one is not None]
    uncertain, names, best = min(seen)
    alike = [one.ranks for *key, one in seen if key == [uncertain, names] and one.what == best.what]
    return best._replace(ranks=tuple(sorted({rank for ranks in alike for rank in ranks})))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_shared(slot: Slot, parts: int) -> bool:
    return slot.declaration.tp_dim is not None and slot.declaration.copies(parts) > 1


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0
