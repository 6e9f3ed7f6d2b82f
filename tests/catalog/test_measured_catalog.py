import pytest

from phalanx.catalog import load
from phalanx.core.errors import UsageError

FILE = """
name = "cpu"
count = 2
memory_gb = 16
hbm_gb_per_s = 10
precision = "fp32"
peak_tflops = {fp32 = 0.1}
domain = {size = 2, topology = "switch", gb_per_s = 2}
network = {gb_per_s = 2}

[sustained]
cores = 1
product = 0.9
depth = 64
attention = 0.2
attention_first = 0.2
memory = 0.5
launch_us = 30
domain = 1.0
network = 1.0
interference = 0.0
jitter = 0.0
utilization = 0.4
spread = 0.05
rows = 8
source = "here"
queued = false
step_ms = 2

[[collectives]]
name = "all_reduce"
ranks = 2
latency_us = 80
gb_per_s = 2.0

[measured]
anything = ["a reader", "wants"]
"""


def written(tmp_path, old="", new=""):
    assert old in FILE
    path = tmp_path / "Mine.toml"
    path.write_text(FILE.replace(old, new, 1) if old else FILE)
    return path


def test_units_of_a_measured_machine_are_resolved(tmp_path):
    device = load.cluster(str(written(tmp_path))).accelerator
    assert device.sustained.launch == pytest.approx(30e-6)
    assert device.sustained.step == pytest.approx(2e-3)
    assert not device.sustained.queued
    assert device.collectives[0].bandwidth == pytest.approx(2e9)
    assert device.precision == "fp32"


def test_as_many_of_a_measured_device_as_one_likes(tmp_path):
    cluster = load.cluster(f"{written(tmp_path)}x64")
    assert cluster.count == 64
    assert cluster.domain_size == 2
    assert cluster.accelerator.sustained is not None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("product = 0.9\n", "", "has no product"),
        ("memory = 0.5", "memory = -1", "it must be positive"),
        ("launch_us = 30", "launch_us = -30", "at least 0"),
        ("queued = false", "queued = 3", "true or false"),
        ("depth = 64", "depht = 64", "did you mean depth"),
        ("ranks = 2", "", "has no ranks"),
        ("latency_us = 80", 'latency_us = "80"', "it is a number"),
        ('precision = "fp32"', 'precision = "fp3"', "it can be bf16, fp32"),
    ],
)
def test_a_mistake_in_a_measured_machine_is_told(tmp_path, old, new, words):
    with pytest.raises(UsageError, match=words):
        load.cluster(str(written(tmp_path, old, new)))
