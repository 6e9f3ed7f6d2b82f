"""What is asked of the planner: one layout of one model on one cluster, and whether it can be."""

from dataclasses import dataclass, replace

from phalanx.catalog.sustained import sustained
from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, UsageError, divisors, shorten
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import Precision
from phalanx.core.recompute import FULL, NONE, SELECTIVE, Recompute
from phalanx.core.sustained import Sustained
from phalanx.cost.compute import Machine
from phalanx.cost.practice import PHALANX, Practice
from phalanx.cost.wires import Group
from phalanx.schedules.layouts import chunks, layers_of_stages, spec_of


@dataclass(frozen=True)
class Question:
    """A layout to be priced.

    Attributes:
        shape: the model.
        cluster: the devices; as many as the layout has ranks.
        layout: how the step is cut; its precision is resolved.
        seq: s, tokens per sequence.
        batch: sequences per step.
        practice: what the program does.
        rates: what the devices reach.
    """

    shape: ModelShape
    cluster: Cluster
    layout: Layout
    seq: int
    batch: int
    practice: Practice
    rates: Sustained

    @property
    def micro_batches(self) -> int:
        """m, per rank and step."""
        return self.layout.micro_batches(self.batch)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq * self.batch

    @property
    def v(self) -> int:
        """Chunks of layers per pipeline rank."""
        return chunks(self.layout)

    @property
    def machine(self) -> Machine:
        """One device as arithmetic sees it."""
        precision, rates = self.layout.precision, self.rates
        recipe, rest = precision.recipe, precision.rest
        return Machine(
            peak=peak_of(self.cluster, precision, rates),
            wide=peak_of(self.cluster, Precision(rest=rest), rates),
            hbm=self.cluster.accelerator.hbm,
            element=1 if recipe else {"fp32": 4, "fp64": 8}.get(rest, 2),
            accumulate=self.practice.accumulate if self.practice.fused_accumulation else 0.0,
            rates=rates,
        )

    @property
    def stride(self) -> dict[str, int]:
        """How far apart the neighbours of each axis are, in ranks."""
        layout = self.layout
        inner = layout.tp * layout.cp
        if self.practice.pipeline_outside:
            return {"tp": 1, "cp": layout.tp, "dp": inner, "pp": inner * layout.dp}
        return {"tp": 1, "cp": layout.tp, "pp": inner, "dp": inner * layout.pp}

    @property
    def expert_group(self) -> Group:
        """The ranks that share the experts; they are taken from dp x cp, and from tp if need be."""
        layout = self.layout
        if layout.dp * layout.cp % layout.ep:
            return Group(layout.ep, 1)
        contiguous = self.practice.pipeline_outside or layout.pp == 1 or layout.ep <= layout.cp
        return Group(layout.ep, layout.tp if contiguous else self.stride["dp"])


def ask(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    seq: int,
    batch: int,
    practice: Practice = PHALANX,
) -> Question:
    """Put the question, if it has an answer.

    Args:
        shape: the model.
        cluster: the devices.
        layout: how the step is cut; precision "auto" is bf16.
        seq: tokens per sequence.
        batch: sequences per step.
        practice: what the program does.

    Raises:
        UsageError: a sequence or a batch without tokens.
        RefusedError: the model, the batch or the devices cannot be cut so.
    """
    if seq < 1 or batch < 1:
        raise UsageError(f"seq={seq} batch={batch}; both are at least 1")
    layout = replace(layout, precision=layout.precision.on("bf16"))
    rates = sustained(cluster.accelerator.name)
    question = Question(shape, cluster, layout, seq, batch, practice, rates)
    refuse(question)
    return question


def peak_of(cluster: Cluster, precision: Precision, rates: Sustained) -> float:
    """Dense FLOP/s of a format; where nobody published any, the one assumed with the rates.

    Raises:
        RefusedError: the matrix units do not run this format.
    """
    device = cluster.accelerator
    if not device.peaks and rates.assumed_peak and precision.rest in ("bf16", "fp16"):
        return rates.assumed_peak
    return device.peak(precision.matrix_format)


def formula_mode(recompute: Recompute) -> Recompute:
    """The recompute mode by which the papers count executed FLOP: none, selective or full."""
    if recompute.segment:
        return FULL
    return SELECTIVE if recompute.core else NONE


def refuse(question: Question) -> None:
    """Raise where the model, the batch or the devices cannot be cut so.

    Raises:
        RefusedError: with the numbers that clash, and what works.
    """
    shape, layout, cluster = question.shape, question.layout, question.cluster
    if layout.ranks != cluster.count:
        raise RefusedError(_wrong_product(layout, cluster.count))
    peak_of(cluster, layout.precision, question.rates)
    _refuse_heads(shape, layout)
    _refuse_experts(shape, layout)
    if question.seq % layout.cp:
        raise RefusedError(
            f"a sequence of {question.seq} tokens cannot be cut over cp={layout.cp}; "
            f"cp can be {shorten(divisors(question.seq))}"
        )
    refuse_unpriced(layout)
    layers_of_stages(layout, shape.layers)
    layout.micro_batches(question.batch)


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
    if not spec.chunks.hold(chunks(layout)):
        raise RefusedError(
            f"schedule={layout.schedule} needs v to be {spec.chunks}, not v={chunks(layout)}; use "
            f"v={spec.chunks.nearest(chunks(layout))}, or a schedule that leaves v open"
        )


def _wrong_product(layout: Layout, count: int) -> str:
    fits = [d for d in divisors(count) if d <= layout.dp]
    rest = layout.pp * layout.tp * layout.cp
    hint = f"dp={count // rest}" if count % rest == 0 else f"dp={fits[-1]} pp=1 tp=1"
    return (
        f"dp={layout.dp} x pp={layout.pp} x cp={layout.cp} x tp={layout.tp} is {layout.ranks} "
        f"ranks, and the cluster has {count} devices; use {hint}"
    )


def _refuse_heads(shape: ModelShape, layout: Layout) -> None:
    if shape.heads % layout.tp:
        raise RefusedError(
            f"{shape.heads} heads cannot be split over tp={layout.tp}; "
            f"tp can be {shorten(divisors(shape.heads))}"
        )


def _refuse_experts(shape: ModelShape, layout: Layout) -> None:
    if layout.ep == 1:
        return
    if not shape.is_moe:
        raise RefusedError(f"ep={layout.ep}, but {shape.name} has no experts; use ep=1")
    if shape.experts % layout.ep:
        raise RefusedError(
            f"{shape.experts} experts cannot be split over ep={layout.ep}; "
            f"ep can be {shorten(divisors(shape.experts))}"
        )
    ranks = layout.dp * layout.cp * layout.tp
    if ranks % layout.ep:
        raise RefusedError(
            f"ep={layout.ep} must divide dp x cp x tp = {ranks}; "
            f"ep can be {shorten(divisors(ranks))}"
        )
