"""Products by shape and format, attention, and what memory gives."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from phalanx.trainer.calibrate.bench import Bench, Sampled
from phalanx.trainer.ops.kernels import attention, times

# M, N, K of projections that are learned: tokens, channels out, channels in.
PRODUCT_SHAPES = (
    *((1024, 1024, 1024), (2048, 1024, 1024), (1024, 2048, 512)),
    *((512, 256, 256), (1024, 512, 512), (512, 1024, 256), (512, 256, 1024)),
    *((256, 128, 128), (512, 512, 128), (512, 128, 512), (2048, 256, 256)),
)
QUICK_SHAPES = ((512, 512, 512), (256, 128, 128), (512, 256, 64))
# b, a, s, d of attention.
ATTENTION_SHAPES = ((2, 4, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64), (4, 4, 128, 32))
QUICK_ATTENTION = ((2, 4, 128, 32),)
_COPIED = 64 << 20  # bytes, which no cache holds
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ProductTime(NamedTuple):
    """A projection of M tokens from K to N channels, and both of its gradients.

    Attributes:
        format: of the operands.
        M, N, K: sizes.
        seconds: of all three products together.
    """

    format: str
    M: int
    N: int
    K: int
    seconds: Sampled

    @property
    def flops(self) -> float:
        """FLOP of all three."""
        return 6.0 * self.M * self.N * self.K


class AttentionTime(NamedTuple):
    """Causal attention, forward and backward.

    Attributes:
        format: of its operands.
        b, a, s, d: sequences, heads, tokens, width of a head.
        seconds: of both passes.
    """

    format: str
    b: int
    a: int
    s: int
    d: int
    seconds: Sampled

    @property
    def forward_flops(self) -> float:
        """FLOP of its two products in forward, of which the mask leaves half."""
        return 4.0 * self.b * self.a * self.s * (self.s / 2) * self.d


def products(bench: Bench, formats: tuple[str, ...], *, quick: bool) -> Iterator[ProductTime]:
    """Time projections, as the trainer multiplies.

    Args:
        bench: where.
        formats: "fp32", "bf16".
        quick: only a few small ones.
    """
    for name in formats:
        dtype, device = _DTYPES[name], bench.mesh.device
        for M, N, K in QUICK_SHAPES if quick else PRODUCT_SHAPES:
            x = torch.randn(M, K, device=device).to(dtype)
            w = torch.randn(N, K, device=device).to(dtype)
            g = torch.randn(M, N, device=device).to(dtype)

            def passes(x: torch.Tensor = x, w: torch.Tensor = w, g: torch.Tensor = g) -> None:
                times(x, w)
                times(g, w.t())
                g.t() @ x

            yield ProductTime(name, M, N, K, bench.sample(passes))


def attentions(bench: Bench, name: str, *, quick: bool) -> Iterator[AttentionTime]:
    """Time causal attention, as the trainer computes it.

    Args:
        bench: where.
        name: "fp32" or "bf16".
        quick: only a small one.
    """
    dtype, device = _DTYPES[name], bench.mesh.device
    for b, a, s, d in QUICK_ATTENTION if quick else ATTENTION_SHAPES:
        q, k, v, g = (torch.randn(b, a, s, d, device=device).to(dtype) for _ in range(4))
        inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        yield AttentionTime(name, b, a, s, d, bench.sample(_attending(inputs, g)))


def _attending(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], g: torch.Tensor
) -> Callable[[], object]:
    """Attention of queries, keys and values, and their gradients."""
    return lambda: torch.autograd.grad(attention(*inputs, None), inputs, g)


def memory_rate(bench: Bench) -> Sampled:
    """Bytes/s of one rank that reads and writes more than any cache holds.

    Args:
        bench: where; all ranks do it at once.

    Returns:
        The median, and between which rates four of five samples lie.
    """
    x = torch.ones(_COPIED // 4, device=bench.mesh.device)
    y = torch.empty_like(x)
    found = bench.sample(lambda: y.copy_(x))
    return Sampled(*(2 * _COPIED / found[i] for i in (0, 2, 1)))


def launch_seconds(bench: Bench) -> Sampled:
    """Seconds of one operation on almost nothing: what it costs to start one.

    Args:
        bench: where.
    """
    x = torch.ones(8, device=bench.mesh.device)

    def many() -> None:
        for _ in range(100):
            x.add_(1.0)

    found = bench.sample(many)
    return Sampled(*(value / 100 for value in found))


def host_copy(bench: Bench) -> tuple[float, float] | None:
    """Latency and bytes/s of copies between the host and its device; None where both are one.

    Args:
        bench: where.
    """
    if bench.mesh.device.type != "cuda":
        return None
    small, large = (bench.sample(_copying(size, bench.mesh.device)).median for size in (4, _COPIED))
    return small, _COPIED / max(large - small, 1e-9)


def _copying(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    host = torch.empty(size // 4, pin_memory=True)
    there = torch.empty(size // 4, device=device)
    return lambda: there.copy_(host, non_blocking=True)
