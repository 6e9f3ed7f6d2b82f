"""What is to be trained, on what, by what program; and whether a layout of it can be priced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.catalog.sustained import sustained
from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, UsageError, divisors
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import BF16, Precision
from phalanx.core.recompute import FULL, NONE, SELECTIVE, Recompute
from phalanx.core.run import Recipe, Run
from phalanx.core.sustained import Sustained
from phalanx.cost import refusals
from phalanx.cost.compute import Machine
from phalanx.cost.framework import PHALANX, Framework
from phalanx.cost.links import Fabric
from phalanx.cost.table import Table
from phalanx.schedules.layouts import is_asynchronous, spec_of

_ELEMENTS = {"fp8": 1.0, "fp4": 0.5}  # bytes of an operand in few bits


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All that a price depends on beside the layout.

    Attributes:
        shape: the model.
        cluster: the devices.
        seq: s, tokens per sequence.
        batch: sequences per step.
        precision: of the layouts, resolved.
        framework: the program.
        assumed: what the devices reach; None for what the catalog knows of them.
    """

    shape: ModelShape
    cluster: Cluster
    seq: int
    batch: int
    precision: Precision = BF16
    framework: Framework = PHALANX
    assumed: Sustained | None = None

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq * self.batch

    @property
    def capacity(self) -> float:
        """Bytes of one device."""
        return self.cluster.accelerator.memory

    @cached_property
    def rates(self) -> Sustained:
        """What the devices reach."""
        device = self.cluster.accelerator
        return self.assumed or device.sustained or sustained(device.name)

    @cached_property
    def machine(self) -> Machine:
        """One device as arithmetic sees it.

        Raises:
            RefusedError: its matrix units do not run the format.
        """
        rest, framework = self.precision.rest, self.framework
        wide = {"fp32": 4, "fp64": 8}.get(rest, 2)
        return Machine(
            peak=self._peak(self.precision),
            wide=self._peak(Precision(rest=rest)),
            hbm=self.cluster.accelerator.hbm,
            element=_ELEMENTS.get(self.precision.matrix_format, wide),
            wide_element=wide,
            product=self._product_share,
            accumulate=framework.accumulate if framework.fused_accumulation else 0.0,
            rates=self.rates,
        )

    @property
    def _product_share(self) -> float:
        """Share of the peak that products reach in the format of the recipe."""
        rates = self.rates
        of_format = {"fp8": rates.product_fp8, "fp4": rates.product_fp4}
        return of_format.get(self.precision.matrix_format, 0.0) or rates.product

    def _peak(self, precision: Precision) -> float:
        """Dense FLOP/s; where nobody published any, those assumed with the rates."""
        device, assumed = self.cluster.accelerator, self.rates.assumed_peak
        if not device.peaks and assumed and precision.rest in ("bf16", "fp16"):
            return assumed
        return device.peak(precision.matrix_format)

    @cached_property
    def fabric(self) -> Fabric:
        """The links between the devices."""
        return Fabric.of(self.cluster, self.rates)

    def table(self, layouts: Sequence[Layout]) -> Table:
        """Layouts by column."""
        return Table.of(self.shape, Recipe(seq=self.seq, batch=self.batch), layouts)


def workload_of(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    seq: int,
    batch: int,
    framework: Framework = PHALANX,
) -> tuple[Workload, Layout]:
    """The workload of one layout, and the layout with its precision resolved.

    Args:
        shape: the model.
        cluster: the devices.
        layout: how the step is cut; precision "auto" is that of the devices.
        seq: tokens per sequence.
        batch: sequences per step.
        framework: the program.

    Raises:
        UsageError: a sequence or a batch without tokens.
        RefusedError: the model, the batch or the devices cannot be cut so.
    """
    if seq < 1 or batch < 1:
        raise UsageError(f"seq={seq} batch={batch}; both are at least 1")
    layout = replace(layout, precision=layout.precision.on(cluster.accelerator.precision))
    workload = Workload(
        shape=shape,
        cluster=cluster,
        seq=seq,
        batch=batch,
        precision=layout.precision,
        framework=framework,
    )
    refuse(workload, layout)
    return workload, layout


def formula_mode(recompute: Recompute) -> Recompute:
    """The recompute mode by which the papers count executed FLOP: none, selective or full."""
    if recompute.segment:
        return FULL
    return SELECTIVE if recompute.core else NONE


def refuse(workload: Workload, layout: Layout) -> None:
    """Raise where the model, the batch or the devices cannot be cut so.

    Args:
        workload: what is trained, and on what; of its program, whether it is ours.
        layout: its precision resolved.

    Raises:
        UsageError: there is no such schedule.
        RefusedError: with the numbers that clash, and what works.
    """
    if layout.ranks != workload.cluster.count:
        raise RefusedError(_wrong_product(layout, workload.cluster.count))
    _ = workload.machine
    refuse_unpriced(layout)
    clip = 0.0 if is_asynchronous(layout) else 1.0
    recipe = Recipe(seq=workload.seq, batch=workload.batch, clip=clip)
    run = Run(model=workload.shape, layout=layout, recipe=recipe)
    refusals.refuse(run, ours=workload.framework.sends_as_ledger)


def refuse_unpriced(layout: Layout) -> None:
    """Raise where the schedule has no price, or other chunks.

    Raises:
        UsageError: there is no such schedule.
        RefusedError: with what works.
    """
    spec = spec_of(layout)
    if spec.in_flight is None:
        raise RefusedError(
            f"schedule={layout.schedule}: the planner prices schedules that say what they hold in "
            f"flight, {layout.schedule} does not; `phalanx schedule` times its rows"
        )


def _wrong_product(layout: Layout, count: int) -> str:
    fits = [d for d in divisors(count) if d <= layout.dp]
    rest = layout.pp * layout.tp * layout.cp
    hint = f"dp={count // rest}" if count % rest == 0 else f"dp={fits[-1]} pp=1 tp=1"
    return (
        f"dp={layout.dp} x pp={layout.pp} x cp={layout.cp} x tp={layout.tp} is {layout.ranks} "
        f"ranks, and the cluster has {count} devices; use {hint}"
    )
