"""Accelerators and clusters: every number has a source, every spelling of a cluster works."""

from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.catalog.hardware import parse_cluster_name
from phalanx.core.cluster import Accelerator
from phalanx.core.errors import RefusedError, UsageError

DEVICES = load.accelerators()
NAMES = [device.name for device in DEVICES]


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_every_accelerator_says_where_its_numbers_come_from(device: Accelerator):
    assert {"memory", "peak"} <= {name for name, _ in device.sources}


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_nothing_sustains_more_than_its_data_sheet_promises(device: Accelerator):
    for link in (device.domain.link, device.network, device.host):
        assert link.sustained <= link.bandwidth


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_the_ladder_of_bandwidths_descends(device: Accelerator):
    assert device.hbm > device.domain.link.bandwidth
    assert device.domain.size == 1 or device.domain.link.bandwidth >= device.network.bandwidth


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_narrower_formats_are_never_slower(device: Accelerator):
    peaks = dict(device.peaks)
    ladder = [peaks[name] for name in ("bf16", "fp8", "fp4") if name in peaks]
    assert ladder == sorted(ladder)


def test_a_format_that_the_matrix_units_lack_is_refused():
    with pytest.raises(RefusedError, match=r"a100-sxm-80gb has no fp8 .* bf16, fp16"):
        load.accelerator("a100").peak("fp8")
    with pytest.raises(RefusedError, match="none with a published peak"):
        load.accelerator("h100-sxm-96gb").peak("bf16")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("nvidia b200", "b200"),
    ],
)
def test_torchs_device_names_are_known(device: str, name: str):
    found = load.accelerator_by_device(device)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("device", ["NVIDIA H100 NVL", "NVIDIA H100", "Tesla T4", "", "cpu"])
def test_a_device_of_unknown_peak_is_nobody(device: str):
    assert load.accelerator_by_device(device) is None


@pytest.mark.parametrize(
    ("name", "device", "count", "torus"),
    [
        ("h100x16384", "h100-sxm", 16384, ()),
        ("h100-sxm x 512", "h100-sxm", 512, ()),
        ("H100 x 8", "h100-sxm", 8, ()),
        ("a100x4096", "a100-sxm-80gb", 4096, ()),
        ("gb200-nvl72x1152", "gb200-nvl72", 1152, ()),
        ("gb200-nvl72 x 1152", "gb200-nvl72", 1152, ()),
        ("mi300xx8", "mi300x", 8, ()),
        ("mi300x x 8", "mi300x", 8, ()),
        ("rtx-4090x4", "rtx-4090", 4, ()),
        ("tpu-v5p:16x16x16", "tpu-v5p", 4096, (16, 16, 16)),
        ("tpu-v5p 16x16x16", "tpu-v5p", 4096, (16, 16, 16)),
        ("tpu-v5p x 512", "tpu-v5p", 512, (8, 8, 8)),
        ("tpu-v5e:16x16", "tpu-v5e", 256, (16, 16)),
    ],
)
def test_spellings_of_clusters(name: str, device: str, count: int, torus: tuple[int, ...]):
    cluster = load.cluster(name)
    assert (cluster.accelerator.name, cluster.count, cluster.torus) == (device, count, torus)


@given(st.sampled_from(NAMES), st.integers(1, 10**7))
def test_every_accelerator_times_any_count_reads_back(name: str, count: int):
    assert parse_cluster_name(f"{name}x{count}") == (name, (count,))


@given(st.integers(1, 100_000))
def test_a_torus_of_any_count_holds_whole_slices(count: int):
    cluster = load.cluster(f"tpu-v5px{count}")
    assert cluster.count % prod(cluster.torus) == 0
    assert cluster.domain_size <= 8960


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "say how many, for example h100x8"),
        ("h101x8", "did you mean .*h100"),
        ("nowhere", "unknown cluster"),
        ("h100x0", "at least 1"),
        ("h100x" + "9" * 30, "at most 100,000,000"),
        ("h100x-1", "h100x-1: how many h100 is a whole number"),
        ("h100xNaN", "how many h100 is a whole number, 1 to 100,000,000"),
        ("h100x1e30", "how many h100 is a whole number"),
        ("tpu-v5p:99x99x99", "torus of 970,299, and at most 8,960 tpu-v5p are joined as one"),
        ("h100:4x4", "not joined as a torus; write h100-sxmx16"),
        ("tpu-v5e:4x4x4", "has 2 torus axes, not 3"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_in_one_line(name: str, message: str):
    with pytest.raises(UsageError, match=message) as caught:
        load.cluster(name)
    assert "\n" not in str(caught.value)


def test_catalog_clusters_have_names():
    assert {"llama-3-405b", "deepseek-v3", "selene"} <= {c.name for c in load.clusters()}
    assert load.cluster("llama-3-405b").count == 16384


def test_a_group_spans_as_many_domains_as_it_needs():
    cluster = load.cluster("h100x64")
    assert [cluster.domains(group) for group in (1, 8, 9, 64)] == [1, 1, 2, 8]
    with pytest.raises(RefusedError, match="does not fit"):
        cluster.domains(65)


def test_a_users_file_may_change_one_link_of_a_known_accelerator(tmp_path: Path):
    path = tmp_path / "lab.toml"
    path.write_text('accelerator = "h100"\ncount = 64\n[network]\ngb_per_s = 12.5\n')
    cluster = load.cluster(str(path))
    assert cluster.name == "lab"
    assert cluster.accelerator.network.bandwidth == 12.5e9
    assert cluster.domain == load.accelerator("h100").domain


def test_a_users_file_may_describe_an_accelerator_nobody_knows(tmp_path: Path):
    path = tmp_path / "lab.toml"
    path.write_text(
        "count = 4\nmemory_gb = 48\nhbm_gb_per_s = 900\n"
        "[peak_tflops]\nbf16 = 100\n[network]\ngb_per_s = 10\nsustained_gb_per_s = 9\n"
    )
    device = load.cluster(str(path)).accelerator
    assert (device.memory, device.peak("bf16"), device.network.sustained) == (48e9, 1e14, 9e9)


def test_a_users_cluster_finds_the_users_accelerator_beside_it(tmp_path: Path):
    (tmp_path / "card.toml").write_text("memory_gb = 48\nhbm_gb_per_s = 900\n")
    path = tmp_path / "lab.toml"
    path.write_text('accelerator = "card.toml"\ncount = 4\n')
    assert load.cluster(str(path)).accelerator.memory == 48e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('accelerator = "h100"\n', "lab.toml does not say how many accelerators"),
        ('accelerator = "h100"\ncount = 0\n', "0 accelerators; it needs at least 1"),
        ('accelerator = "h100"\ncount = 8\nspeed = 1\n', "unknown key in lab.toml 'speed'"),
        ('accelerator = "h100"\ncount = 8\n[network]\ngbps = 1\n', "did you mean .*gb_per_s"),
        ('accelerator = "h100"\ncount = "many"\n', "whole number"),
        ("count = 8\nhbm_gb_per_s = 1\n", "has no memory_gb"),
        ('accelerator = "h100"\ncount = 8\nmemory_gb = -1\n', "must be positive"),
    ],
)
def test_a_bad_cluster_file_says_what_is_wrong(tmp_path: Path, text: str, message: str):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load.cluster(str(path))
