"""Statistics of bf16 tensors are those of their definitions in fp64, but for one rounding.

Both sides of the oracle share these formulas, so it cannot see them: here they stand against
definitions, at long positions, over long rows and with outliers.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.experts import Router
from phalanx.trainer.model.layers import LayerNorm, RMSNorm
from phalanx.trainer.model.loss import IGNORED, VocabSlice, token_losses
from phalanx.trainer.model.rotary import rotary_angles, rotate
from phalanx.trainer.ops.flash import Attended, AttentionBlock, attend_block, merge
from phalanx.trainer.ops.kernels import attention
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.tensor import TensorParallel

LONGEST = 32_768
HALF_UNIT = 2.0**-8  # of bf16: the largest relative error of one rounding
SMALL = 1e-5  # what fp32 in between may add, as a share of the largest number


def drawn(*shape: int, outliers: bool = False, seed: int = 0) -> Tensor:
    """Normal numbers in bf16; of outliers, one in a hundred is a thousand times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if outliers:
        x *= torch.where(torch.rand(shape, generator=generator) < 0.01, 1000.0, 1.0)
    return x.bfloat16()


def assert_one_rounding(found: Tensor, exact: Tensor) -> None:
    """Every element is the exact one, rounded once."""
    assert found.dtype == torch.bfloat16
    allowed = 1.01 * HALF_UNIT * exact.abs() + SMALL * HALF_UNIT * exact.abs().max()
    off = (found.double() - exact).abs() - allowed
    assert off.max() <= 0, f"off by {(found.double() - exact).abs().max()}"


def gradients(y: Tensor, upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, upstream.to(y.dtype))


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def alone() -> TensorParallel:
    return TensorParallel(Group("tensor", (0,), None, Ledger()), sequence=False)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_rounds_once(kind: str, outliers: bool) -> None:
    width, eps = 512, 1e-5
    x, upstream = drawn(4096, width, outliers=outliers), drawn(4096, width, seed=1)
    weight, bias = drawn(width, seed=2), drawn(width, seed=3)
    exact_x, exact_weight = (t.double().requires_grad_() for t in (x, weight))
    if kind == "rms":
        norm: RMSNorm | LayerNorm = RMSNorm("norm", width, eps, needs_tp_reduce=False)
        exact = exact_rms_norm(exact_x, exact_weight, eps)
    else:
        norm = LayerNorm("norm", ModelShape(hidden=width, norm_eps=eps), alone())
        norm.bias = nn.Parameter(bias)
        centred = exact_x - exact_x.mean(-1, keepdim=True)
        exact = exact_rms_norm(centred, exact_weight, eps) + bias.double()
    norm.weight = nn.Parameter(weight)
    y = norm(x.requires_grad_())
    assert_one_rounding(y, exact.detach())
    found = gradients(y, upstream, x, *norm.parameters())
    wanted = gradients(exact, upstream, exact_x, exact_weight)
    wanted += (upstream.double().sum(0),) if kind == "layer" else ()
    for mine, true in zip(found, wanted, strict=True):
        assert (mine.double() - true).norm() <= HALF_UNIT * true.norm()


def exact_angles(shape: ModelShape, positions: Tensor) -> Tensor:
    d = shape.rotary_dim
    rates = shape.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return positions.double()[..., None, None] * rates


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_angles_at_long_positions_are_those_of_their_definition(theta: float) -> None:
    shape = ModelShape(hidden=512, heads=4, rope_theta=theta)
    positions = torch.tensor([[0], [1], [255], [257], [4_097], [LONGEST - 1]])
    angles = exact_angles(shape, positions)
    of_fp32 = LONGEST * 2.0**-22  # an angle of so many turns in fp32
    for found, exact in zip(
        rotary_angles(shape, positions, torch.bfloat16, 1),
        (angles.cos(), angles.sin()),
        strict=True,
    ):
        assert (found.double() - exact).abs().max() <= HALF_UNIT / 2 + of_fp32


def test_keys_at_long_positions_turn_by_their_angle() -> None:
    """What attention sees is the distance, as far from the start as near it."""
    shape = ModelShape(hidden=64, heads=1, kv_heads=1)
    q, k = drawn(1, 1, 1, 64), drawn(1, 1, 1, 64, seed=1)
    scores = []
    for start in (0, 1_000, LONGEST - 8):
        turned = [
            rotate(x, rotary_angles(shape, torch.tensor([[at]]), torch.bfloat16, 1)).double()
            for x, at in ((q, start + 7), (k, start))
        ]
        scores.append((turned[0] * turned[1]).sum())
    size = q.double().norm() * k.double().norm()
    assert max(scores) - min(scores) <= 2 * HALF_UNIT * size


