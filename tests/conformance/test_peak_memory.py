"""The trainer's peak memory is what the planner says, on any rank of any layout.

Every storage that torch makes is followed to its end, over two whole steps. The process group is
torch's fake one, so that one process can be any rank; what it receives is noise, and so the
weights move whether or not the loss is finite.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.memory import rank_memory
from phalanx.cost.saved import OURS
from phalanx.data.batches import Batch
from phalanx.plan.simulate import peak_in_flight
from phalanx.schedules.build import build
from phalanx.train.comm import Group
from phalanx.train.mesh import build_mesh
from phalanx.train.step import build_engine, forward_backward

SEQ = 128
LLAMA = ModelShape(hidden=128, heads=8, kv_heads=4, ffn=384, layers=4, vocab=512)
MOE = replace(LLAMA, experts=8, top_k=2, moe_ffn=192, shared_experts=1, dense_layers=1)
GPT = ModelShape(
    hidden=128,
    heads=8,
    layers=4,
    vocab=512,
    tied=True,
    activation="gelu",
    norm="layernorm",
    positions="learned",
    max_positions=SEQ,
    bias=True,
)


class LiveBytes(TorchDispatchMode):
    """Sums the storages that are alive after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = weakref.ref(storage, lambda _, k=key: self._alive.pop(k))
        self.peak = max(self.peak, sum(ref().nbytes() for ref in [*self._alive.values()]))
        return out


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[None]:
    if layout.ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured(run: Run, rank: int) -> int:
    """Peak bytes of tensors over two steps."""
    count = run.recipe.batch // run.layout.dp
    tokens = np.zeros((count, SEQ), dtype=np.int64)
    positions = np.tile(np.arange(SEQ), (count, 1))
    batch = Batch(tokens=tokens, targets=tokens, positions=positions, documents=None)
    with rank_of(run.layout, rank), LiveBytes() as live:
        engine = build_engine(run, build_mesh(run.layout, torch.device("cpu"), Group))
        for step in range(2):
            forward_backward(engine, step, batch)
            engine.optimizer.step()
    return live.peak


@pytest.mark.parametrize(
    ("shape", "line", "pp_rank"),
    [
        (LLAMA, "precision=bf16 mb=4", 0),
        (GPT, "precision=fp32 mb=4 recompute=full", 0),
        (LLAMA, "precision=fp32 mb=4 recompute=selective", 0),
        (LLAMA, "dp=4 zero=1 precision=bf16 mb=4", 0),
        (GPT, "dp=4 zero=2 precision=bf16 mb=4", 0),
        (LLAMA, "dp=4 zero=3 precision=bf16 mb=4", 0),
        (GPT, "tp=2 precision=bf16 mb=4", 0),
        (LLAMA, "tp=2 sp=off precision=bf16 mb=4", 0),
        (LLAMA, "pp=4 precision=bf16 mb=2", 0),
        (GPT, "pp=4 precision=bf16 mb=2 schedule=gpipe", 3),
        (LLAMA, "dp=2 pp=2 v=2 schedule=interleaved precision=bf16 mb=2", 1),
        (MOE, "precision=bf16 mb=4", 0),
        (MOE, "tp=2 precision=bf16 mb=4", 0),
        (MOE, "precision=fp32 mb=4 recompute=full", 0),
    ],
)
def test_a_rank_peaks_where_the_planner_says(shape: ModelShape, line: str, pp_rank: int):
    layout = Layout.parse(line)
    batch = 2 * layout.dp * layout.pp * layout.mb
    run = Run(model=shape, layout=layout, recipe=Recipe(seq=SEQ, batch=batch))
    schedule = build(layout.schedule, layout.pp, run.micro_batches, layout.v)
    in_flight = peak_in_flight(schedule)[pp_rank]
    planned = rank_memory(shape, layout, SEQ, pp_rank, in_flight, OURS).allocated
    rank = layout.rank_at(layout.coordinates(0)._replace(pp=pp_rank))
    # two largest gradients are planned under ZeRO-2 and 3, where the first may be a smaller one
    assert 0.96 < planned / measured(run, rank) < 1.08
