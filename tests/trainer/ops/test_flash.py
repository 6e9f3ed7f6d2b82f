from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx.trainer.ops.flash import (
    Attended,
    AttentionBlock,
    _plain,
    _plain_gradients,
    attend_block,
    differentiate_block,
    document_mask,
    merge,
)

NEAR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Sizes(NamedTuple):
    """Query and key heads, widths of a key and of a value."""

    a: int
    g: int
    d: int
    w: int


SIZES = [Sizes(4, 4, 8, 8), Sizes(4, 2, 8, 8), Sizes(4, 4, 8, 5), Sizes(3, 1, 6, 10)]


def drawn(sizes: Sizes, dtype: torch.dtype, n: int = 6, m: int = 9) -> AttentionBlock:
    """Queries, keys and values as a layer makes them, the sequence first in memory."""
    generator = torch.Generator().manual_seed(1)

    def tensor(length: int, heads: int, width: int) -> Tensor:
        x = torch.randn(length, 2, heads, width, generator=generator, dtype=torch.float64)
        return x.to(dtype).permute(1, 2, 0, 3)

    return AttentionBlock(
        tensor(n, sizes.a, sizes.d), tensor(m, sizes.g, sizes.d), tensor(m, sizes.g, sizes.w)
    )


def masked(block: AttentionBlock) -> AttentionBlock:
    """One in which the third query may look at no key."""
    n, m = block.q.shape[2], block.k.shape[2]
    mask = torch.rand(2, 1, n, m, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, :, 2] = False
    mask[:, :, 0] = True
    return block._replace(mask=mask)


def by_definition(block: AttentionBlock) -> Attended:
    times = block.q.shape[1] // block.k.shape[1]
    k, v = (x.double().repeat_interleave(times, 1) for x in (block.k, block.v))
    scores = block.q.double() @ k.transpose(-1, -2) / block.q.shape[-1] ** 0.5
    may = block.mask if block.mask is not None else torch.ones_like(scores, dtype=torch.bool)
    if block.causal:
        may = may.tril()
    scores = scores.masked_fill(~may, -torch.inf)
    shares = scores.softmax(-1).nan_to_num(0.0)
    return Attended(shares @ v, scores.logsumexp(-1))


def part(block: AttentionBlock, keys: slice) -> AttentionBlock:
    mask = None if block.mask is None else block.mask[..., keys]
    return block._replace(k=block.k[:, :, keys], v=block.v[:, :, keys], mask=mask)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("way", [attend_block, _plain])
@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_a_block_is_attended_by_the_definition(way, sizes: Sizes, dtype: torch.dtype, kind: str):
    block = drawn(sizes, dtype, m=6 if kind == "causal" else 9)
    block = masked(block) if kind == "masked" else block._replace(causal=kind == "causal")
    found, exact = way(block), by_definition(block)
    near = {"rtol": NEAR[dtype], "atol": NEAR[dtype]}
    torch.testing.assert_close(found.out.double(), exact.out, **near)
    torch.testing.assert_close(found.lse.double(), exact.lse, **near)
    assert found.lse.dtype == torch.promote_types(dtype, torch.float32)


def test_a_query_that_may_look_at_no_key_finds_zero_with_no_weight():
    for way in (attend_block, _plain):
        found = way(masked(drawn(SIZES[0], torch.float32)))
        assert (found.lse[:, :, 2] == -torch.inf).all()
        assert (found.out[:, :, 2] == 0).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_blocks_merge_to_attention_over_all_keys(sizes: Sizes, mask: bool):
    block = drawn(sizes, torch.float64, m=12)
    block = masked(block) if mask else block
    whole = by_definition(block)
    parts = [part(block, slice(*span)) for span in ((0, 5), (5, 6), (6, 12))]
    total = attend_block(parts[0])
    seen = torch.isfinite(total.lse)
    for one in parts[1:]:
        merge(total, attend_block(one))
    torch.testing.assert_close(total.lse[seen], whole.lse[seen], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(total.out[seen], whole.out[seen], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("way", [differentiate_block, _plain_gradients])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_gradients_of_blocks_add_up_to_those_of_attention(way, sizes: Sizes, mask: bool):
    block = drawn(sizes, torch.float64, m=12)
    block = masked(block) if mask else block
    leaves = [x.detach().clone().requires_grad_() for x in (block.q, block.k, block.v)]
    done = by_definition(block._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(done.out.shape, generator=generator, dtype=torch.float64)
    if mask:
        grad[:, :, 2] = 0  # this query has no gradient, by whatever formula
    exact = torch.autograd.grad(done.out, leaves, grad)
    exact = tuple(x.nan_to_num(0.0) for x in exact)
    finite = done.lse.detach().masked_fill(~torch.isfinite(done.lse), 0.0)
    finished = Attended(done.out.detach(), finite)
    found = [way(part(block, span), finished, grad) for span in (slice(0, 7), slice(7, 12))]
    dq = found[0][0] + found[1][0]
    dk, dv = (torch.cat([one[i] for one in found], 2) for i in (1, 2))
    for mine, theirs in zip((dq, dk, dv), exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_documents_see_themselves_and_nothing_after():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]])
    mask = document_mask(documents, documents, causal=True)
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0].sum(-1).tolist() == [1, 2, 1, 2, 3, 1]
    assert document_mask(documents[:, 3:], documents[:, :3], causal=False)[0, 0].tolist() == [
        [False, False, True],
        [False, False, True],
        [False, False, False],
    ]