@pytest.mark.parametrize("sharp", [1.0, 8.0])
def test_a_softmax_over_long_rows_is_that_of_its_definition(sharp: float) -> None:
    """Scores up to some hundred: in bf16 they would be off by a half, and shares by as much."""
    q, k, v = (drawn(1, 2, 512, 64, seed=i) for i in range(3))
    q = (q * sharp).bfloat16()
    scores = q.double() @ k.double().transpose(-1, -2) / 8
    mask = torch.ones(512, 512, dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -math.inf)
    exact = scores.softmax(-1) @ v.double()
    block = AttentionBlock(q, k, v, causal=True)
    for found in (attention(q, k, v, None), attend_block(block).out):
        assert (found.double() - exact).norm() <= HALF_UNIT * exact.norm()
    off = attend_block(block).lse.double() - scores.logsumexp(-1)
    assert off.abs().max() <= 1e-4  # where bf16 would be off by 1e-2


def test_many_blocks_merge_as_if_they_were_one() -> None:
    q, k, v = (drawn(1, 2, 64 if i == 0 else 2048, 64, seed=i) for i in range(3))
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    total: Attended | None = None
    for keys, values in zip(k.chunk(64, 2), v.chunk(64, 2), strict=True):
        found = attend_block(AttentionBlock(q, keys, values))
        if total is None:
            total = Attended(found.out.to(found.lse.dtype), found.lse)
        else:
            merge(total, found)
    assert total is not None
    assert total.out.dtype == torch.float32
    assert (total.out.double() - exact).norm() <= HALF_UNIT * exact.norm()


EXPERTS = ModelShape(hidden=64, heads=4, experts=16, top_k=2, routing="softmax")


def routed(shape: ModelShape, recipe: Recipe, x: Tensor, weight: Tensor) -> tuple[Tensor, Router]:
    router = Router("router", shape, recipe, alone())
    router.weight = nn.Parameter(weight)
    tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, tokens, None, torch.arange(x.shape[1]), len(x), step=0)
    routing = router(x, batch)
    kept = torch.ones_like(routing.chosen, dtype=torch.bool)
    kept = kept if routing.kept is None else routing.kept
    weights = torch.zeros(*x.shape[:2], shape.experts, dtype=routing.weights.dtype)
    return weights.scatter(-1, routing.chosen, routing.weights * kept), router


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
def test_a_router_scores_and_sums_in_fp32(routing: str) -> None:
    shape = ModelShape(**{**vars(EXPERTS), "routing": routing})
    x, weight = drawn(256, 2, 64), (0.1 * drawn(16, 64, seed=1)).bfloat16()
    found, _ = routed(shape, Recipe(), x, weight)
    logits = x.double() @ weight.double().t()
    affinity = logits.softmax(-1) if routing == "softmax" else logits.sigmoid()
    best = affinity.topk(2, -1)
    shares = best.values / best.values.sum(-1, keepdim=True)
    exact = torch.zeros_like(affinity).scatter(-1, best.indices, shares)
    assert (found.double() - exact).abs().max() <= SMALL


def test_an_expert_counts_more_tokens_than_16_bits_can() -> None:
    """In bf16 256 + 1 is 256: an expert would never be full."""
    recipe = Recipe(capacity=8.0)
    x, weight = torch.ones(1024, 1, 64).bfloat16(), torch.zeros(16, 64).bfloat16()
    weight[5], weight[6] = 1.0, 0.5
    shares, router = routed(EXPERTS, recipe, x.requires_grad_(), weight)
    places = math.ceil(8.0 * 1024 * 2 / 16)
    assert places == 1024
    assert (shares[..., 5] > 0).sum() == places
    shares.sum().backward()
    assert router.take_seen().tolist()[5:7] == [1024, 1024]
    shares, _ = routed(EXPERTS, Recipe(capacity=516 / 128), x, weight)
    assert (shares[..., 5] > 0).sum() == 516  # in bf16 517 is 516, and would still fit


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_loss_over_a_large_vocabulary_is_that_of_its_definition(scale: float) -> None:
    vocab, smoothing = 50_000, 0.1
    logits = (drawn(16, vocab) * scale).bfloat16().requires_grad_()
    targets = torch.arange(16) * 3_001
    targets[3] = IGNORED
    part = VocabSlice(0, vocab, smoothing, Group("tensor", (0,), None, Ledger()))
    losses = token_losses(logits, targets, part)
    wide = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses.double(), exact, rtol=SMALL, atol=SMALL)
    (found,) = torch.autograd.grad(losses.sum(), logits)
    (true,) = torch.autograd.grad(exact.sum(), wide)
    assert_one_rounding(found, true)
