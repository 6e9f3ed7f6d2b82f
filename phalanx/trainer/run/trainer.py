"""A training run on one rank, from the first batch to the summary."""

import math
import secrets
import shlex
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.run import Run
from phalanx.core.timeline import Span, Timeline
from phalanx.data.batches import SampleStream
from phalanx.data.corpus import Corpus, open_corpus
from phalanx.data.prefetch import Prefetcher
from phalanx.schedules.layouts import is_asynchronous, layers_of_stages
from phalanx.trainer.checkpoint import Checkpoint, Saver, newest
from phalanx.trainer.engine.pipedream import asynchronous, pipedream_step
from phalanx.trainer.engine.step import Engine, build_engine, evaluate, train_step
from phalanx.trainer.parallel.mesh import Mesh, build_mesh
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.run.generate import generate
from phalanx.trainer.run.limits import refuse_untrainable
from phalanx.trainer.run.meter import Meter, agree, find_peak, from_rank_0, time_split
from phalanx.trainer.run.report import Reporter, RunInfo, Silent, Summary
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.state import own_pieces, progress, restore
from phalanx.trainer.run.worker import Worker

INTERRUPTED = 75
_TRACED = range(2, 5)  # steps of a session that the timeline shows: warm, and early
_MOST_SKIPPED = 10


@dataclass(frozen=True)
class Session:
    """Everything that one rank of a running training needs.

    Attributes:
        run: resolved for this device.
        worker: this process.
        engine: takes the steps.
        training: the stream of batches.
        validation: held-out batches, or None.
        corpus: both of them together.
        saver: of checkpoints; None where nothing is written.
        directory: of the run; None where nothing is written, and on ranks other than 0.
        reporter: silent on ranks other than 0.
        meter: of this session.
        proof: for the summary.
    """

    run: Run
    worker: Worker
    engine: Engine
    training: SampleStream
    validation: SampleStream | None
    corpus: Corpus
    saver: Saver | None
    directory: RunDirectory | None
    reporter: Reporter
    meter: Meter
    proof: str


def train(
    worker: Worker,
    run: Run,
    directory: RunDirectory | None,
    reporter: Reporter,
    resume: str | None = None,
    proof: str = "",
) -> int:
    """Train; every rank of the run calls it.

    Args:
        worker: this process, joined with the others.
        run: what to train, and how.
        directory: where to write; None writes nothing.
        reporter: watches; used on rank 0.
        resume: "auto" for the newest checkpoint of `directory` that can be trusted, the path of
            one, or None to start anew.
        proof: how the first steps compared with one device, for the summary.

    Returns:
        0, or 75 if it was asked to stop and saved.

    Raises:
        PhalanxError: with one line that says what to change.
    """
    session = replace(_open(worker, run, directory, reporter), proof=proof)
    first, last = _resume(session, resume) if resume else 0, run.recipe.last_step
    _require_steps(session, first, last)
    if session.directory:  # not before: a resume that is refused leaves the run as it was
        session.directory.write_run(run)
    session.reporter.on_start(_info(session, first))
    done, interrupted = _steps(session, first, last)
    summary = _finish(session, first, done, interrupted=interrupted)
    if session.directory and (done > first or not session.directory.summary_file.exists()):
        session.directory.write_summary(summary)
    session.reporter.on_end(summary)
    return INTERRUPTED if interrupted else 0


def _open(worker: Worker, run: Run, directory: RunDirectory | None, reporter: Reporter) -> Session:
    """Join the ranks into a mesh, open the corpus, build the model."""
    layout = run.layout
    if layout.ranks != worker.ranks:
        raise PhalanxError(f"{layout} needs {layout.ranks} ranks, and there are {worker.ranks}")
    precision = Dtypes.named(layout.precision, worker.device)
    run = replace(run, layout=replace(layout, precision=precision.precision))
    refuse_untrainable(run)
    mesh = build_mesh(run.layout, worker.device, kv_heads=run.model.kv_heads)
    corpus = open_corpus(run.data, run.model.vocab)
    training, held_out = corpus.split(run.data.validation, run.recipe.seq)
    engine = build_engine(run, mesh)
    if is_asynchronous(run.layout):
        engine = asynchronous(engine)
    main = worker.rank == 0
    return Session(
        run=run,
        worker=worker,
        engine=engine,
        training=_stream(run, training),
        validation=_stream(run, held_out) if held_out and run.recipe.evaluate_batches else None,
        corpus=corpus,
        saver=_saver(directory, mesh, reporter) if directory else None,
        directory=directory if main else None,
        reporter=reporter if main else Silent(),
        meter=Meter(run, find_peak(mesh, run.layout.precision)),
        proof="",
    )


def _stream(run: Run, corpus: Corpus) -> SampleStream:
    return SampleStream(
        corpus,
        seq=run.recipe.seq,
        batch=run.recipe.batch,
        seed=run.recipe.seed,
        document_mask=run.data.document_mask,
    )


