"""The oracle: a few steps of a layout, against one device that sees the whole batch.

Pass means: loss, every gradient, the global gradient norm and every weight after the step are
the same up to rounding, and every copy of a weight is the same bit for bit.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from phalanx.core.errors import RefusedError
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.cost.refusals import refuse
from phalanx.data.batches import Stream
from phalanx.data.synthetic import Masked, SyntheticStream
from phalanx.oracle.chance import MovedByChance
from phalanx.oracle.compare import (
    Seen,
    judge,
    judge_numbers,
    see_biases,
    see_gradients,
    see_weights,
)
from phalanx.oracle.decisions import (
    RankDecisions,
    first_in_doubt,
    implausible_routes,
    joined,
    watch_routes,
)
from phalanx.oracle.limits import StepLimits, chaotic, fixed_limits, measured_limits
from phalanx.oracle.pool import RankPool
from phalanx.oracle.reference import Decisions, ReferenceStep, reference_steps
from phalanx.oracle.rounding import measure
from phalanx.schedules.layouts import enough_micro_batches, is_asynchronous, num_stages
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import forward_backward, train_step, update
from phalanx.trainer.parallel.mesh import GroupType, build_mesh
from phalanx.trainer.precision.dtypes import Dtypes

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
        used: the same errors as shares of what is allowed.
    """

    case: Case
    errors: dict[str, float]
    complaints: list[str]
    seconds: float
    traffic: list[list[Message]] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.complaints


class Reference(NamedTuple):
    """One device.

    Attributes:
        steps: that it took.
        limits: how far a layout may be from each.
        complaints: about decisions of the layout that it had to follow.
    """

    steps: list[ReferenceStep]
    limits: list[StepLimits]
    complaints: list[str]


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
    return layout.dp * layout.mb * enough_micro_batches(layout, wanted)


def refuse_unprovable(run: Run) -> None:
    """Raise where the run cannot be trained, or does not claim the update of one device.

    Raises:
        RefusedError: with what works.
    """
    if is_asynchronous(run.layout):
        raise RefusedError(
            f"schedule={run.layout.schedule} does not claim the update of one device: its "
            "gradients are stale by design; train with it, or verify another one, such as "
            f"schedule={DEFAULT_SCHEDULE}"
        )
    refuse(run)


def verify(
    pool: RankPool,
    case: Case,
    group_type: GroupType | None = None,
    tamper: Tamper | None = None,
) -> Outcome:
    """Compare a layout with one device.

    Args:
        pool: with at least as many ranks as the layout.
        case: what is compared.
        group_type: carries the messages; a mutated one tests the oracle itself.
        tamper: makes every rank's engine another one before its first step; for the same purpose.

    Raises:
        RefusedError: the layout cannot run this model; the message says what can.
    """
    refuse_unprovable(case.run)
    began = time.perf_counter()
    decisions = None
    if may_flip(case.run):
        told = pool.run(case.run.layout.ranks, decisions_job, case, group_type, tamper)
        decisions = joined(case.run, told)
    (reference,) = pool.run(1, reference_job, case, decisions)
    outcome = compare(pool, case, reference, group_type, tamper)
    return replace(outcome, seconds=time.perf_counter() - began)


def compare(
    pool: RankPool,
    case: Case,
    reference: Reference,
    group_type: GroupType | None = None,
    tamper: Tamper | None = None,
) -> Outcome:
    """Take the steps of the layout and compare them with those of a reference.

    Args:
        pool: with at least as many ranks as the layout.
        case: what is compared.
        reference: the steps of one device.
        group_type: as of `verify`.
        tamper: as of `verify`.
    """
    began = time.perf_counter()
    ranks = case.run.layout.ranks
    reports = pool.run(ranks, layout_job, case, reference.steps, group_type, tamper)
    return _conclude(case, reference, reports, time.perf_counter() - began)


def may_flip(run: Run) -> bool:
    """Whether rounding may decide who is routed where, or whether a step overflows."""
    precision = run.layout.precision
    return precision.rest != "fp64" and (run.model.experts > 0 or precision.rest == "fp16")


