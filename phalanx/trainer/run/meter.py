"""Measures a run: speed, utilization, memory, and where the time went, over all ranks."""

import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.message import Axis
from phalanx.core.precision import Precision
from phalanx.core.run import Run
from phalanx.cost.flops import describe_convention, flops_per_token, utilization
from phalanx.trainer.engine.balance import ExpertLoad
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.engine.step import StepResult
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.run.goodput import Goodput
from phalanx.trainer.run.heartbeat import PHASE_SECONDS, SLOW_SECONDS, Heartbeat
from phalanx.trainer.run.peak import known_peak, measured_gemm_flops
from phalanx.trainer.run.report import StepMetrics, Validation
from phalanx.trainer.run.saves import SaveReport

Between = Literal["validation", "checkpoints", "reports"]
AXES: tuple[Axis, ...] = get_args(Axis)
BETWEEN: tuple[Between, ...] = get_args(Between)


_NO_SAVES = SaveReport()


class Peak(NamedTuple):
    """What utilization is measured against: FLOP/s of all ranks, and in words where it is from."""

    flops: float | None
    source: str


def find_peak(mesh: Mesh, precision: Precision) -> Peak:
    """The dense peak of the hardware; on a CPU, the rate of its own matrix products, measured now.

    Every rank calls it. On unknown accelerators there is no peak, and so no utilization.

    Args:
        mesh: all ranks, on devices of one kind.
        precision: that products are computed in.
    """
    dtypes = Dtypes.named(precision, mesh.device)
    if mesh.device.type == "cuda":
        name = torch.cuda.get_device_name(mesh.device)
        peak = known_peak(name, precision)
        if peak is None:
            return Peak(None, f"no MFU: the peak of {name} in {precision} is not known")
        return Peak(peak * mesh.world.size, f"dense {precision} peak of {name}")
    mesh.world.all_reduce(torch.zeros(1), "barrier").wait()
    rate = torch.tensor([measured_gemm_flops(dtypes.compute)], dtype=torch.float64)
    mesh.world.all_reduce(rate, "peak").wait()
    return Peak(rate.item(), f"peak is the {dtypes.rest} GEMM rate measured on this machine")


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: on its GPU, or of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Agreed(NamedTuple):
    """What all ranks know after a step: the worst of each.

    Attributes:
        stop: some rank was asked to save and stop.
        data_wait: seconds that the slowest rank waited for its batch.
        memory: most bytes of any rank.
        load: of the experts of the worst layer.
        exposed: seconds that some rank stood still for messages, by axis.
        saves: that have failed.
    """

    stop: bool
    data_wait: float
    memory: int
    load: ExpertLoad
    exposed: dict[str, float]
    saves: SaveReport = _NO_SAVES


def agree(
    mesh: Mesh,
    load: ExpertLoad,
    *,
    stop: bool,
    data_wait: float,
    saves: SaveReport = _NO_SAVES,
) -> Agreed:
    """Let every rank know the largest value of any rank.

    Args:
        mesh: all ranks; each of them calls this, and begins another lap of its ledger.
        load: of the experts of this rank's layers.
        stop: whether this rank was asked to save and stop.
        data_wait: seconds that this rank waited for its batch.
        saves: what this rank knows of them.
    """
    waited = mesh.ledger.lap()
    waits = [waited.get(axis, 0.0) for axis in AXES]
    mine = torch.tensor(
        [float(stop), data_wait, float(peak_memory(mesh.device)), *saves, *waits, *load],
        dtype=torch.float64,
        device=mesh.device,
    )
    mesh.world.all_reduce(mine, "step report", largest=True).wait()
    stopped, wait, memory, failed, spoiled, *rest = mine.tolist()
    exposed: dict[str, float] = {
        axis: seconds for axis, seconds in zip(AXES, rest, strict=False) if seconds > 0
    }
    load = ExpertLoad(*rest[len(AXES) :])
    saved = SaveReport(int(failed), int(spoiled))
    return Agreed(stopped > 0, wait, int(memory), load, exposed, saved)


