"""A product is held against its checksum: rounding is never blamed, and what is larger is found."""

import pytest
import torch
from torch import Tensor

from phalanx.trainer.precision.product import Operand
from phalanx.trainer.precision.sampled import ProductSampler, SampledPlain, excess

HALF = (torch.bfloat16, torch.float16)


def signs() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def operands(dtype: torch.dtype, *, alike: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of a batch and a matrix; `alike` has every row the same, as padding is."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(1 if alike else 384, 96, generator=draw).expand(384, 96)
    return a.to(dtype), torch.randn(80, 96, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("alike", [False, True])
def test_rounding_is_not_blamed(dtype: torch.dtype, alike: bool) -> None:
    a, b = operands(dtype, alike=alike)
    shares = [excess(a @ b.t(), a, b, generator) for generator in [signs()] * 50]
    assert 0 < max(shares) < 0.5


@pytest.mark.parametrize(
    ("dtype", "words", "first"),
    [(torch.float32, torch.int32, 19), (torch.bfloat16, torch.int16, 10)],
)
def test_a_flip_from_some_bit_on_is_found(
    dtype: torch.dtype, words: torch.dtype, first: int
) -> None:
    """In an element of usual size: a part of the mantissa in fp32, of the exponent in bf16."""
    a, b = operands(dtype)
    y = a @ b.t()
    usual = y.abs().flatten().median()
    at = int((y.abs().flatten() - usual).abs().argmin())
    bits = torch.finfo(dtype).bits
    found = []
    for bit in range(bits - 1):
        flipped = y.clone()
        flipped.view(-1).view(words)[at] ^= 1 << bit
        if flipped.isfinite().all() and excess(flipped, a, b, signs()) > 1:
            found.append(bit)
    assert set(range(first, bits - 2)) <= set(found)


def test_one_product_of_every_so_many_steps_is_looked_at() -> None:
    sampler = ProductSampler(every=3)
    product = SampledPlain("up", sampler)
    a, b = operands(torch.float32)
    looked = []
    for step in range(7):
        sampler.begin_step(step)
        for _ in range(5):
            product.forward(Operand(a), Operand(b))
        looked.append(len(sampler._looks))
        assert sampler.found() == ""
    assert looked == [0, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("kind", ["forward", "input_gradient", "weight_gradient"])
def test_each_product_of_a_projection_has_its_checksum(kind: str) -> None:
    sampler = ProductSampler(every=1)
    product = SampledPlain("up", sampler)
    a, b = operands(torch.float32)
    g = a @ b.t()
    ask = {"forward": (a, b), "input_gradient": (g, b), "weight_gradient": (g, a)}[kind]
    for step in range(2):
        sampler.begin_step(step)
        getattr(product, kind)(*map(Operand, ask))
    assert len(sampler._looks) == 1
    assert sampler.found() == ""
