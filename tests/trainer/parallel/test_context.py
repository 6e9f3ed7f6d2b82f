"""Attention over a sequence that several ranks hold is attention over the sequence."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.message import Message
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.ops.kernels import PLAIN_SCORES
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.context import ContextParallel, _Ring, _Sequence, undivided
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.generate import generate


def context_of(kind: str) -> ContextParallel:
    """All ranks along cp."""
    layout = Layout(cp=dist.get_world_size())
    return ContextParallel(build_mesh(layout, torch.device("cpu")).context, kind)


def drawn(seq: int, dtype: torch.dtype, narrow: bool) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of a whole sequence, and a gradient of the result."""
    generator = torch.Generator().manual_seed(seq)
    b, a, g, d, w = 2, 8, 4, 16, 10 if narrow else 16
    sizes = ((a, d), (g, d), (g, w), (a, w))
    *inputs, grad = (torch.randn(seq, b, *size, generator=generator, dtype=dtype) for size in sizes)
    return inputs, grad.flatten(2)


def attended(
    context: ContextParallel, inputs: list[Tensor], grad: Tensor, documents: Tensor | None
) -> list[Tensor]:
    """What this rank finds, and the gradients of its own queries, keys and values."""
    mine = [context.my_part(x).requires_grad_() for x in inputs]
    y = context.attend(*mine, documents)
    return [y.detach(), *torch.autograd.grad(y, mine, context.my_part(grad))]


def compare(kind: str, seq: int, packed: bool, narrow: bool) -> float:
    """The largest relative error of a rank's results and gradients in fp32, against fp64."""
    documents = None
    if packed:
        ends = torch.tensor([[seq // 3], [seq // 2 + 1]])
        documents = (torch.arange(seq) >= ends).int() + (torch.arange(seq) >= seq - 5).int()
    context = context_of(kind)
    inputs, grad = drawn(seq, torch.float64, narrow)
    exact = attended(undivided(), inputs, grad, documents)
    found = attended(context, [x.float() for x in inputs], grad.float(), documents)
    errors = [
        (mine.double() - context.my_part(whole)).norm() / context.my_part(whole).norm()
        for mine, whole in zip(found, exact, strict=True)
    ]
    return float(max(errors))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize(("packed", "narrow"), [(False, False), (True, False), (False, True)])
def test_ranks_together_find_what_one_finds(
    ranks: RankPool, kind: str, packed: bool, narrow: bool
) -> None:
    assert max(ranks.run(4, compare, kind, 1024, packed, narrow)) < 2e-6


@pytest.mark.ranks
def test_three_ranks_can_share_a_sequence(ranks: RankPool) -> None:
    for kind in ("ring", "gather"):
        assert max(ranks.run(3, compare, kind, 192, True, False)) < 2e-6


def watch_the_ring() -> list[list[Message]]:
    """What has been sent whenever a block is there to be used."""
    context = context_of("ring")
    block = torch.full((4,), float(context.group.index))
    seen, ledger = [], context.group.ledger
    for source, x in _Ring(context.group).blocks(block):
        assert x.tolist() == [source] * 4
        seen.append(ledger.messages())
    return seen


@pytest.mark.ranks
def test_the_next_block_is_on_its_way_while_this_one_is_used(ranks: RankPool) -> None:
    def sent(times: int) -> list[Message]:
        return [Message("context", "send", "keys and values", 16, times)]

    for seen in ranks.run(3, watch_the_ring):
        assert seen == [sent(1), sent(2), sent(2)]


def part_of(rank: int, c: int) -> ContextParallel:
    """One of c ranks, without the others."""
    group = Group("context", range(c), None, Ledger())
    group.index = rank
    return ContextParallel(group)


@pytest.mark.parametrize("c", [2, 3, 4, 7])
def test_the_parts_of_all_ranks_are_the_sequence(c: int):
    tokens = torch.arange(4 * c)
    parts = [part_of(rank, c).my_part(tokens) for rank in range(c)]
    assert torch.cat(parts).sort().values.tolist() == tokens.tolist()
    assert parts[0].tolist() == [0, 1, 4 * c - 2, 4 * c - 1]
    assert all(part.tolist() == sorted(part) for part in parts)


@pytest.mark.parametrize("c", [2, 3, 4, 7])
def test_every_rank_looks_at_as_many_keys_and_at_none_in_vain(c: int):
    n = 6
    whole = torch.arange(n * c)
    for rank in range(c):
        context = part_of(rank, c)
        sequence, queries = _Sequence(context, None, PLAIN_SCORES), context.my_part(whole)
        pairs = 0
        for source in range(c):
            rows, keys = sequence.seen(source, n)
            visible = queries[rows, None] >= context.part_of(source, whole)[None, keys]
            assert source == rank or visible.all()
            pairs += int(visible.sum())
            hidden = queries[:, None] >= context.part_of(source, whole)[None, :]
            assert hidden.sum() == visible.sum()
        chunk = n // 2
        assert pairs == chunk * (chunk + 1) + (2 * c - 1) * chunk * chunk


def write(run: Run) -> list[int]:
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    return generate(engine, [1, 2, 3], 6)


@pytest.mark.ranks
def test_ranks_that_share_a_sequence_write_the_same_text(ranks: RankPool) -> None:
    model = ModelShape(layers=2, hidden=32, heads=4, ffn=64, vocab=50)
    recipe = Recipe(seq=40, batch=2, init_std=0.3)

    def written(line: str) -> list[list[int]]:
        run = Run(model=model, layout=Layout.parse(line), recipe=recipe)
        return ranks.run(run.layout.ranks, write, run)

    (alone,) = written("precision=fp64")
    assert len(set(alone)) > 1
    for line in ("cp=2", "cp=2 pp=2", "cp=2 tp=2 context=gather"):
        assert written(f"{line} precision=fp64") == [alone] * Layout.parse(line).ranks
