"""What programs reach of a data sheet: shares and latencies, fitted on published runs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """How much of its peaks one kind of accelerator gives to a training program.

    Attributes:
        name: of the set.
        cores: units that share the tiles of a matrix product; 1 where tiles do not come in waves.
        product: share of the peak that a very large matrix product reaches.
        product_fp8, product_fp4: the same in 8 and in 4 bits, of the peak there; 0 is as in 16.
        depth: inner length of a 16-bit product at which half of that is reached.
        attention: share of the peak that fused attention reaches, of the scores it computes.
        attention_first: the same for the first generation of fused kernels.
        memory: share of the memory bandwidth that passes over tensors reach.
        launch: seconds between the starts of two kernels, at the least.
        gap: seconds that a kernel takes to fill and drain the device, at the least.
        domain: share of the one-way rate of the scale-up link in large collectives.
        network: share of the one-way rate of the scale-out link.
        interference: share of a hidden collective that the arithmetic beside it loses to it.
        jitter: share of a step that replicas wait for the slowest one, per doubling of those that
            are in different domains.
        utilization: executed FLOP over peak, the same for all runs: the baseline that the rest of
            the set has to beat.
        spread: standard error of ln(measured / predicted) over the runs it was fitted on.
        rows: how many runs that were; 0 means that the set is borrowed.
        source: where it comes from.
        assumed_peak: 16-bit FLOP/s to suppose of a part whose maker names none; 0 for others.
        queued: kernels wait in a queue, so that launching hides behind what runs; on a CPU every
            launch adds to what it launches.
        update: share of the memory bandwidth that the passes of an update reach; 0 for `memory`.
        step: seconds of a step that are neither a pass, a message nor the update: batches, meters.
    """

    name: str
    cores: int
    product: float
    depth: float
    attention: float
    attention_first: float
    memory: float
    launch: float
    domain: float
    network: float
    interference: float
    jitter: float
    utilization: float
    spread: float
    rows: int
    source: str
    assumed_peak: float = 0.0
    product_fp8: float = 0.0
    product_fp4: float = 0.0
    gap: float = 0.0
    queued: bool = True
    update: float = 0.0
    step: float = 0.0
