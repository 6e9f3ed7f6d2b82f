"""Rounding to few bits, against every number that a format has."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formats import number_format
from phalanx.oracle.low_precision import _E2M1, _E4M3, _E5M2, _Bits
from phalanx.trainer.precision.formats import (
    E4M3,
    E5M2,
    Format,
    power_of_two_scale,
    rounded,
    rounded_to_e2m1,
)

FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS = st.floats(-1e6, 1e6, width=32)


def every_number(to: Format) -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(to.dtype).float()
    return numbers[numbers.isfinite()].unique()


@pytest.mark.parametrize(("to", "name"), [(E4M3, "fp8-e4m3"), (E5M2, "fp8-e5m2")])
def test_the_largest_number_is_the_one_the_catalog_says(to: Format, name: str):
    assert every_number(to).max() == to.largest == number_format(name).largest


@pytest.mark.parametrize("to", [E4M3, E5M2])
@given(x=NUMBERS)
def test_no_number_of_the_format_is_nearer(to: Format, x: float):
    got = rounded(torch.tensor([x]), to).float().item()
    nearest = (every_number(to) - x).abs().min().item()
    assert abs(got - x) == nearest


@given(x=NUMBERS)
def test_no_number_of_four_bits_is_nearer(x: float):
    got = rounded_to_e2m1(torch.tensor([x])).item()
    assert abs(got) in FOUR_BITS
    assert abs(got - x) == min(abs(sign * n - x) for n in FOUR_BITS for sign in (1, -1))


def test_a_number_halfway_goes_to_the_even_one():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    assert rounded_to_e2m1(halves).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -2.0]
    assert rounded(torch.tensor([1.0625, 1.1875]), E4M3).tolist() == [1.0, 1.25]


@pytest.mark.parametrize("to", [E4M3, E5M2])
def test_what_overflowed_is_not_hidden(to: Format):
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30])
    assert rounded(x, to).float().isnan().tolist() == [True, True, True, False]
    assert rounded_to_e2m1(x).isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize(("to", "bits"), [(E4M3, _E4M3), (E5M2, _E5M2)], ids=["e4m3", "e5m2"])
def test_the_reference_rounds_alike_though_it_only_knows_the_widths_of_the_fields(
    to: Format, bits: _Bits
):
    x = torch.cat([torch.randn(20_000) * 10.0**e for e in range(-8, 6)])
    assert torch.equal(rounded(x, to).double(), bits.nearest(x))
    assert torch.equal(rounded_to_e2m1(x).double(), _E2M1.nearest(x))


@given(amax=st.floats(2.0**-100, 2.0**100, width=32), limit=st.sampled_from([448.0, 6.0]))
def test_a_power_of_two_is_the_smallest_that_saturates_nothing(amax: float, limit: float):
    scale = power_of_two_scale(torch.tensor(amax), limit).item()
    assert math.log2(scale).is_integer()
    assert amax / scale <= limit * (1 + 2**-23) < 2 * amax / scale * (1 + 2**-22)


def test_the_scale_of_zeros_is_one():
    assert power_of_two_scale(torch.zeros(3), 448.0).tolist() == [1.0, 1.0, 1.0]