def _saver(directory: RunDirectory, mesh: Mesh, reporter: Reporter) -> Saver:
    rank = mesh.layout.rank_at(mesh.at)
    attempt = str(from_rank_0(secrets.token_hex(8), mesh))
    told = reporter.on_event if rank == 0 else Silent().on_event
    return Saver(directory.checkpoints, rank, mesh.world.size, attempt=attempt, on_event=told)


def _resume(session: Session, resume: str) -> int:
    """Load the checkpoint that rank 0 trusts, and say so; the step to go on with."""
    chosen = _choose(session, resume) if session.worker.rank == 0 else None
    path = from_rank_0(chosen, session.engine.mesh)
    if not isinstance(path, Path):
        session.reporter.on_event("no checkpoint to resume from; starting at the first step")
        if session.directory:
            session.directory.forget_after(0)
        return 0
    with Checkpoint.open(path) as checkpoint:
        step = restore(session.engine, checkpoint, session.corpus.fingerprint)
    session.reporter.on_event(f"resumed {path.name} under {session.run.layout}")
    if session.directory:
        session.directory.forget_after(step)
    return step


def _require_steps(session: Session, first: int, last: int) -> None:
    """Refuse to go back; a job that is started again once all is done has nothing to do."""
    recipe = session.run.recipe
    key = "recipe.steps" if last == recipe.steps else "recipe.stop_at"
    if first > last:
        raise UsageError(
            f"the checkpoint is of step {first}, and {key}={last} ends before it; "
            f"use {key} above {first}, or start from an older checkpoint under another --name"
        )
    if first == last:
        session.reporter.on_event(f"all {last} steps are done; more need {key} above {last}")


def _choose(session: Session, resume: str) -> Path | None:
    if resume != "auto":
        return Path(resume)
    if session.directory is None:
        return None
    found = newest(session.directory.checkpoints, session.reporter.on_event)
    if found is None:
        return None
    found.close()
    return found.path


def _info(session: Session, first: int) -> RunInfo:
    run, worker, directory = session.run, session.worker, session.directory
    kind = "GPU" if worker.device.type == "cuda" else f"CPU x {torch.get_num_threads()} threads"
    return RunInfo(
        name=directory.name if directory else "",
        directory=str(directory.path) if directory else "",
        model=run.model,
        weights=run.weights,
        layout=run.layout,
        precision=session.engine.arithmetic.told or str(run.layout.precision),
        stages=layers_of_stages(run.layout, run.model.layers),
        micro_batches=run.micro_batches,
        parameters=run.model.params(),
        tokens_per_step=run.recipe.tokens_per_step,
        first_step=first,
        steps=run.recipe.last_step,
        device=f"{worker.ranks} x {kind}",
        corpus=session.corpus.name,
        bytes_per_token=session.corpus.bytes_per_token,
        peak_flops=session.meter.peak.flops,
        peak_source=session.meter.peak.source,
    )


def _steps(session: Session, first: int, last: int) -> tuple[int, bool]:
    """Take the steps from `first` to `last`; how many are done, and whether asked to stop."""
    engine, recorder = session.engine, session.engine.recorder
    engine.mesh.ledger.clear()
    skipped_in_a_row = 0
    take_step = pipedream_step if is_asynchronous(session.run.layout) else train_step
    with Prefetcher(session.training, engine.positions(), first, last) as batches:
        start = time.perf_counter()
        for step, batch in batches:
            recorder.keeps_spans = step - first in _TRACED
            rate = engine.optimizer.learning_rate
            result = take_step(engine, step, batch)
            waited = batches.seconds_waited
            agreed = agree(
                engine.mesh, result.load, stop=session.worker.stop.requested, data_wait=waited
            )
            recorder.seconds["data"] = recorder.seconds.get("data", 0.0) + waited
            now = time.perf_counter()
            metrics = session.meter.measure(step, result, now - start, agreed, rate)
            start = now
            if session.directory:
                session.directory.write_step(metrics)
            session.reporter.on_step(metrics)
            hopeless = result.skipped and not engine.loss_scale.can_fall
            skipped_in_a_row = skipped_in_a_row + 1 if hopeless else 0
            _give_up_if_lost(skipped_in_a_row, metrics.loss)
            if step - first == _TRACED[-1] or (step == last - 1 and recorder.spans):
                _write_timeline(session)
            _between_steps(session, step + 1, last, stop=agreed.stop)
            if agreed.stop:
                return step + 1, step + 1 < last
    return last, False


def _give_up_if_lost(skipped: int, loss: float) -> None:
    if skipped >= _MOST_SKIPPED:
        raise PhalanxError(
            f"{skipped} steps in a row were not finite (loss {loss}); resume from the last "
            "checkpoint with a smaller recipe.learning_rate, or a smaller recipe.clip"
        )


