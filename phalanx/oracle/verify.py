"""The oracle: a few steps of a layout, against one device that sees the whole batch.

Pass means: loss, every gradient, the global gradient norm and every weight after the step are
the same up to rounding, and every copy of a weight is the same bit for bit.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from phalanx.core.errors import RefusedError
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.cost.axes.pipeline import enough
from phalanx.data.batches import Stream
from phalanx.data.synthetic import Masked, SyntheticStream
from phalanx.oracle.compare import (
    Seen,
    Verdict,
    judge,
    see_biases,
    see_gradients,
    see_weights,
    tolerance_of,
)
from phalanx.oracle.pool import RankPool
from phalanx.oracle.reference import ReferenceStep, reference_steps
from phalanx.schedules.layouts import is_asynchronous, num_stages
from phalanx.trainer.engine.step import Engine, build_engine, forward_backward, update
from phalanx.trainer.parallel.mesh import GroupType, build_mesh
from phalanx.trainer.run.limits import refuse_untrainable

Tables = Mapping[str, Mapping[str, Any]]
Tamper = Callable[[Engine], Engine]

MODEL = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 96}
RECIPE = {"seq": 32, "steps": 10, "warmup": 2, "clip": 0.5, "init_std": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class Case:
    """What is compared: a run, and the batches that both sides see.

    Attributes:
        run: model, layout and recipe; its data are not used.
        steps: optimizer steps to compare.
        masked: which targets count: all, unevenly many per sequence, or none of some.
        documents: several documents are packed into each sequence.
    """

    run: Run
    steps: int = 3
    masked: Masked = "uneven"
    documents: bool = False

    def stream(self) -> Stream:
        """The batches that both sides see."""
        recipe = self.run.recipe
        return SyntheticStream(
            self.run.model.vocab,
            recipe.seq,
            recipe.batch,
            recipe.seed,
            masked=self.masked,
            documents=self.documents,
        )


@dataclass(frozen=True)
class Outcome:
    """What the oracle found.

    Attributes:
        case: what is compared.
        errors: worst relative error of "loss", "grad", "grad_norm" and "weight".
        complaints: what differs, one line each; empty means passed.
        seconds: it took.
        traffic: what each rank sent in its last step, by rank.
    """

    case: Case
    errors: dict[str, float]
    complaints: list[str]
    seconds: float
    traffic: list[list[Message]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.complaints


class RankReport(NamedTuple):
    """What one rank saw: loss and norm of each step, stretches of tensors, messages."""

    losses: list[float]
    norms: list[float]
    seen: list[Seen]
    traffic: list[Message]


def default_case(layout: Layout, tables: Tables | None = None, **situation: Any) -> Case:
    """The oracle's usual model and batch under `layout`.

    A Llama of 4 layers, h=64, 4 heads over 2 kv heads, with at least 8 sequences of 32 tokens in
    a batch, as many as the layout needs; fp64 unless the layout names a precision. Initial
    weights are large enough for every part of the model to matter.

    Args:
        layout: how the steps are cut.
        tables: keys of "model" and "recipe" that are to differ, as in a run file.
        situation: `steps`, `masked` and `documents` of the case.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
    """
    if layout.precision.is_auto:
        layout = replace(layout, precision=layout.precision.on("fp64"))
    changes = tables or {}
    model = {**MODEL, "layers": _layers(layout), **changes.get("model", {})}
    recipe = {**RECIPE, "batch": _batch(layout), **changes.get("recipe", {})}
    run = Run.from_tables({**changes, "model": model, "recipe": recipe})
    return Case(replace(run, layout=layout), **situation)


def _layers(layout: Layout) -> int:
    return sum(layout.stages) or max(4, num_stages(layout))


def _batch(layout: Layout) -> int:
    """At least 8 sequences and 2 micro-batches, and as many as the schedule needs."""
    wanted = max(2, -(-8 // (layout.dp * layout.mb)))
    return layout.dp * layout.mb * enough(layout, wanted)


def refuse_unprovable(run: Run) -> None:
    """Raise where the run cannot be trained, or does not claim the update of one device.

    Raises:
        RefusedError: with what works.
    """
    refuse_untrainable(run)
    if is_asynchronous(run.layout):
        raise RefusedError(
            f"schedule={run.layout.schedule} does not claim the update of one device: its "
            "gradients are stale by design; train with it, or verify another one, such as "
            f"schedule={DEFAULT_SCHEDULE}"
        )


def verify(pool: RankPool, case: Case) -> Outcome:
    """Compare a layout with one device.

    Args:
        pool: with at least as many ranks as the layout.
        case: what is compared.

    Raises:
        RefusedError: the layout cannot run this model; the message says what can.
    """
    refuse_unprovable(case.run)
    began = time.perf_counter()
    (references,) = pool.run(1, reference_job, case)
    outcome = compare(pool, case, references)
    return replace(outcome, seconds=time.perf_counter() - began)


def compare(
    pool: RankPool,
    case: Case,
    references: list[ReferenceStep],
    group_type: GroupType | None = None,
    tamper: Tamper | None = None,
) -> Outcome:
    """Take the steps of the layout and compare them with those of a reference.

    Args:
        pool: with at least as many ranks as the layout.
        case: what is compared.
        references: the steps of one device.
        group_type: carries the messages; a mutated one tests the oracle itself.
        tamper: makes every rank's engine another one before its first step; for the same purpose.
    """
    began = time.perf_counter()
    ranks = case.run.layout.ranks
    reports = pool.run(ranks, layout_job, case, references, group_type, tamper)
    return _conclude(case, references, reports, time.perf_counter() - began)


def reference_job(case: Case) -> list[ReferenceStep]:
    """On one process: the steps of one impossibly large device."""
    return reference_steps(case.run, case.stream(), case.steps)


def layout_job(
    case: Case,
    references: list[ReferenceStep],
    group_type: GroupType | None = None,
    tamper: Tamper | None = None,
) -> RankReport:
    """On every rank: the steps of the layout, each compared at once."""
    cpu, kv_heads = torch.device("cpu"), case.run.model.kv_heads
    mesh = build_mesh(case.run.layout, cpu, group_type, kv_heads=kv_heads)
    engine = build_engine(case.run, mesh)
    if tamper is not None:
        engine = tamper(engine)
    stream = case.stream()
    losses, norms, seen = [], [], list[Seen]()
    for step, reference in enumerate(references):
        mesh.ledger.clear()
        losses.append(forward_backward(engine, step, stream.batch(step, engine.positions())))
        seen += see_gradients(engine.units, step, reference)
        norms.append(update(engine, losses[-1]).grad_norm)
        traffic = mesh.ledger.messages()
        seen += see_weights(engine.units, step, reference)
        seen += see_biases(engine.balancer.routers, step, reference)
    return RankReport(losses, norms, seen, traffic)


def _conclude(
    case: Case, references: list[ReferenceStep], reports: list[RankReport], seconds: float
) -> Outcome:
    tolerance = tolerance_of(case.run.layout.precision)
    seen = [item for report in reports for item in report.seen]
    losses, norms = [r.losses for r in reports], [r.norms for r in reports]
    true_losses, true_norms = [r.loss for r in references], [r.grad_norm for r in references]
    verdicts = {
        "loss": _judge_numbers("loss", losses, true_losses, tolerance.loss),
        "grad_norm": _judge_numbers("grad_norm", norms, true_norms, tolerance.grad_norm),
        "grad": judge(seen, references, "grad", tolerance),
        "weight": judge(seen, references, "weight", tolerance),
    }
    return Outcome(
        case=case,
        errors={name: verdict.worst for name, verdict in verdicts.items()},
        complaints=[text for verdict in verdicts.values() for text in verdict.complaints],
        seconds=seconds,
        traffic=[r.traffic for r in reports],
    )


def _judge_numbers(
    name: str, ours: list[list[float]], theirs: list[float], limit: float
) -> Verdict:
    """Compare what each rank says at each step; all must say the same."""
    errors = [
        abs(mine - true) / max(abs(true), 1e-14)
        for values in ours
        for mine, true in zip(values, theirs, strict=True)
    ]
    worst = max(error if math.isfinite(error) else math.inf for error in errors)
    complaints = [] if worst <= limit else [f"{name} is off by {worst:.1e}"]
    if any(values != ours[0] for values in ours):
        complaints.append(f"{name} differs between ranks")
    return Verdict(worst, complaints)
