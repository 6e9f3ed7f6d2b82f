"""Context parallelism: every rank holds a part of each sequence, and attention joins the parts.

Outside attention each token is alone, so nothing else changes. A causal mask would give the rank
that holds the end of a sequence most of the work. So the sequence is cut into 2c chunks, and rank
r holds two of them, r and 2c - 1 - r: together they have as much to look at as any other pair.
Of two ranks, the queries of one see half of the other's keys, or half of them see all.

Three ways to have queries meet all keys, to the same result:

    ring     keys and values travel from rank to rank, and each attends to the block that it has
             while the next one is on its way (Liu et al. 2023, arXiv:2310.01889, section 3)
    gather   keys and values of all ranks at once (Llama 3, arXiv:2407.21783, section 3.3.2)
    ulysses  all tokens of some of the heads on each rank (Jacobs et al. 2023, arXiv:2309.14509)

All keep for backward what a device alone would keep of its own tokens: keys and values of others
are freed and gathered again. Its cost twin is phalanx/cost/messages/context.py.

Shapes: s sequence, n = s/c tokens of this rank, b micro-batch, a query heads, g key heads, d and w
the widths of a key and of a value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.ops.flash import (
    Attended,
    AttentionBlock,
    ScoreRule,
    attend_block,
    differentiate_block,
    document_mask,
    merge,
    sink_gradients,
    window_mask,
    with_sinks,
)
from phalanx.trainer.ops.kernels import PLAIN_SCORES, attention
from phalanx.trainer.parallel.comm import Group, Pending
from phalanx.trainer.parallel.ledger import Ledger


class Travel(Protocol):
    """How keys and values of all ranks come to this one, and their gradients return."""

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """This rank's block first, then every other, each with the rank that it is of."""
        ...

    def return_gradients(self, gradients: Iterator[tuple[int, Tensor]]) -> Tensor:
        """Send what each block's gradient is here to its rank; the sum of this rank's own.

        Args:
            gradients: in the order in which blocks came.
        """
        ...