def _between_steps(session: Session, done: int, last: int, *, stop: bool) -> None:
    """Save and validate when it is time."""
    recipe = session.run.recipe
    due = recipe.checkpoint_every and done % recipe.checkpoint_every == 0
    if session.saver:
        session.saver.raise_if_failed()
        if due or stop or done == last:
            state = progress(session.engine, done, session.corpus.fingerprint)
            session.saver.save(done, own_pieces(session.engine), state)
    if recipe.evaluate_every and done % recipe.evaluate_every == 0 and done < last:
        loss = validate(session)
        if loss is not None:
            session.reporter.on_validation(done, loss)


def validate(session: Session) -> float | None:
    """Mean loss on the held-out text, nats per token; None where nothing is held out."""
    if session.validation is None:
        return None
    engine, run = session.engine, session.run
    executor = engine.forward_executor(run.micro_batches, run.layout.mb, engine.executor_seq)
    losses = [
        evaluate(engine, executor, session.validation.batch(i, engine.positions()))
        for i in range(run.recipe.evaluate_batches)
    ]
    return statistics.fmean(losses)


def _write_timeline(session: Session) -> None:
    """Put the spans of all ranks together, on one clock that starts at the first."""
    recorder, mesh = session.engine.recorder, session.engine.mesh
    mine = list(recorder.spans)
    recorder.spans.clear()
    recorder.keeps_spans = False
    everyone: list[list[Span]] = [[] for _ in range(mesh.world.size)]
    if mesh.world.size > 1:
        dist.all_gather_object(everyone, mine)
    else:
        everyone = [mine]
    spans = [span for spans in everyone for span in spans]
    zero = min((span.start for span in spans), default=0.0)
    shifted = tuple(s._replace(start=s.start - zero, end=s.end - zero) for s in spans)
    if session.directory:
        session.directory.write_timeline(Timeline("measured", shifted))


def _finish(session: Session, first: int, done: int, *, interrupted: bool) -> Summary:
    """Validate, write a sample, wait for the last checkpoint; what the session came to."""
    run, meter, engine = session.run, session.meter, session.engine
    total = sum(meter.seconds)
    split = time_split(engine, total, engine.recorder.seconds.get("data", 0.0))
    validation = None if interrupted else validate(session)
    if validation is not None:
        session.reporter.on_validation(done, validation)
    sample = "" if interrupted else _sample(session)
    if session.saver:
        session.saver.wait()
    rate = meter.tokens_per_second if meter.seconds else 0.0
    mfu, hfu = meter.utilization(rate)
    few = max(1, min(5, len(meter.losses) // 4))
    return Summary(
        name=session.directory.name if session.directory else "",
        directory=str(session.directory.path) if session.directory else "",
        layout=str(run.layout),
        parameters=run.model.params(),
        first_step=first,
        last_step=done,
        steps=run.recipe.last_step,
        interrupted=interrupted,
        first_loss=statistics.fmean(meter.losses[:1] or [math.nan]),
        last_loss=statistics.fmean(meter.losses[-few:] or [math.nan]),
        losses=tuple(meter.losses),
        validation_loss=validation,
        bytes_per_token=session.corpus.bytes_per_token,
        tokens=len(meter.losses) * run.recipe.tokens_per_step,
        seconds=total,
        tokens_per_second=rate,
        flops_per_second=rate * meter.flops_per_token,
        mfu=mfu,
        hfu=hfu,
        convention=meter.convention,
        time_split=split,
        peak_bytes=meter.memory,
        checkpoints=_kept(session),
        sample=sample,
        proof=session.proof,
        next_steps=_next_steps(session, interrupted=interrupted),
    )


def _kept(session: Session) -> tuple[str, ...]:
    if session.directory is None or not session.directory.checkpoints.exists():
        return ()
    return tuple(sorted(str(path) for path in session.directory.checkpoints.glob("step-*")))


def _sample(session: Session) -> str:
    """A little text, where tokens are bytes."""
    count = session.run.recipe.sample_tokens
    if session.corpus.bytes_per_token != 1.0 or not count:
        return ""
    prompt = b"def "
    tokens = generate(session.engine, list(prompt), count)
    return (prompt + bytes(t for t in tokens if 0 < t < 256)).decode(errors="replace")


def _next_steps(session: Session, *, interrupted: bool) -> tuple[tuple[str, str], ...]:
    """Commands that do what they say as they stand, with this run's own model and layout."""
    if not session.directory:
        return ()
    run, directory = session.run, session.directory
    home, file = shlex.quote(str(directory.path)), shlex.quote(str(directory.run_file))
    steps = []
    if interrupted:
        steps.append((f"phalanx train --resume {home}", "go on where this stopped"))
    # stale gradients differ from one device by design, and bf16 weights alone have no fp64
    if not is_asynchronous(run.layout) and run.recipe.master_weights == "fp32":
        prove = f"phalanx train {file} --prove 1 --set recipe.stop_at=1"
        steps.append((prove, "prove this layout equal to one device"))
    if not interrupted:
        steps.append((f"phalanx train {file} --data FOLDER", "learn your own text"))
    return tuple(steps)
