"""What is fitted of made-up measurements is what they were made of."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from phalanx.calibration.least_squares import fit
from phalanx.calibration.machine import cluster_of, tables_of
from phalanx.calibration.text import to_toml
from phalanx.core.layout import Layout
from phalanx.planner.estimate import Priced
from phalanx.planner.workload import workload_of
from phalanx.trainer.calibrate.bench import Sampled
from phalanx.trainer.calibrate.kernels import AttentionTime, ProductTime
from phalanx.trainer.calibrate.measure import Measured
from phalanx.trainer.calibrate.messages import MessageTime
from phalanx.trainer.calibrate.probes import PROBES, ProbeTime

RATE, DEPTH, COPIES = 100e9, 64.0, 10e9
LATENCY, BANDWIDTH = 80e-6, 2e9
MEMORY, LAUNCH, UPDATE, AROUND = 0.5, 30e-6, 0.8, 2e-3


def sampled(seconds):
    return Sampled(seconds, 0.9 * seconds, 1.1 * seconds)


def product(M, N, K):
    slow = 3 + DEPTH * (1 / M + 1 / N + 1 / K)
    return ProductTime("fp32", M, N, K, sampled(2 * M * N * K * slow / RATE))


def message(name, size):
    return MessageTime(name, 2, size, sampled(LATENCY + size / BANDWIDTH))


def attended(s):
    empty = AttentionTime("fp32", 2, 4, s, 64, sampled(1.0))
    return empty._replace(seconds=sampled(3.5 * empty.forward_flops / (0.2 * RATE)))


def measurements(probes=()):
    return Measured(
        ranks=2,
        local_ranks=2,
        threads=1,
        device="a made-up CPU",
        is_gpu=False,
        memory=16e9,
        products=tuple(
            product(*sizes) for sizes in ((512, 256, 128), (1024, 512, 64), (64, 64, 64))
        ),
        attentions=(attended(128), attended(512)),
        messages=tuple(
            message(name, size)
            for name in ("all_reduce", "send")
            for size in (1024, 65536, 1 << 22)
        ),
        probes=probes,
        copies=Sampled(COPIES, 9e9, 11e9),
        launch=sampled(3e-6),
        host=None,
        interference=0.25,
        disk=1e9,
        disturbed=0.0,
    )


def truth():
    """The machine that the measurements are of."""
    made = tuple(ProbeTime(probe, sampled(1.0), 0.9, 0.05) for probe in PROBES)
    tables = tables_of(measurements(made))
    tables["sustained"] |= {
        "product": 1.0,
        "attention": 0.2,
        "memory": MEMORY,
        "launch_us": 1e6 * LAUNCH,
        "update": UPDATE,
        "step_ms": 1e3 * AROUND,
    }
    return cluster_of(tables)


def step_of(probe, cluster):
    run = probe.run("fp32")
    alone = replace(cluster, count=1)
    workload, layout = workload_of(run.model, alone, run.layout, probe.seq, probe.batch)
    return Priced(workload, layout).estimate().step


def as_measured(probe, cluster):
    """A probe whose measured seconds are those of the planner."""
    step = step_of(probe, cluster)
    by_name = {term.name: term.seconds for term in step.children}
    update, around = by_name["optimizer"], by_name["around the step"]
    inside = step.seconds - update - around
    return ProbeTime(probe, sampled(step.seconds), inside / step.seconds, update / step.seconds)


@pytest.fixture(scope="module")
def tables():
    machine = truth()
    return tables_of(measurements(tuple(as_measured(probe, machine) for probe in PROBES)))


def test_products_give_their_rate_and_the_length_at_which_half_is_reached(tables):
    assert tables["peak_tflops"]["fp32"] * tables["sustained"]["product"] == pytest.approx(
        RATE / 1e12, rel=0.02
    )
    assert tables["sustained"]["depth"] == pytest.approx(DEPTH, rel=0.02)


def test_messages_give_latency_and_rate_with_intervals(tables):
    found = {each["name"]: each for each in tables["collectives"]}
    assert set(found) == {"all_reduce", "send"}
    assert found["send"]["latency_us"] == pytest.approx(1e6 * LATENCY, rel=0.01)
    assert found["send"]["gb_per_s"] == pytest.approx(BANDWIDTH / 1e9, rel=0.01)
    low, high = found["send"]["gb_per_s_80"]
    assert low <= found["send"]["gb_per_s"] <= high


def test_steps_give_the_shares_that_kernels_alone_do_not_show(tables):
    rates = tables["sustained"]
    assert rates["memory"] == pytest.approx(MEMORY, rel=0.05)
    assert rates["launch_us"] == pytest.approx(1e6 * LAUNCH, rel=0.05)
    assert rates["update"] == pytest.approx(UPDATE, rel=0.05)
    assert rates["step_ms"] == pytest.approx(1e3 * AROUND, rel=0.05)
    assert not rates["queued"]


def test_the_planner_gives_the_measured_steps_back(tables):
    for step in tables["measured"]["steps"]:
        assert step["planned_seconds"] == pytest.approx(step["seconds"], rel=0.02)


def test_the_file_reads_back_to_the_same_machine(tables, tmp_path):
    assert tomllib.loads(to_toml(tables)) == tables
    cluster = cluster_of(tables)
    assert cluster.count == 2
    assert cluster.accelerator.precision == "fp32"
    assert cluster.accelerator.sustained is not None
    assert len(cluster.accelerator.collectives) == 2


def test_a_measured_collective_is_priced_as_it_was_measured(tables):
    cluster, run = cluster_of(tables), PROBES[5].run("fp32")
    layout = Layout.parse("dp=2")
    workload, layout = workload_of(run.model, cluster, layout, 256, 4)
    assert str(layout.precision) == "fp32"
    found = Priced(workload, layout).estimate()
    sums = [each for each in found.messages if each.collective == "all_reduce"]
    assert sums
    for each in sums:
        if each.times == 1 and each.bytes < 1024:  # nothing is added up
            assert each.seconds == pytest.approx(LATENCY + each.bytes / BANDWIDTH, rel=0.02)


def test_a_factor_that_would_be_negative_is_left_out():
    sizes = np.array([1.0, 2.0, 4.0])
    found = fit(np.stack([np.ones(3), sizes], axis=1), np.array([0.5, 1.6, 3.9]))
    assert found.factors[0] == 0
    assert found.factors[1] > 0


def test_what_is_known_holds_where_measurements_say_nothing():
    columns = np.array([[1.0, 1.0], [2.0, 2.0]])
    found = fit(columns, np.array([3.0, 6.0]), np.array([1.0, np.nan]), 1.0)
    assert found.factors == pytest.approx([1.0, 2.0])
