"""Everything that one calibration measures, in order; every rank calls it."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.core.errors import divisors
from phalanx.core.layout import Layout
from phalanx.trainer.calibrate import kernels
from phalanx.trainer.calibrate.bench import Bench, Sampled
from phalanx.trainer.calibrate.kernels import AttentionTime, ProductTime
from phalanx.trainer.calibrate.messages import MessageTime, interference, messages
from phalanx.trainer.calibrate.probes import PROBES, QUICK_PROBES, ProbeTime, time_probe
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.environment import device_name
from phalanx.trainer.run.room import free_bytes
from phalanx.trainer.run.worker import Worker

# Seconds of a kernel or a message, and of a probe.
_SECONDS, _QUICK = (0.25, 2.0), (0.02, 0.1)
_WRITTEN = 64 << 20  # bytes that are written to the disk, and taken away again


class Measured(NamedTuple):
    """What was measured, the same on every rank.

    Attributes:
        ranks: all of them.
        local_ranks: of this machine.
        threads: of each rank.
        device: what it calls itself; "cpu" stands for what CPUs have in common.
        is_gpu: whether it has memory of its own.
        memory: bytes of one rank.
        products, attentions, messages, probes: see there.
        copies: bytes/s of one rank.
        launch: seconds of an operation on almost nothing.
        host: latency and bytes/s between host and device; None where both are one.
        interference: share of a hidden message that arithmetic loses.
        disk: bytes/s of a file that is on the disk when it ends.
        disturbed: share of all samples in which other programs took a core away.
    """

    ranks: int
    local_ranks: int
    threads: int
    device: str
    is_gpu: bool
    memory: float
    products: tuple[ProductTime, ...]
    attentions: tuple[AttentionTime, ...]
    messages: tuple[MessageTime, ...]
    probes: tuple[ProbeTime, ...]
    copies: Sampled
    launch: Sampled
    host: tuple[float, float] | None
    interference: float
    disk: float
    disturbed: float

    @property
    def precision(self) -> str:
        """The format that training has here where nobody says another."""
        return "bf16" if self.is_gpu else "fp32"


def measure(
    worker: Worker, folder: Path, tell: Callable[[str], None], *, quick: bool = False
) -> Measured:
    """Measure this machine with all ranks at once.

    Args:
        worker: this process, joined with the others.
        folder: on the disk that is timed.
        tell: is told what comes next.
        quick: less of everything, for a test: the numbers are rough.
    """
    short, long = _QUICK if quick else _SECONDS
    mesh = build_mesh(Layout(dp=worker.ranks), worker.device)
    bench = Bench(mesh, short)
    is_gpu = worker.device.type == "cuda"
    precision = "bf16" if is_gpu else "fp32"
    formats = ("bf16",) if is_gpu else ("fp32", "bf16")
    tell("memory, launches, copies")
    copies, launch = kernels.memory_rate(bench), kernels.launch_seconds(bench)
    host = kernels.host_copy(bench)
    tell("matrix products")
    found_products = tuple(kernels.products(bench, formats, quick=quick))
    tell("attention")
    found_attentions = tuple(kernels.attentions(bench, precision, quick=quick))
    sent = tuple(_messages(bench, tell, quick=quick))
    lost = interference(bench)
    chosen = QUICK_PROBES if quick else PROBES
    stepped = []
    for number, probe in enumerate(chosen, 1):
        tell(f"steps of a small model, {number} of {len(chosen)}")
        stepped.append(time_probe(Bench(mesh, long, bench.quiet), probe, precision))
    tell("the disk")
    disk = _disk(folder) if worker.rank == 0 else 0.0
    disk = bench.mean((disk * worker.ranks,) * 3).median
    quiet = bench.quiet
    return Measured(
        ranks=worker.ranks,
        local_ranks=worker.local_ranks,
        threads=torch.get_num_threads(),
        device=device_name(worker.device),
        is_gpu=is_gpu,
        memory=_memory(worker),
        products=found_products,
        attentions=found_attentions,
        messages=sent,
        probes=tuple(stepped),
        copies=copies,
        launch=launch,
        host=host,
        interference=lost,
        disk=disk,
        disturbed=bench.mean((quiet.disturbed / max(quiet.samples, 1),) * 3).median,
    )


def _messages(bench: Bench, tell: Callable[[str], None], *, quick: bool) -> Iterator[MessageTime]:
    """Collectives of groups of neighbours, of every size that a layout may cut."""
    ranks = bench.mesh.world.size
    for size in divisors(ranks):
        if size == 1:
            continue
        tell(f"messages among {size} ranks")
        mesh = build_mesh(Layout(dp=ranks // size, tp=size), bench.mesh.device)
        yield from messages(bench, mesh.tensor, quick=quick)


def _memory(worker: Worker) -> float:
    """Bytes of one rank: of its GPU, or its share of what can be had."""
    if worker.device.type == "cuda":
        return float(torch.cuda.get_device_properties(worker.device).total_memory)
    return free_bytes() / worker.local_ranks


def _disk(folder: Path) -> float:
    """Bytes/s of a file that is on the disk when it ends; it is gone then."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(_WRITTEN >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN / (time.perf_counter() - start)
