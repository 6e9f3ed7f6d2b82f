"""The plan of a run that was done: the planner's price of its own run file, on its own machine.

Where the machine is not in the catalog, as a CPU is not, the measured peak of the run stands for
its arithmetic, and its memory and links are assumed: notes say so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from phalanx.catalog import load
from phalanx.core.cluster import Accelerator, Cluster, Domain, Link
from phalanx.core.errors import PhalanxError, RefusedError
from phalanx.core.estimate import Estimate, Term
from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.core.sustained import Sustained
from phalanx.cost.messages import rank_messages
from phalanx.cost.refusals import refuse
from phalanx.planner.estimate import Priced
from phalanx.planner.workload import Workload, workload_of
from phalanx.reports.record import RunRecord, number

CPU_MEMORY_BYTES_PER_SECOND = 10e9  # of all cores; an assumption, which a note names
CPU_LINK_BYTES_PER_SECOND = 2e9
CPU_LINK_LATENCY = 50e-6
CPU_LAUNCH = 10e-6

# What ranks of a CPU are supposed to reach of a peak that was itself measured on products.
_CPU = Sustained(
    name="cpu",
    cores=1,
    product=1.0,
    depth=64.0,
    attention=0.3,
    attention_first=0.3,
    memory=1.0,
    launch=CPU_LAUNCH,
    domain=1.0,
    network=1.0,
    interference=0.0,
    jitter=0.0,
    utilization=0.3,
    spread=0.5,
    rows=0,
    source="assumed for a CPU",
)


class Parts(NamedTuple):
    """Planned seconds of a step, by the names of a report; they add up to it.

    Attributes:
        seconds: by term.
        below: of those below the peak, by kind.
    """

    seconds: Mapping[str, float]
    below: Mapping[str, float]


@dataclass(frozen=True)
class RunPlan:
    """What the planner says of a run.

    Attributes:
        run: the run, its precision resolved.
        cluster: the devices.
        assumed: what they reach, where the catalog does not know them.
        notes: what is assumed.
    """

    run: Run
    cluster: Cluster
    assumed: Sustained | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def priced(self) -> Priced:
        """The layout of the run with its prices."""
        return self.price(self.run)

    @cached_property
    def estimate(self) -> Estimate:
        """What a step should cost."""
        return self.priced.estimate()

    def price(self, run: Run) -> Priced:
        """Another run on the same devices.

        Args:
            run: of as many ranks.

        Raises:
            RefusedError: it cannot be cut so.
        """
        refuse(run)
        recipe = run.recipe
        asked = run.model, self.cluster, run.layout, recipe.seq, recipe.batch
        found, layout = workload_of(*asked)
        workload: Workload = replace(found, assumed=self.assumed)
        return Priced(workload, layout)

    @property
    def peak_bytes(self) -> float:
        """Of the worst rank; on a CPU without the reserve, which only a GPU's program keeps."""
        worst = self.estimate.worst_rank
        return worst.total if self.assumed is None else worst.allocated

    def messages(self) -> tuple[Message, ...]:
        """What rank 0 should send in a step, byte for byte."""
        return tuple(rank_messages(self.run, self.run.layout.coordinates(0)))

    @cached_property
    def parts(self) -> Parts:
        """The estimate by the names of a report; arithmetic is the mean over ranks."""
        return _parts(self.priced, self.estimate)


def plan_of(record: RunRecord, cluster: Cluster | None = None) -> RunPlan | str:
    """The plan of a run, or why there is none.

    Args:
        record: what the run wrote.
        cluster: the devices; None for those that the run itself names.
    """
    run, layout = record.run, record.layout
    if run is None or layout is None:
        return "the run file cannot be read"
    default = "bf16" if record.environment.get("accelerators_here") else "fp32"
    layout = replace(run.layout, precision=layout.precision.on(default))
    run = replace(run, layout=layout)
    try:
        found = _on(record, run, cluster)
        if isinstance(found, RunPlan):
            _ = found.parts
    except (PhalanxError, ArithmeticError, OSError) as error:
        return str(error)
    return found


