"""Threads are as many as the environment allows: affinity, a container's quota, OpenMP."""

import os
from pathlib import Path

import pytest

from phalanx.trainer.run.cores import num_cores, num_threads

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("50000 100000", 1), ("max 100000", ALL), ("100000 100000", 1), ("100000000 100000", ALL)],
)
def test_a_quota_of_a_container_is_honoured(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert num_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("-1", ALL)])
def test_so_is_one_of_the_first_version(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert num_cores(tmp_path) == cores


def test_without_a_container_all_cores_count(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == ALL


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, num_cores()),
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
        ({"OMP_NUM_THREADS": ""}, num_cores()),
        ({"OMP_NUM_THREADS": "many"}, num_cores()),
        ({}, num_cores()),
    ],
)
def test_openmp_is_told_how_many_threads_there_are(environ: dict[str, str], threads: int) -> None:
    assert num_threads(1, environ) == threads


def test_ranks_share_the_cores() -> None:
    assert num_threads(10**6, {}) == 1
