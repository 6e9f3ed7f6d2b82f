"""Times a piece of work on all ranks at once, often enough to say how sure the number is.

Other programs take turns with the ranks of a CPU. A sample in which the system took the core away
says nothing; where too few others are left, arithmetic on one thread is timed by the processor's
own clock, and everything else, in which threads or ranks wait for each other, by its best samples.
"""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from phalanx.trainer.parallel.mesh import Mesh

_SAMPLE_SECONDS = 2e-3  # of one sample at the least, beside which the clock itself costs nothing
_FEWEST, _MOST = 7, 200
_ENOUGH = 0.25  # of all samples, undisturbed ones that speak for all


class Sampled(NamedTuple):
    """Seconds of one call.

    Attributes:
        median: of all samples, mean over ranks.
        low, high: between which four of five samples lie.
    """

    median: float
    low: float
    high: float


class Sample(NamedTuple):
    """One sample.

    Attributes:
        wall: seconds by the clock.
        cpu: seconds of the processor; as long as `wall` where threads wait for each other.
        disturbed: the core was taken away meanwhile.
    """

    wall: float
    cpu: float
    disturbed: bool


@dataclass
class Quiet:
    """How quiet the machine was.

    Attributes:
        samples: that this rank has taken.
        disturbed: of them.
    """

    samples: int = 0
    disturbed: int = 0


@dataclass(frozen=True)
class Bench:
    """Where things are timed.

    Attributes:
        mesh: all ranks along dp; each of them calls the same things in the same order.
        seconds: that one measurement may take, about.
        quiet: how quiet the machine was so far.
    """

    mesh: Mesh
    seconds: float
    quiet: Quiet = field(default_factory=Quiet)

    def fence(self) -> None:
        """Return once every rank is here, and its device has nothing left to do."""
        self.finish()
        self.mesh.world.all_reduce(torch.zeros(1, device=self.mesh.device), "barrier").wait()
        self.finish()

    def finish(self) -> None:
        """Wait until the device has done what it was given."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def sample(self, work: Callable[[], object], *, sends: bool = False) -> Sampled:
        """Time a call: some calls a sample, some samples, the same number on every rank.

        Args:
            work: what is timed.
            sends: it sends messages, so that a rank stands still in it.
        """
        work()
        once = self._largest(self.time(work).wall)
        calls = max(int(_SAMPLE_SECONDS / max(once, 1e-9)), 1)
        count = min(max(int(self.seconds / max(once * calls, 1e-9)), _FEWEST), _MOST)
        self.fence()
        return self.agreed([self.time(work, calls) for _ in range(count)], sends=sends)

    def time(self, work: Callable[[], object], calls: int = 1) -> Sample:
        """Take one sample.

        Args:
            work: what is timed.
            calls: how often it is called; the sample is of one of them.
        """
        switches, used, start = _switches(), time.process_time(), time.perf_counter()
        for _ in range(calls):
            work()
        self.finish()
        wall = (time.perf_counter() - start) / calls
        cpu = (time.process_time() - used) / calls if torch.get_num_threads() == 1 else wall
        disturbed = self.mesh.device.type == "cpu" and _switches() > switches
        self.quiet.samples += 1
        self.quiet.disturbed += disturbed
        return Sample(wall, cpu, disturbed)

    def agreed(self, samples: Sequence[Sample], *, sends: bool = False) -> Sampled:
        """What all ranks have measured, as one.

        Args:
            samples: of this rank.
            sends: they sent messages.
        """
        return self.mean(_quantiles(samples, sends=sends))

    def mean(self, mine: Sequence[float]) -> Sampled:
        """The mean over ranks of what each has found.

        Args:
            mine: three numbers of this rank.
        """
        known = torch.tensor(mine, dtype=torch.float64, device=self.mesh.device)
        self.mesh.world.all_reduce(known, "calibration").wait()
        return Sampled(*(known / self.mesh.world.size).tolist())

    def _largest(self, value: float) -> float:
        known = torch.tensor([value], dtype=torch.float64, device=self.mesh.device)
        self.mesh.world.all_reduce(known, "calibration", largest=True).wait()
        return float(known.item())


def _switches() -> int:
    """How often the system has taken the core away from this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _quantiles(samples: Sequence[Sample], *, sends: bool) -> tuple[float, float, float]:
    """Median, and between which four of five samples lie.

    Example:
        >>> busy = [Sample(9.0, 1.0, True)] * 3
        >>> _quantiles(busy, sends=False), _quantiles([*busy, Sample(2.0, 2.0, False)], sends=False)
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    """
    good = [sample.wall for sample in samples if not sample.disturbed]
    if len(good) < _ENOUGH * len(samples):
        good = [sample.cpu for sample in samples]
        if sends or good == [sample.wall for sample in samples]:  # what others do only ever adds
            good = sorted(sample.wall for sample in samples)[: max(len(samples) // 4, 1)]
    if len(good) == 1:
        good = good * 2
    tenths = statistics.quantiles(good, n=10, method="inclusive")
    return statistics.median(good), tenths[0], tenths[-1]
