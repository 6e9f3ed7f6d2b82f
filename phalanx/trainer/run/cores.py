"""How many CPU cores this process may use, whoever says so: affinity, a container, OpenMP."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def num_cores(cgroups: Path = CGROUPS) -> int:
    """CPU cores that this process may use: those it may run on, or what its container pays for.

    Args:
        cgroups: where the system shows the limits of containers.

    Returns:
        At least 1, also for a quota of half a core.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(cgroups))]))


def num_threads(local_ranks: int, environ: Mapping[str, str] = os.environ) -> int:
    """Threads that each of the ranks of this machine computes with.

    `OMP_NUM_THREADS` is honoured. But torchrun sets it to 1 by itself where nobody did, so from
    torchrun a 1 says nothing.

    Args:
        local_ranks: how many ranks share the cores.
        environ: of this process.
    """
    told = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    by_torchrun = parent_process() is None and "TORCHELASTIC_RUN_ID" in environ
    if told.isdecimal() and int(told) > 0 and not (by_torchrun and told == "1"):
        return int(told)
    return max(1, num_cores() // local_ranks)


def _quotas(cgroups: Path) -> Iterator[float]:
    """Cores that a container may use in the long run, by both versions of control groups."""
    for folder in (cgroups, *own_groups(cgroups)):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            yield int(quota) / int(period)  # "max" is no number
    with suppress(OSError, ValueError, ZeroDivisionError):
        version_1 = cgroups / "cpu"
        quota = (version_1 / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (version_1 / "cpu.cfs_period_us").read_text(encoding="ascii")
        if int(quota) > 0:
            yield int(quota) / int(period)


def own_groups(cgroups: Path) -> Iterator[Path]:
    """The group of this process and those around it: each of them limits it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, name = line.split(":", 2)
            if number == "0" and name != "/":
                group = cgroups / name.lstrip("/")
                yield group
                yield from (parent for parent in group.parents if cgroups in parent.parents)
