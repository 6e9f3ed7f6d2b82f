"""Number formats from their bits, against the machine's own arithmetic."""

import struct

import pytest

from phalanx.core.errors import UsageError
from phalanx.cost.formats import number_format


def test_fp32_and_fp64_are_those_of_this_machine():
    assert number_format("fp32").largest == struct.unpack("f", b"\xff\xff\x7f\x7f")[0]
    assert number_format("fp64").smallest == 5e-324
    assert number_format("fp64").spacing == 2.220446049250313e-16


def test_an_update_of_half_the_spacing_is_lost_and_a_larger_one_is_not():
    def as_fp16(value: float) -> float:
        return float(struct.unpack("e", struct.pack("e", value))[0])

    lost = number_format("fp16").lost_update
    assert as_fp16(1 + lost) == 1
    assert as_fp16(1 + 1.01 * lost) > 1


@pytest.mark.parametrize(("name", "size"), [("fp32", 4), ("bf16", 2), ("fp8-e4m3", 1)])
def test_sizes_follow_from_the_fields(name: str, size: int):
    assert number_format(name).bytes == size


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean fp8-e4m3"):
        number_format("fp8-e4m4")
