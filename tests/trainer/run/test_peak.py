import time

import pytest
import torch

from phalanx.core.precision import BF16, Precision
from phalanx.trainer.run.peak import known_peak, measured_gemm_flops


def test_a_known_gpu_has_its_data_sheet_peak() -> None:
    assert known_peak("NVIDIA H200", BF16) == pytest.approx(989.4e12)


@pytest.mark.parametrize(
    ("device", "precision"), [("NVIDIA H200 NVL 3000", "bf16"), ("NVIDIA H200", "fp64")]
)
def test_what_the_catalog_does_not_know_has_no_peak(device: str, precision: str) -> None:
    assert known_peak(device, Precision.parse(precision)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_measured_rate_is_within_reach_of_one_product_timed_by_hand(dtype: torch.dtype) -> None:
    a = torch.randn(1024, 1024).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    by_hand = 2 * 1024**3 / min(times)
    assert by_hand / 20 < measured_gemm_flops(dtype, seconds=0.1) < by_hand * 4
