from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core.layout import Layout, share
from phalanx.oracle.pool import RankPool
from phalanx.trainer.model.loss import IGNORED, ChunkedLoss, VocabSlice, token_losses
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.parallel.tensor import TensorParallel

Numbers = dict[str, Tensor]

F64 = torch.float64
VOCAB = 21


def questions(vocab: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets with holes, and upstream gradients of 3 x 4 tokens."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, 4, vocab, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, vocab, (3, 4), generator=generator)
    targets[0, 0], targets[2, 1] = IGNORED, IGNORED
    targets[1, 1], targets[1, 2] = 0, vocab - 1
    return logits, targets, torch.randn(3, 4, generator=generator, dtype=torch.float64)


def dense(vocab: int, scale: float, smoothing: float) -> Numbers:
    """What torch says, with all logits in one place, in fp64."""
    logits, targets, upstream = questions(vocab, scale)
    logits.requires_grad_()
    losses = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    ).view(3, 4)
    losses.backward(upstream)
    return {"losses": losses.detach(), "grad": logits.grad}


def split(vocab: int, scale: float, smoothing: float, dtype: torch.dtype) -> Numbers:
    """What this rank says of its part of the vocabulary."""
    group = build_mesh(Layout(tp=dist.get_world_size()), torch.device("cpu")).tensor
    first, size = share(vocab, group.size, group.index)
    logits, targets, upstream = questions(vocab, scale)
    mine = logits[..., first : first + size].to(dtype).clone().requires_grad_()
    losses = token_losses(mine, targets, VocabSlice(first, vocab, smoothing, group))
    losses.backward(upstream.to(losses.dtype))
    return {"losses": losses.detach(), "grad": mine.grad}


@pytest.mark.ranks
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize(("parts", "vocab"), [(2, 96), (2, 97), (4, 97)])
def test_split_logits_have_the_loss_and_gradient_of_whole_ones(
    ranks: RankPool, parts: int, vocab: int, scale: float, smoothing: float
) -> None:
    whole = dense(vocab, scale, smoothing)
    shares = ranks.run(parts, split, vocab, scale, smoothing, torch.float64)
    for mine in shares:
        torch.testing.assert_close(mine["losses"], whole["losses"], rtol=1e-13, atol=1e-13 * scale)
        assert torch.equal(mine["losses"], shares[0]["losses"])
    grad = torch.cat([mine["grad"] for mine in shares], -1)
    torch.testing.assert_close(grad, whole["grad"], rtol=1e-12, atol=1e-15)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_narrow_logits_is_summed_in_fp32(ranks: RankPool, dtype: torch.dtype) -> None:
    shares = ranks.run(2, split, 97, 10.0, 0.1, dtype)
    logits, targets, _ = questions(97, 10.0)
    exact = F.cross_entropy(
        logits.to(dtype).double().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=0.1,
    ).view(3, 4)
    for mine in shares:
        assert mine["losses"].dtype == torch.float32
        assert mine["grad"].dtype == dtype
        torch.testing.assert_close(mine["losses"].double(), exact, rtol=1e-5, atol=1e-6)


@given(smoothing=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 1000))
def test_a_token_without_a_target_has_no_loss_and_no_gradient(smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 7, generator=generator).requires_grad_()
    targets = torch.randint(0, 7, (5,), generator=generator)
    hidden = torch.rand(5, generator=generator) < 0.5
    targets[hidden] = IGNORED
    alone = Group("tensor", (0,), None, Ledger())
    losses = token_losses(logits, targets, VocabSlice(0, 7, smoothing, alone))
    losses.sum().backward()
    assert (losses[hidden] == 0).all()
    assert logits.grad is not None
    assert (logits.grad[hidden] == 0).all()
    assert (losses[~hidden] > 0).all()


def chunked(tokens: int, dtype: torch.dtype, *, sequence: bool = False) -> Numbers:
    """What this rank says of the loss of 8 x 2 tokens, and of its part of the gradients."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    group = build_mesh(Layout(tp=size), torch.device("cpu")).tensor
    tp = TensorParallel(group, sequence=sequence)
    first, size = share(VOCAB, group.size, group.index)
    x, weight, targets = projection()
    mine = tp.my_sequence(x).to(dtype).clone().requires_grad_()
    rows = weight[first : first + size].to(dtype).clone().requires_grad_()
    loss = ChunkedLoss(tp, VocabSlice(first, VOCAB, 0.1, group), tokens).sum(mine, rows, targets)
    (loss * 0.25).backward()
    return {"loss": loss.detach(), "dx": mine.grad, "dw": rows.grad}


def projection() -> tuple[Tensor, Tensor, Tensor]:
    """Activations [8, 2, 6], a table [21, 6], targets with holes [8, 2]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 2, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (8, 2), generator=generator)
    targets[1, 1] = targets[7] = IGNORED
    return x, weight, targets


def projected() -> Numbers:
    """What torch says of it, with all logits in one place."""
    x, weight, targets = projection()
    x.requires_grad_(), weight.requires_grad_()
    logits = (x @ weight.t()).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=0.1)
    (loss * 0.25).backward()
    return {"loss": loss.detach(), "dx": x.grad, "dw": weight.grad}


@pytest.mark.ranks
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16, 1000])
def test_logits_that_never_stand_whole_have_the_loss_and_gradients_of_whole_ones(
    ranks: RankPool, tokens: int, sequence: bool
) -> None:
    whole, shares = projected(), ranks.run(2, partial(chunked, sequence=sequence), tokens, F64)
    dxs = [mine["dx"] for mine in shares]
    for mine in shares:
        torch.testing.assert_close(mine["loss"], whole["loss"], rtol=1e-13, atol=0)
    dx = torch.cat(dxs) if sequence else dxs[0]
    torch.testing.assert_close(dx, whole["dx"], rtol=1e-12, atol=1e-14)
    dw = torch.cat([mine["dw"] for mine in shares])
    torch.testing.assert_close(dw, whole["dw"], rtol=1e-12, atol=1e-14)


def test_gradients_of_narrow_chunks_are_added_up_in_fp32() -> None:
    whole, parts = chunked(16, torch.bfloat16), chunked(1, torch.bfloat16)
    assert parts["dw"].dtype == torch.bfloat16
    step = torch.finfo(torch.bfloat16).eps * whole["dw"].abs().max()
    assert (parts["dw"] - whole["dw"]).abs().max() <= step
    torch.testing.assert_close(parts["loss"], whole["loss"], rtol=1e-6, atol=0)


def test_where_nothing_is_learned_chunks_make_no_gradients() -> None:
    group = Group("tensor", [0], None, Ledger())
    tp, (x, weight, targets) = TensorParallel(group, sequence=False), projection()
    with torch.no_grad():
        loss = ChunkedLoss(tp, VocabSlice(0, VOCAB, 0.1, group), 5).sum(x, weight, targets)
    torch.testing.assert_close(loss, projected()["loss"])
    assert not loss.requires_grad
