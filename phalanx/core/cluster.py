"""The hardware a step runs on: accelerators, and the links that join them.

Bandwidths are one way and per accelerator, in bytes per second. What a data sheet promises
(peak) and what programs are known to reach (sustained) are separate numbers.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from phalanx.core.errors import RefusedError, UsageError, divisors, shorten
from phalanx.core.sustained import Sustained

Topology = Literal["switch", "mesh", "torus", "none"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast one accelerator can send into a fabric.

    Attributes:
        name: what it is called, for example "NVLink 4".
        bandwidth: bytes/s one way per accelerator, from the data sheet.
        sustained: bytes/s one way that large collectives are known to reach.
        latency: seconds before the first byte of one message arrives (alpha).
    """

    name: str
    bandwidth: float
    sustained: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A group of accelerators joined by the fast fabric.

    Attributes:
        size: accelerators in one domain.
        topology: "switch" (every pair at full speed), "mesh" (one link per pair), "torus"
            (neighbours only), or "none".
        link: into this fabric. On a torus, one link along one axis, of which each axis has two.
        axes: number of axes of a torus; 0 elsewhere.
        reduces: the switch can sum in the network (SHARP).
    """

    size: int
    topology: Topology
    link: Link
    axes: int = 0
    reduces: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """How long one collective takes among neighbouring ranks, as it was measured.

    Attributes:
        name: of the collective, as messages call it; "send" to the next rank.
        ranks: of the group.
        latency: seconds that a message of no bytes takes.
        bandwidth: bytes/s of the full vector beyond that; of a send, of the message.
    """

    name: str
    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device: memory, arithmetic, and the fabric it is sold with.

    Attributes:
        name: lower-case catalog name.
        vendor: who makes it.
        memory: bytes, as the data sheet counts them (1 GB is 1e9).
        hbm: bytes/s between memory and chip.
        peaks: dense FLOP/s of the matrix units by number format; a format that is missing
            cannot run on them.
        domain: the scale-up fabric.
        network: the scale-out fabric.
        host: the link to host memory.
        per_host: accelerators in one machine.
        devices: what `torch.cuda.get_device_name` calls it.
        sources: where the numbers come from, by number.
        notes: what a reader of the numbers should know.
        precision: the number format that "auto" means on it.
        sustained: what programs were measured to reach on it; None for what the catalog knows.
        collectives: that were measured on it; others follow from the links.
    """

    name: str
    vendor: str
    memory: float
    hbm: float
    peaks: tuple[tuple[str, float], ...]
    domain: Domain
    network: Link
    host: Link
    per_host: int
    devices: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    notes: str = ""
    precision: str = "bf16"
    sustained: Sustained | None = None
    collectives: tuple[MeasuredCollective, ...] = ()

    @property
    def formats(self) -> tuple[str, ...]:
        """Number formats that the matrix units run."""
        return tuple(name for name, _ in self.peaks)

    def peak(self, number_format: str) -> float:
        """Dense FLOP/s in one format.

        Raises:
            RefusedError: the matrix units do not run this format.
        """
        for name, flops in self.peaks:
            if name == number_format:
                return flops
        known = ", ".join(self.formats) or "none with a published peak"
        raise RefusedError(
            f"{self.name} has no {number_format} matrix units with a known peak; it has {known}"
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Accelerators of one kind, and how many.

    Example:
        >>> from phalanx.catalog import load
        >>> cluster = load.cluster("h100x64")
        >>> cluster.count, cluster.domain_size, cluster.domains(group=16)
        (64, 8, 2)

    Attributes:
        name: as it was asked for.
        accelerator: the device.
        count: how many.
        torus: sizes of the axes of one torus slice; slices are joined by the network. Empty on a
            switched fabric.
    """

    name: str
    accelerator: Accelerator
    count: int
    torus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Reject clusters that cannot be built."""
        if self.count < 1:
            raise UsageError(f"{self.name} has {self.count} accelerators; it needs at least 1")
        if self.torus and self.count % prod(self.torus):
            shape = "x".join(str(n) for n in self.torus)
            raise UsageError(
                f"{self.count} chips are not whole slices of {shape} = {prod(self.torus)} chips"
            )
        if len(self.torus) > self.domain.axes:
            raise UsageError(
                f"{self.accelerator.name} has {self.domain.axes} torus axes, not {len(self.torus)}"
            )

    @property
    def domain(self) -> Domain:
        """The scale-up fabric of its accelerators."""
        return self.accelerator.domain

    @property
    def memory(self) -> float:
        """Bytes of device memory, all accelerators together."""
        return self.count * self.accelerator.memory

    @property
    def domain_size(self) -> int:
        """Accelerators that share one fast fabric: a switched domain, or a torus slice."""
        size = prod(self.torus) if self.torus else self.domain.size
        return min(size, self.count)

    def domains(self, group: int) -> int:
        """How many scale-up domains a group of neighbouring ranks spans.

        Raises:
            RefusedError: the group is larger than the cluster.
        """
        if group > self.count:
            raise RefusedError(
                f"a group of {group} ranks does not fit in {self.name}; "
                f"a degree can be {shorten(divisors(self.count))}"
            )
        return -(-group // self.domain_size)
