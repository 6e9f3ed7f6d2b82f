"""One process that is any rank of any layout: what it sends is recorded, and nothing arrives.

Every message is answered as if all other ranks had what this one has, so that a step runs to its
end with sizes that are right and values that mean nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.dryrun.rehearse import one_thread
from phalanx.oracle.verify import Case
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.comm import Group, Part, Pending, UnevenSplits
from phalanx.trainer.parallel.mesh import Mesh, build_mesh


class Alike(Group):
    """A group whose other ranks have what this one has."""

    def receive(self, x: Tensor, source: int, tag: int = 0) -> Pending:
        x.fill_(0.01)
        return Pending()

    def _send(self, x: Tensor, to: int, purpose: str, tag: int) -> Pending:
        return Pending()

    def _all_reduce(self, x: Tensor, purpose: str, largest: bool) -> Pending:
        return Pending()

    def _all_gather(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        mine = x.view(-1).clone()
        for chunk in out.view(-1).chunk(self.size):
            chunk.copy_(mine)
        return Pending()

    def _reduce_scatter(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        out.view(-1).copy_(x.view(-1).chunk(self.size)[self.index].clone())
        return Pending()

    def _all_to_all(
        self, out: Tensor, x: Tensor, purpose: str, rows: UnevenSplits | None
    ) -> Pending:
        out.copy_(x.view_as(out))
        return Pending()

    def _all_gather_parts(self, out: Tensor, x: Tensor, purpose: str) -> list[Part]:
        self._all_gather(out, x, purpose)
        around = ((self.index - distance) % self.size for distance in range(self.size))
        chunks = out.chunk(self.size)
        return [Part(source, chunks[source], Pending()) for source in around]

    def _reduce_scatter_parts(
        self, out: Tensor, make: Callable[[int], Tensor], purpose: str
    ) -> Pending:
        for index in (*(i for i in range(self.size) if i != self.index), self.index):
            share = make(index)
        out.copy_(share)
        return Pending()

    def _shift(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        out.copy_(x)
        return Pending()


@contextmanager
def fake_mesh(layout: Layout, rank: int = 0, kv_heads: int = 0) -> Iterator[Mesh]:
    """The mesh of one rank; torch's fake process group stands for all others."""
    world = layout.ranks
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield build_mesh(layout, torch.device("cpu"), Alike, kv_heads=kv_heads)
    finally:
        if world > 1:
            dist.destroy_process_group()


def recorded(run: Run, rank: int) -> list[Message]:
    """What the ledger of one rank holds after a step; after the second, where one calibrates."""
    with one_thread(), fake_mesh(run.layout, rank, run.model.kv_heads) as mesh:
        engine = build_engine(run, mesh)
        stream = Case(run).stream()
        for step in range(2 if run.layout.precision.recipe == "fp8" else 1):
            mesh.ledger.clear()
            train_step(engine, step, stream.batch(step, engine.positions()))
        return mesh.ledger.messages()
