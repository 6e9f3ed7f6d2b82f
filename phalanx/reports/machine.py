"""What a machine is like before a run: versions, cores, limits, disk, clock, and GPUs if any.

Each check takes milliseconds, writes at most 32 MiB and takes that away again, and says "seen"
only where something is likely to hurt. Nothing is read of other users, and nothing imports torch.
"""

import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from phalanx.core.units import show_bytes, show_rate, show_seconds
from phalanx.reports.finding import Finding
from phalanx.trainer.run.cores import num_cores
from phalanx.trainer.run.room import free_bytes

OPEN_FILES = 4096  # of a rank: each peer is a connection, each shard of a corpus a file
SHARED_BYTES = 1 << 30
LEAST_MEMORY = 2 << 30
LEAST_ROOM = 10 << 30
PROBE_BYTES = 32 << 20
SLOW_DISK = 100e6  # bytes/s, below which saves are felt
CLOCK_SKEW = 1.0  # seconds between this clock and that of the file system
_PACKAGES = ("phalanx", "torch", "numpy", "safetensors", "rich")
_NEEDED = ("torch", "safetensors")
_SHM = Path("/dev/shm")  # looked at, never written
_NVIDIA = Path("/dev/nvidiactl")


def examine(folder: Path, environ: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    """Look at this machine.

    Args:
        folder: where runs will be written; it need not exist.
        environ: of this process.
    """
    return (
        _versions(),
        _threads(environ),
        _open_files(),
        _memory(),
        *_shared_memory(),
        *_disk(_nearest(folder)),
        *_gpus(environ),
    )


def _versions() -> Finding:
    found = {name: _version(name) for name in _PACKAGES}
    missing = [name for name in _NEEDED if not found[name]]
    texts = [f"{name} {version}" for name, version in found.items() if version]
    evidence = f"Python {platform.python_version()}, {', '.join(texts)}, {platform.system()} "
    evidence += f"{platform.release()}"
    change = f"pip install 'phalanx[train]' brings {', '.join(missing)}" if missing else ""
    return Finding("versions", bool(missing), evidence, change)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _threads(environ: Mapping[str, str]) -> Finding:
    cores, told = num_cores(), environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    evidence = f"{cores} cores, load {load:.1f}, OMP_NUM_THREADS {told or 'not set'}"
    if told.isdecimal() and int(told) > cores:
        change = f"unset OMP_NUM_THREADS: {told} threads share {cores} cores"
        return Finding("cores and threads", True, evidence, change)
    if load > cores:
        change = "wait until other work is done: it takes turns with the ranks"
        return Finding("cores and threads", True, evidence, change)
    return Finding("cores and threads", False, evidence)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    allowed = infinite if soft == infinite else soft
    shown = "no limit" if allowed == infinite else f"{soft:,} open files"
    evidence = f"a process may have {shown} (ulimit -n)"
    if allowed == infinite or soft >= OPEN_FILES:
        return Finding("open files", False, evidence)
    if hard != infinite and hard <= soft:
        change = f"have the hard limit raised to {OPEN_FILES:,} or more"
    else:
        change = f"ulimit -n {OPEN_FILES if hard == infinite else min(hard, OPEN_FILES)}"
    return Finding("open files", True, evidence, change)


def _memory() -> Finding:
    free = free_bytes()
    evidence = f"{show_bytes(free, binary=True)} of main memory can be had"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        evidence += f"; a process may address {show_bytes(limit, binary=True)} (ulimit -v)"
    low = free < LEAST_MEMORY
    change = "end other work, or give the container more" if low else ""
    return Finding("memory", low, evidence, change)


def _shared_memory() -> Iterator[Finding]:
    with suppress(OSError):
        usage = shutil.disk_usage(_SHM)
        evidence = f"{_SHM} has {show_bytes(usage.free, binary=True)} free"
        low = usage.free < SHARED_BYTES
        change = "start the container with --shm-size=1g or more" if low else ""
        yield Finding("shared memory", low, evidence, change)


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    there = (path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return next(there)


def _disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    evidence = f"{folder} has {show_bytes(free, binary=True)} free"
    low = free < LEAST_ROOM
    change = "make room, or choose another --runs-dir; recipe.keep says how many saves stay"
    yield Finding("room on the disk", low, evidence, change if low else "")
    if free < 2 * PROBE_BYTES or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} cannot be tried out: it may not be written, or has no room"
        yield Finding("speed of the disk", True, text, "choose another --runs-dir")
        return
    rate, skew = _try_disk(folder)
    evidence = f"{folder} takes {show_rate(rate, 'B')} to the disk, in {show_bytes(PROBE_BYTES)}"
    slow = rate < SLOW_DISK
    change = "save less often (recipe.checkpoint_every), or choose a faster --runs-dir"
    yield Finding("speed of the disk", slow, evidence, change if slow else "")
    evidence = f"the file system of {folder} is {show_seconds(abs(skew))} "
    evidence += "behind this clock" if skew > 0 else "ahead of this clock"
    skewed = abs(skew) > CLOCK_SKEW
    change = "set the clocks by NTP: events of several machines are put in order by them"
    yield Finding("clock", skewed, evidence, change if skewed else "")


def _try_disk(folder: Path) -> tuple[float, float]:
    """Bytes/s of a write that is on the disk when it ends, and seconds that its clock is behind."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        now = time.time()
        os.utime(file.fileno())  # the file system's own clock says when
        return PROBE_BYTES / seconds, now - os.fstat(file.fileno()).st_mtime


def _gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Only where there are some: what they are, how they are clocked, and what NCCL is told."""
    if not _NVIDIA.exists():
        return
    query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = f"there is a driver, and nvidia-smi does not answer ({type(error).__name__})"
        yield Finding("GPUs", True, text, "see that nvidia-smi works before a run")
        return
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    kinds = sorted({line.partition(",")[0] for line in lines})
    evidence = f"{len(lines)} GPUs; the first: {lines[0]} (MiB, MHz, MHz at most, C)"
    change = "use GPUs of one kind: the slowest sets the pace" if len(kinds) > 1 else ""
    yield Finding("GPUs", len(kinds) > 1, evidence, change)
    told = {key: value for key, value in sorted(environ.items()) if key.startswith("NCCL_")}
    text = ", ".join(f"{key}={value}" for key, value in told.items()) or "no NCCL_ variable is set"
    debug = told.get("NCCL_P2P_DISABLE") == "1" or told.get("NCCL_IB_DISABLE") == "1"
    change = "unset what disables P2P or InfiniBand, unless the machine has none" if debug else ""
    yield Finding("NCCL", debug, text, change)