@dataclass(frozen=True)
class ContextParallel:
    """How one rank takes part in attention over sequences that its group holds together.

    Attributes:
        group: the ranks along cp.
        kind: ring, gather or ulysses.
    """

    group: Group
    kind: str = "ring"

    def my_part(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's two chunks of `x` along its sequence, [.., s, ..] to [.., s/c, ..].

        Args:
            x: whole sequences, of a length that 2c divides.
            dim: of the sequence.
        """
        return self.part_of(self.group.index, x, dim)

    def part_of(self, rank: int, x: Tensor, dim: int = 0) -> Tensor:
        """The two chunks of `x` along its sequence that group index `rank` holds.

        Args:
            rank: which of the group.
            x: whole sequences, of a length that 2c divides.
            dim: of the sequence.
        """
        if self.group.size == 1:
            return x
        chunks = x.chunk(2 * self.group.size, dim)
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        rule: ScoreRule = PLAIN_SCORES,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T / sqrt(d)) v over the whole sequence, causal, without keeping scores.

        Args:
            q: [n, b, a, d].
            k: [n, b, g, d]; a is a multiple of g.
            v: [n, b, g, w].
            documents: int32 [b, s], which document each token of the whole sequence belongs to,
                and alone may look at; None where a sequence is one.
            rule: how scores are made, and which of them count.
            sinks: [a], a score of each head that selects nothing.

        Returns:
            [n, b, a w].
        """
        if self.group.size == 1:
            mask = _whole_mask(documents, rule, len(q), q.device)
            q, k, v = (_heads_first(x) for x in (q, k, v))
            return _tokens_first(attention(q, k, v, mask, rule, sinks)).flatten(2)
        return cast(Tensor, _together(_Sequence(self, documents, rule), q, k, v, sinks))

    def sums(self, x: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
        """Add up along whole sequences, without autograd.

        Args:
            x: [n, b, w].
            purpose: of the message, for the ledger.

        Returns:
            The sums up to each token of this rank, itself included [n, b, w], and over all [b, w].
        """
        if self.group.size == 1:
            return x.cumsum(0), x.sum(0)
        mine = x.unflatten(0, (2, -1))
        every = x.new_empty(self.group.size, 2, *x.shape[1:])
        self.group.all_gather(every, mine.sum(1), purpose).wait()
        chunks = torch.cat((every[:, 0], every[:, 1].flip(0)))
        before = chunks.cumsum(0) - chunks
        start = torch.stack((before[self.group.index], before[-1 - self.group.index]))
        return (mine.cumsum(1) + start.unsqueeze(1)).flatten(0, 1), chunks.sum(0)

    @property
    def travel(self) -> Travel:
        """The way of keys and values."""
        return _Gather(self.group) if self.kind == "gather" else _Ring(self.group)


def undivided() -> ContextParallel:
    """Sequences that one rank holds whole."""
    return ContextParallel(Group("context", (0,), None, Ledger()))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it so
def _together(
    sequence: "_Sequence", q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """With the ranks that hold the rest; a compiled block is two graphs around it."""
    function = _AcrossHeads if sequence.context.kind == "ulysses" else _BlockByBlock
    return cast(Tensor, apply(function, sequence, q, k, v, sinks))


def _whole_mask(
    documents: Tensor | None, rule: ScoreRule, s: int, device: torch.device
) -> Tensor | None:
    """Who sees whom in whole sequences of s tokens; None where everybody sees all before."""
    mask = None if documents is None else document_mask(documents, documents, causal=True)
    if not 0 < rule.window < s:
        return mask
    places = torch.arange(s, device=device)
    near = window_mask(places, places, rule.window)
    return near if mask is None else mask & near


class _Sequence:
    """Who may look at whom in one micro-batch."""

    def __init__(self, context: ContextParallel, documents: Tensor | None, rule: ScoreRule) -> None:
        self.context, self.documents, self.rule = context, documents, rule

    def seen(self, source: int, n: int) -> tuple[slice, slice]:
        """Which of this rank's n queries see something of a rank's n keys, and of which keys.

        The first chunk of an earlier rank lies before both of ours, and its last after both; both
        chunks of a later rank lie between ours.
        """
        me = self.context.group.index
        whole, first, last = slice(0, n), slice(0, n // 2), slice(n // 2, n)
        if source == me:
            return whole, whole
        return (whole, first) if source < me else (last, whole)

    def block(self, q: Tensor, kv: Tensor, source: int) -> AttentionBlock:
        """The queries [n, b, a, d] and keys and values [n, b, g, d + w] that meet in a block."""
        queries, keys = self.seen(source, len(q))
        own = source == self.context.group.index
        k, v = kv[keys].split((q.shape[-1], kv.shape[-1] - q.shape[-1]), -1)
        mask = None
        if self.documents is not None:
            mine = self.context.my_part(self.documents, 1)[:, queries]
            theirs = self.context.part_of(source, self.documents, 1)[:, keys]
            mask = document_mask(mine, theirs, causal=own)
        if 0 < self.rule.window < len(q) * self.context.group.size:
            near = self._near(source, len(q), queries, keys).to(q.device)
            mask = near if mask is None else mask & near
        q, k, v = (_heads_first(x) for x in (q[queries], k, v))
        return AttentionBlock(q, k, v, mask, own and mask is None, self.rule)

    def _near(self, source: int, n: int, queries: slice, keys: slice) -> Tensor:
        """Which keys of a rank lie in the window of which queries: bool [1, 1, .., ..]."""
        places = torch.arange(n * self.context.group.size)
        mine, theirs = self.context.my_part(places), self.context.part_of(source, places)
        return window_mask(mine[queries], theirs[keys], self.rule.window)


class _BlockByBlock(torch.autograd.Function):
    """Attention to the keys of one rank after the other, merged in fp32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, sequence: _Sequence, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        total: Attended | None = None
        for source, kv in sequence.context.travel.blocks(torch.cat((k, v), -1)):
            found = attend_block(sequence.block(q, kv, source))
            if total is None:
                total = Attended(found.out.to(found.lse.dtype), found.lse)
            else:
                merge(total.rows(sequence.seen(source, len(q))[0]), found)
        assert total is not None
        total = total if sinks is None else with_sinks(total, sinks)
        y = _tokens_first(total.out).to(q.dtype).flatten(2)
        ctx.sequence = sequence
        ctx.save_for_backward(q, k, v, y, total.lse, sinks)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sequence = cast(_Sequence, ctx.sequence)
        q, k, v, y, lse, sinks = cast(tuple[Tensor, ...], ctx.saved_tensors)
        done, grad = Attended(_by_head(y, v), lse), _by_head(grads[0], v)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        travel = sequence.context.travel

        def gradients() -> Iterator[tuple[int, Tensor]]:
            for source, kv in travel.blocks(torch.cat((k, v), -1)):
                queries, keys = sequence.seen(source, len(q))
                block = sequence.block(q, kv, source)
                found = differentiate_block(block, done.rows(queries), grad[:, :, queries])
                dq[queries] += _tokens_first(found[0])
                part = torch.zeros_like(kv, dtype=lse.dtype)
                _fill(part[keys], found[1:])
                del block, kv, found  # not to be held while others are waited for
                yield source, part
                del part

        dk, dv = (
            travel.return_gradients(gradients()).to(q.dtype).split((k.shape[-1], v.shape[-1]), -1)
        )
        own = None if sinks is None else sink_gradients(done, grad, sinks)
        return None, dq.to(q.dtype), dk, dv, own


def _fill(part: Tensor, gradients: tuple[Tensor, ...]) -> None:
    """Lay gradients of keys and of values, [b, g, m, d] and [b, g, m, w], side by side."""
    widths = [x.shape[-1] for x in gradients]
    for place, x in zip(part.split(widths, -1), gradients, strict=True):
        place.copy_(_tokens_first(x))


class _Ring:
    """Every rank hands its block to the next one, c - 1 times."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The next block arrives while the current one is used."""
        size, block = self.group.size, mine.contiguous()
        del mine
        for step in range(size - 1):
            arriving = torch.empty_like(block)
            pending = self.group.shift(arriving, block, "keys and values")
            yield (self.group.index - step) % size, block
            pending.wait()
            block = arriving
        yield (self.group.index + 1) % size, block

    def return_gradients(self, gradients: Iterator[tuple[int, Tensor]]) -> Tensor:
        """A gradient follows its block, one rank behind, and grows on every rank.

        What a rank adds to its own stays there; so c - 1 messages return each gradient.
        """
        _, mine = next(gradients)
        arriving, pending = torch.empty(0), Pending()
        for _, part in gradients:
            pending.wait()
            if arriving.numel():
                part.add_(arriving)
            else:
                arriving = torch.empty_like(part)
            pending = self.group.shift(arriving, part, "key and value gradients")
        pending.wait()
        return mine.add_(arriving)


class _Gather:
    """Every rank has all blocks at once."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The others arrive while this rank's own is used."""
        size, me = self.group.size, self.group.index
        whole = mine.new_empty((size * len(mine), *mine.shape[1:]))
        pending = self.group.all_gather(whole, mine.contiguous(), "keys and values")
        yield me, mine
        del mine
        pending.wait()
        for step in range(1, size):
            source = (me - step) % size
            yield source, whole.chunk(size)[source]

    def return_gradients(self, gradients: Iterator[tuple[int, Tensor]]) -> Tensor:
        """All ranks add up what each has for each."""
        source, mine = next(gradients)
        whole = mine.new_empty((self.group.size * len(mine), *mine.shape[1:]))
        parts = whole.chunk(self.group.size)
        parts[source].copy_(mine)
        for source, part in gradients:
            parts[source].copy_(part)
            del part
        self.group.reduce_scatter(mine, whole, "key and value gradients").wait()
        return mine


class _AcrossHeads(torch.autograd.Function):
    """Trade tokens for heads, attend to whole sequences, and trade back."""

    @staticmethod
    def forward(
        ctx: Any, sequence: _Sequence, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        group = sequence.context.group
        ctx.sequence = sequence
        mine = _to_heads(group, (q, k, v), "queries, keys and values")
        found = attend_block(_whole_block(sequence, mine))
        if sinks is not None:
            found = with_sinks(found, _own_heads(group, sinks))
        (y,) = _to_tokens(group, (_tokens_first(found.out),), "attention result")
        y = y.flatten(2)
        ctx.save_for_backward(*mine, y, found.lse, sinks)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sequence = cast(_Sequence, ctx.sequence)
        group = sequence.context.group
        *mine, y, lse, sinks = cast(tuple[Tensor, ...], ctx.saved_tensors)
        width = mine[2].shape[-1]
        pair = tuple(x.unflatten(2, (-1, width)) for x in (y, grads[0]))
        out, grad = _to_heads(group, pair, "attention result and gradient")
        done = Attended(_heads_first(out), lse)
        found = differentiate_block(_whole_block(sequence, mine), done, _heads_first(grad))
        own = None
        if sinks is not None:
            own = torch.zeros_like(sinks)
            heads = _own_heads(group, own)
            heads.copy_(sink_gradients(done, _heads_first(grad), _own_heads(group, sinks)))
        del mine, pair, out, grad, done  # not to be held while others are waited for
        trade = tuple(_tokens_first(x) for x in found)
        return None, *_to_tokens(group, trade, "query, key and value gradients"), own


def _own_heads(group: Group, sinks: Tensor) -> Tensor:
    """Of the heads that this rank has all tokens of: [a] to [a/c]."""
    return sinks.view(group.size, -1)[group.index]


def _whole_block(sequence: _Sequence, mine: Any) -> AttentionBlock:
    q, k, v = (_heads_first(x) for x in mine)
    mask = _whole_mask(sequence.documents, sequence.rule, q.shape[2], q.device)
    return AttentionBlock(q, k, v, mask, mask is None, sequence.rule)


def _to_heads(group: Group, xs: tuple[Tensor, ...], purpose: str) -> list[Tensor]:
    """All tokens of this rank's heads, in order: each [n, b, a, d] to [s, b, a/c, d]."""
    c, n = group.size, len(xs[0])
    split = [x.unflatten(2, (c, -1)).movedim(2, 0) for x in xs]
    arrived = _traded(group, torch.cat([x.flatten(-2) for x in split], -1), purpose)
    chunks = arrived.view(2 * c, n // 2, *arrived.shape[2:])
    whole = chunks[_held_order(c).argsort()].flatten(0, 1)
    return _unpacked(whole, [x.shape[-2:] for x in split])


def _to_tokens(group: Group, xs: tuple[Tensor, ...], purpose: str) -> list[Tensor]:
    """The way back: each [s, b, a/c, d] to [n, b, a, d]."""
    c = group.size
    chunks = torch.cat([x.flatten(-2) for x in xs], -1).unflatten(0, (2 * c, -1))
    chunks = chunks[_held_order(c)].unflatten(0, (c, 2)).flatten(1, 2)
    parts = _unpacked(_traded(group, chunks, purpose), [x.shape[-2:] for x in xs])
    return [x.movedim(0, 2).flatten(2, 3) for x in parts]


def _traded(group: Group, sent: Tensor, purpose: str) -> Tensor:
    """Row i of `sent` for row i of rank i."""
    arrived = torch.empty_like(sent)
    group.all_to_all(arrived, sent, purpose).wait()
    return arrived


def _held_order(c: int) -> Tensor:
    """The chunks in the order in which ranks hold them: 0, 2c - 1, 1, 2c - 2, ..."""
    ranks = torch.arange(c)
    return torch.stack((ranks, 2 * c - 1 - ranks), 1).flatten()


def _unpacked(x: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Several tensors that lie side by side in the last dim of one, with their own last dims."""
    parts = x.split([shape.numel() for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _by_head(x: Tensor, v: Tensor) -> Tensor:
    """[n, b, a w] to [b, a, n, w]."""
    return _heads_first(x.unflatten(2, (-1, v.shape[-1])))


def _heads_first(x: Tensor) -> Tensor:
    """[n, b, a, d] to [b, a, n, d]."""
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    """[b, a, n, d] to [n, b, a, d]."""
    return x.permute(2, 0, 1, 3)