@dataclass
class Meter:
    """Turns what steps did into numbers worth showing.

    Attributes:
        run: resolved.
        peak: of all ranks.
        losses: of every step so far.
        seconds: of every step so far.
        data_wait: seconds that this rank waited for batches.
        between: seconds between steps, by what they were for.
        waited_between: seconds in those that this rank stood still for messages, by axis.
        validations: so far.
        memory: most bytes of any rank so far.
        first_step: of the session, from 0.
        heart: of this rank, which is told of what lies between steps.
        earlier: what became of the time of this run before this session; known on rank 0.
        began: when this session did, in seconds since 1970.
        saves: of this session.
    """

    run: Run
    peak: Peak
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    data_wait: float = 0.0
    between: dict[Between, float] = field(default_factory=dict)
    waited_between: dict[str, float] = field(default_factory=dict)
    validations: list[Validation] = field(default_factory=list)
    memory: int = 0
    first_step: int = 0
    heart: Heartbeat = field(default_factory=Heartbeat)
    earlier: Goodput = field(default_factory=lambda: Goodput(0.0, {}))
    began: float = field(default_factory=time.time)
    saves: int = 0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    @contextmanager
    def apart(self, name: Between, ledger: Ledger) -> Iterator[None]:
        """Count what happens inside as something between steps, and not to the next step.

        Args:
            name: what it is for.
            ledger: of this rank's messages.
        """
        start = time.perf_counter()
        slow = name == "validation" and name not in self.between  # its graphs are compiled
        limit = SLOW_SECONDS if slow else PHASE_SECONDS.get(name, 0.0)
        before = self.heart.phase(name, limit)
        try:
            yield
        finally:
            self.heart.phase(*before)
            self.between[name] = self.between.get(name, 0.0) + time.perf_counter() - start
            for axis, seconds in ledger.lap().items():
                self.waited_between[axis] = self.waited_between.get(axis, 0.0) + seconds

    def forget_after(self, step: int) -> None:
        """Drop the losses of steps that are about to be done again; their time was spent."""
        del self.losses[max(step - self.first_step, 0) :]

    @property
    def goodput(self) -> float:
        """Share of the run's time so far that has become training."""
        training = self.earlier.training + sum(self.seconds)
        return training / max(self.earlier.wall + time.time() - self.began, training, 1e-9)

    @property
    def recent_step_seconds(self) -> float:
        """Median of the last steps; 0 until there were two, since the first are slow."""
        return statistics.median(self._recent) if len(self._recent) > 1 else 0.0

    @property
    def flops_per_token(self) -> float:
        """FLOP that the model needs for one token, the causal half of attention counted."""
        return flops_per_token(self.run.model, self.run.recipe.seq, causal=True)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks, from the median step."""
        return self.run.recipe.tokens_per_step / statistics.median(self.seconds)

    @property
    def convention(self) -> str:
        """How utilization was counted, or why there is none."""
        if self.peak.flops is None:
            return self.peak.source
        return f"{describe_convention(causal=True)}; {self.peak.source}"

    def utilization(self, tokens_per_second: float) -> tuple[float | None, float | None]:
        """MFU and HFU, or nothing where the peak is unknown."""
        if self.peak.flops is None:
            return None, None
        found = utilization(
            self.run.model,
            self.run.recipe.seq,
            tokens_per_second,
            self.peak.flops,
            self.run.layout.recompute,
        )
        return found.mfu, found.hfu

    def measure(
        self, step: int, result: StepResult, seconds: float, agreed: Agreed, rate: float
    ) -> StepMetrics:
        """Take note of one step.

        Args:
            step: from 0.
            result: what it did.
            seconds: how long it took.
            agreed: what all ranks know of it.
            rate: the learning rate it used.
        """
        self.losses.append(result.loss)
        self.seconds.append(seconds)
        self._recent.append(seconds)
        self.memory = max(self.memory, agreed.memory)
        tokens = self.run.recipe.tokens_per_step
        mfu, hfu = self.utilization(tokens / seconds)
        last = self.run.recipe.last_step
        each = statistics.median(self._recent) + sum(self.between.values()) / len(self.seconds)
        return StepMetrics(
            step=step + 1,
            steps=last,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=tokens,
            time=time.time(),
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            flops_per_second=tokens / seconds * self.flops_per_token,
            mfu=mfu,
            hfu=hfu,
            data_wait_seconds=agreed.data_wait,
            exposed_seconds=agreed.exposed,
            peak_bytes=self.memory,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            expert_load=agreed.load.busiest if self.run.model.is_moe else None,
            expert_dropped=agreed.load.dropped if self.run.model.is_moe else None,
            seconds_left=(last - step - 1) * each,
            goodput=self.goodput,
        )


def time_split(engine: Engine, meter: Meter) -> dict[str, float]:
    """Where the time of a session went, mean over ranks; every rank calls it.

    Waiting is time of steps in which a rank stood still for messages along an axis; what hides
    behind computation is not in it. The optimizer is counted without its waits for the global
    norm. What lies between steps has names of its own.

    Args:
        engine: of this rank; its ledger and recorder say what it waited for.
        meter: of the session; its `seconds` are those of the steps.

    Returns:
        Seconds, by name; what took none is left out.
    """
    waited, before = engine.mesh.ledger.waited, meter.waited_between
    axes = [waited.get(axis, 0.0) - before.get(axis, 0.0) for axis in AXES]
    optimizer = engine.recorder.seconds.get("optimizer", 0.0)
    compute = max(sum(meter.seconds) - sum(axes) - optimizer - meter.data_wait, 0.0)
    between = [meter.between.get(name, 0.0) for name in BETWEEN]
    mine = torch.tensor([compute, *axes, optimizer, meter.data_wait, *between], dtype=torch.float64)
    values = _mean(mine.to(engine.mesh.device), engine.mesh)
    waits = (f"waiting for {axis}" for axis in AXES)
    names = ("compute", *waits, "optimizer", "reading batches", *BETWEEN)
    return {name: value for name, value in zip(names, values, strict=True) if value > 0}


def _mean(values: Tensor, mesh: Mesh) -> list[float]:
    mesh.world.all_reduce(values, "time split").wait()
    return (values / mesh.world.size).tolist()


def from_rank_0(value: object, mesh: Mesh) -> object:
    """A small value that rank 0 decides and every rank needs.

    Args:
        value: pickles; only that of rank 0 counts.
        mesh: all ranks; each of them calls this.
    """
    box = [value]
    if mesh.world.size > 1:
        dist.broadcast_object_list(box, src=0, device=mesh.device)
    return box[0]
