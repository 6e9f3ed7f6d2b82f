import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.trainer.ops import kernels
from phalanx.trainer.ops.kernels import rms_norm, times

EPSILON = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def off_by(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm of the exact one."""
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("sizes", [(3, 2, 8, 5), (64, 8, 256, 128)], ids=["small", "large"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_exact_whichever_library_computes_it(
    dtype: torch.dtype, sizes: tuple[int, ...], transposed: bool
) -> None:
    s, b, n_in, n_out = sizes
    x = torch.randn(s, b, n_in).to(dtype)
    w = (torch.randn(n_in, n_out).t() if transposed else torch.randn(n_out, n_in)).to(dtype)
    y = times(x, w)
    assert y.shape == (s, b, n_out)
    assert y.dtype == dtype
    assert off_by(y, x.double() @ w.double().t()) < EPSILON[dtype]


def test_the_large_size_of_these_tests_is_one_that_onednn_computes() -> None:
    assert 64 * 8 * 256 * 128 >= kernels._WORTHWHILE > 3 * 2 * 8 * 5


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    h=st.integers(1, 70),
    dtype=st.sampled_from(list(EPSILON)),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_rms_norm_and_its_gradients_are_those_of_torch(
    rows: list[int], h: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, upstream = (
        torch.randn(*rows, h, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    weight = (torch.rand(h, generator=generator, dtype=torch.float64) + 0.5).to(dtype)

    x.requires_grad_()
    weight.requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    found = [y, *torch.autograd.grad(y, (x, weight), upstream)]

    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    y64 = F.rms_norm(x64, (h,), weight64, 1e-5)
    exact = [y64, *torch.autograd.grad(y64, (x64, weight64), upstream.double())]
    steepest = (x64.square().mean(-1) + 1e-5).rsqrt().max() * weight64.abs().max()
    scale = [y64.norm(), upstream.double().norm() * steepest, exact[2].norm()]
    for mine, true, size in zip(found, exact, scale, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= EPSILON[dtype] * (size + 1)


def test_rms_norm_passes_the_numerical_check_of_its_gradient() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