def reference_job(case: Case, decisions: Decisions | None = None) -> Reference:
    """On one process: the steps of one impossibly large device, and how far they may be off.

    Args:
        case: what is compared.
        decisions: of the layout, where rounding may tip the balance.
    """
    run = case.run

    def draw(rounding: MovedByChance | None) -> list[ReferenceStep]:
        return reference_steps(run, case.stream(), case.steps, decisions, rounding)

    if run.layout.precision.rest == "fp64":
        steps = draw(None)
        return Reference(steps, fixed_limits(steps), [])
    compute = Dtypes.of(run, torch.device("cpu")).compute
    steps, noise = measure(draw, compute)
    end, complaints = len(steps), list[str]()
    if decisions is not None:
        end, complaints = first_in_doubt(steps, noise, decisions)
        complaints += implausible_routes(run.model, steps[:end], noise, decisions)
    complaints += chaotic(steps[:end], noise[:end])
    rate = run.recipe.learning_rate if run.recipe.optimizer != "sgd" else 0.0
    limits = measured_limits(steps[:end], noise[:end], compute, rate)
    return Reference(steps[:end], limits, complaints)


def decisions_job(
    case: Case, group_type: GroupType | None = None, tamper: Tamper | None = None
) -> RankDecisions:
    """On every rank: the steps of the layout, for what it decides.

    Args:
        case: what is compared.
        group_type: carries the messages; None for those of the trainer.
        tamper: makes the engine another one before its first step; None leaves it as it is.
    """
    engine, stream = _build(case, group_type, tamper), case.stream()
    routes = watch_routes(engine)
    skipped = tuple(
        train_step(engine, step, stream.batch(step, engine.positions())).skipped
        for step in range(case.steps)
    )
    for unit in engine.units:
        unit.acquire()  # or the last weights would still be on their way when this rank leaves
    return RankDecisions(routes, skipped)


def _build(case: Case, group_type: GroupType | None, tamper: Tamper | None) -> Engine:
    cpu, kv_heads = torch.device("cpu"), case.run.model.kv_heads
    engine = build_engine(case.run, build_mesh(case.run.layout, cpu, group_type, kv_heads=kv_heads))
    return engine if tamper is None else tamper(engine)


def layout_job(
    case: Case,
    references: list[ReferenceStep],
    group_type: GroupType | None = None,
    tamper: Tamper | None = None,
) -> RankReport:
    """On every rank: the steps of the layout, each compared at once.

    Args:
        case: what is compared.
        references: the steps of one device; as many are taken.
        group_type: carries the messages; None for those of the trainer.
        tamper: makes the engine another one before its first step; None leaves it as it is.
    """
    engine, stream = _build(case, group_type, tamper), case.stream()
    ledger = engine.mesh.ledger
    losses, norms, seen, traffic = [], [], list[Seen](), list[Message]()
    for step, reference in enumerate(references):
        ledger.clear()
        losses.append(forward_backward(engine, step, stream.batch(step, engine.positions())))
        seen += see_gradients(engine.units, step, reference)
        norms.append(update(engine, losses[-1]).grad_norm)
        traffic = ledger.messages()
        seen += see_weights(engine.units, step, reference)
        seen += see_biases(engine.balancer.routers, step, reference)
    return RankReport(losses, norms, seen, traffic)


def _conclude(
    case: Case, reference: Reference, reports: list[RankReport], seconds: float
) -> Outcome:
    steps, limits = reference.steps, reference.limits
    seen = [item for report in reports for item in report.seen]
    judged = {
        "loss": judge_numbers(
            [r.losses for r in reports], [s.loss for s in steps], [s.loss for s in limits], "loss"
        ),
        "grad_norm": judge_numbers(
            [r.norms for r in reports],
            [s.grad_norm for s in steps],
            [s.grad_norm for s in limits],
            "grad_norm",
        ),
        "grad": judge(seen, limits, "grad"),
        "weight": judge(seen, limits, "weight"),
    }
    return Outcome(
        case=case,
        errors={name: found.worst for name, found in judged.items()},
        complaints=[
            *reference.complaints,
            *(text for found in judged.values() for text in found.complaints),
        ],
        seconds=seconds,
        traffic=[r.traffic for r in reports],
        used={name: found.used for name, found in judged.items()},
    )