def _on(record: RunRecord, run: Run, cluster: Cluster | None) -> RunPlan | str:
    if cluster is not None:
        if cluster.count != run.layout.ranks:
            raise RefusedError(
                f"{cluster.name} has {cluster.count} devices, and the run has "
                f"{run.layout.ranks} ranks; use a cluster of as many"
            )
        return RunPlan(run, cluster)
    ranks, device = run.layout.ranks, str(record.environment.get("device", ""))
    known = load.accelerator_by_device(device)
    if run.cluster and record.environment.get("accelerators_here", 1):
        named = load.cluster(run.cluster)
        if named.count == ranks:
            return RunPlan(run, named)
    if known is not None:
        return RunPlan(run, load.cluster(f"{known.name}x{ranks}"))
    peak = peak_of(record)
    if peak is None:
        return f"{device or 'the device'} is not in the catalog; give --cluster FILE.toml of it"
    if record.environment.get("accelerators_here"):
        return f"{device} is not in the catalog; give --cluster FILE.toml of it"
    note = (
        "planned on this CPU's measured peak; its memory "
        f"({CPU_MEMORY_BYTES_PER_SECOND / 1e9:g} GB/s) and links "
        f"({CPU_LINK_BYTES_PER_SECOND / 1e9:g} GB/s) are assumed: --cluster FILE.toml says better"
    )
    return RunPlan(run, _cpu(record, run.layout, peak), _CPU, (note,))


def peak_of(record: RunRecord) -> float | None:
    """FLOP/s of all ranks that utilization was measured against; None where nobody knows."""
    for step in reversed(record.steps):
        if step.mfu and step.flops_per_second:
            return step.flops_per_second / step.mfu
    return None


def _cpu(record: RunRecord, layout: Layout, peak: float) -> Cluster:
    """A CPU as a cluster of its ranks, which share its memory and speak through it."""
    ranks = layout.ranks
    memory = number(record.environment.get("memory_bytes")) or math.inf
    rate = CPU_LINK_BYTES_PER_SECOND
    link = Link(name="local", bandwidth=rate, sustained=rate, latency=CPU_LINK_LATENCY)
    device = Accelerator(
        name="cpu",
        vendor=str(record.environment.get("cpu", "")),
        memory=memory / ranks,
        hbm=CPU_MEMORY_BYTES_PER_SECOND / ranks,
        peaks=((layout.precision.on("fp32").matrix_format, peak / ranks), ("fp32", peak / ranks)),
        domain=Domain(size=ranks, topology="switch", link=link),
        network=link,
        host=link,
        per_host=ranks,
    )
    return Cluster(name=f"cpu x {ranks}", accelerator=device, count=ranks)


AXES = ("tensor", "context", "expert")
_ROUNDING = 1e-12  # of a step
_BELOW = ("matrix products", "attention")
_PLAIN = (
    "passes over memory",
    "adding gradients up",
    "waiting for kernel launches",
    "waiting for offloaded activations",
)


def _parts(priced: Priced, found: Estimate) -> Parts:
    """Put the planner's tree under the names of a report."""
    step = found.step
    at_peak, again = found.mfu * step.seconds, (found.hfu - found.mfu) * step.seconds
    below = {name: _seconds(step, name, "below the peak") for name in _BELOW}
    below |= {name: _seconds(step, name) for name in _PLAIN}
    at_peak_of_tree = sum(_seconds(step, name, "at the peak") for name in _BELOW)
    again_of_tree = _seconds(step, "recomputation")
    inside = at_peak_of_tree + again_of_tree + math.fsum(below.values())
    uneven = inside * _unevenness(priced)  # the busiest rank works that much more than the mean
    below["recomputation"] = again_of_tree - again
    below["not counted by MFU"] = at_peak_of_tree - at_peak - uneven
    below = {name: seconds for name, seconds in below.items() if seconds}
    seconds = {"at the peak": at_peak, "recomputation": again, "below": math.fsum(below.values())}
    seconds |= {axis: _seconds(step, f"{axis} axis") for axis in AXES}
    seconds["data"] = _seconds(step, "data axis") + _seconds(step, "weights and gradients of ZeRO")
    seconds["pipeline"] = _seconds(step, "pipeline axis", "hops")
    seconds["inherent"] = _seconds(step, "pipeline axis", "bubble")
    seconds["imbalance"] = uneven
    seconds["world"] = _seconds(step, "waiting for the slowest rank")
    seconds["optimizer"] = _seconds(step, "optimizer")
    seconds["optimizer"] += _seconds(step, "updates between micro-batches")
    rest = step.seconds - math.fsum(seconds.values())
    seconds["rest"] = 0.0 if abs(rest) < _ROUNDING * step.seconds else rest
    return Parts(seconds, below)


def _seconds(step: Term, *names: str) -> float:
    """Seconds of a child of the step, or of a child of that."""
    found: Term | None = step
    for name in names:
        children = found.children if found else ()
        found = next((term for term in children if term.name == name), None)
    return found.seconds if found else 0.0


def _unevenness(priced: Priced) -> float:
    """By what share of its own work the busiest rank works longer than the mean."""
    busy = priced.pipeline.busy
    return float(1 - busy.mean() / busy.max()) if busy.max() > 0 else 0.0
