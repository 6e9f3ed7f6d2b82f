import pytest

from phalanx.catalog import load
from phalanx.catalog.sustained import ASSUMED, sustained

FITTED = ["a100-sxm-80gb", "h100-sxm", "b200"]


@pytest.mark.parametrize("name", [device.name for device in load.accelerators()])
def test_every_accelerator_has_shares_that_hardware_can_reach(name):
    rates = sustained(name)
    for share in ("product", "attention", "attention_first", "memory", "domain", "network"):
        assert 0.1 < getattr(rates, share) < 1, share
    assert 1e-6 < rates.launch < 1e-4
    assert 0 <= rates.jitter < 0.02
    assert 0 < rates.spread < 0.3
    assert rates.source


@pytest.mark.parametrize("name", FITTED)
def test_the_parts_that_were_fitted_say_on_how_many_rows(name):
    assert sustained(name).rows > 0
    assert sustained(name).name != ASSUMED


def test_a_part_that_nobody_fitted_takes_the_assumed_set():
    assert sustained("mi300x").name == ASSUMED
    assert sustained("mi300x").rows == 0


def test_a_part_without_a_published_peak_has_an_assumed_one():
    device = load.accelerator("h100-sxm-96gb")
    assert not device.peaks
    assert 835e12 < sustained(device.name).assumed_peak < 989e12
