"""A training run on one rank, from the first batch to the summary."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from phalanx.core.errors import PhalanxError
from phalanx.core.run import Run
from phalanx.core.timeline import Span, Timeline
from phalanx.data.batches import Batch
from phalanx.data.prefetch import Prefetcher
from phalanx.trainer import faults
from phalanx.trainer.engine.balance import ExpertLoad
from phalanx.trainer.engine.step import StepResult, train_step
from phalanx.trainer.guard.corruption import Suspicion
from phalanx.trainer.run.continuity import Resume, identity
from phalanx.trainer.run.go_back import Back, go_back, is_spoiled, look, suspected
from phalanx.trainer.run.heartbeat import COMPILE_SECONDS, DATA_SECONDS, LEAST_SECONDS, SLOW_SECONDS
from phalanx.trainer.run.kernels import profiled
from phalanx.trainer.run.meter import Agreed, agree
from phalanx.trainer.run.outcome import finish
from phalanx.trainer.run.report import Reporter, StepMetrics, Summary
from phalanx.trainer.run.resume import take_up
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.saves import SaveReport, Saves
from phalanx.trainer.run.session import Session, describe_session, open_session
from phalanx.trainer.run.slow import heed_stragglers
from phalanx.trainer.run.spike import heed_spike
from phalanx.trainer.run.state import named_tensors, own_pieces, progress
from phalanx.trainer.run.validation import validate
from phalanx.trainer.run.worker import Worker

INTERRUPTED = 75
_TRACED = range(2, 5)  # steps of a session that the timeline shows: warm, and early
_MOST_SKIPPED = 10


def train(
    worker: Worker,
    run: Run,
    directory: RunDirectory | None,
    reporter: Reporter,
    resume: Resume | None = None,
    proof: str = "",
) -> int:
    """Train; every rank of the run calls it.

    Args:
        worker: this process, joined with the others.
        run: what to train, and how.
        directory: where to write; None writes nothing.
        reporter: watches; used on rank 0.
        resume: what to go on from; None starts anew.
        proof: how the first steps compared with one device, for the summary.

    Returns:
        0, or 75 if it was asked to stop and saved.

    Raises:
        PhalanxError: with one line that says what to change.
    """
    faults.point("start")
    session = replace(open_session(worker, run, directory, reporter), proof=proof)
    if worker.attempt:
        _tell_restart(session)
        resume = (resume or Resume(""))._replace(restarted=True)
    first = take_up(session, resume) if resume else 0
    session = _begin_writing(session, run)
    session.reporter.on_start(describe_session(session, first))
    session.events.write("start", f"step {first} of {run.recipe.last_step}", step=first)
    if session.directory:
        session.meter.earlier, session.meter.began = session.directory.goodput(), time.time()
    done, interrupted = _steps(session, first, run.recipe.last_step)
    worker.heart.phase("end", SLOW_SECONDS)
    summary = finish(session, first, done, interrupted=interrupted)
    if session.directory and (done > first or not session.directory.summary_file.exists()):
        session.directory.write_summary(summary)
    if session.directory and not interrupted:
        session.directory.write_done(done)
    session.reporter.on_end(summary)
    _tell_end(session, summary)
    return INTERRUPTED if interrupted else 0


def _begin_writing(session: Session, run: Run) -> Session:
    """Take the folder over; not before, since a resume that is refused leaves it as it was."""
    directory = session.directory
    if directory is None:
        return session
    fence = directory.take_over()
    directory.write_run(run)
    directory.forget_done()
    return replace(session, fence=fence)


def _tell_restart(session: Session) -> None:
    """Our own launcher has told already; torchrun tells nobody."""
    worker = session.worker
    if worker.job is not None:
        text = f"torchrun has started the ranks again: restart {worker.attempt}"
        session.events.tell("restart", text, restart=worker.attempt)


def _tell_end(session: Session, summary: Summary) -> None:
    how = "asked to stop" if summary.interrupted else "done"
    text = f"{how} after step {summary.last_step} of {summary.steps}"
    session.events.write("stop", text, step=summary.last_step)


class StepsTaken(NamedTuple):
    """Some steps in a row.

    Attributes:
        done: steps, in all.
        stopped: asked to, before the last one.
        back: why the run has to go back; None where it has not.
    """

    done: int
    stopped: bool = False
    back: Back | None = None


def _steps(session: Session, first: int, last: int) -> tuple[int, bool]:
    """Take the steps from `first` to `last`; how many are done, and whether asked to stop."""
    session.engine.mesh.ledger.clear()
    session.meter.first_step = first
    while True:
        taken = _take_steps(session, first, last)
        if taken.back is None:
            return taken.done, taken.stopped
        session.worker.heart.phase("going back", SLOW_SECONDS)
        first = go_back(session, taken.back, taken.done)


def _take_steps(session: Session, first: int, last: int) -> StepsTaken:
    """Take steps until the last, until asked to stop, or until the run has to go back."""
    engine, meter, ledger = session.engine, session.meter, session.engine.mesh.ledger
    skipped_in_a_row, shares, heart = 0, session.shares, session.worker.heart
    kernels = profiled(session, first)
    least = COMPILE_SECONDS if session.run.layout.compile else LEAST_SECONDS
    with Prefetcher(session.training, engine.positions(), first, last) as batches:
        start = shares.begin(engine, meter)
        for step, batch in batches:
            engine.recorder.keeps_spans = step - first in _TRACED
            rate = engine.optimizer.learning_rate
            heart.step(step, meter.recent_step_seconds, least)
            session.stragglers.begin()
            if kernels:
                kernels.before(step)
            faults.point("step.before", step=step, tensors=partial(named_tensors, engine))
            back = look(session, step) if session.watch.is_due(step) else None
            if back is not None:
                return StepsTaken(step, back=back)
            session.watch.begin_step(step)
            result = _take_step(session, step, batch)
            if isinstance(result, Suspicion):
                return StepsTaken(step, back=suspected(result, step))
            if kernels:
                kernels.after(step)
            faults.point("step.after", step=step)
            # before ranks agree whether to stop: one whose data does not come can still say so
            heart.phase("data", DATA_SECONDS)
            ahead = batches.await_next(lambda: session.worker.stop.requested)
            heart.phase("train")
            slow = heed_stragglers(session, step + 1, ahead)
            agreed = _agree(session, result.load, batches.seconds_waited + ahead)
            agreed = agreed._replace(stop=agreed.stop or slow)
            metrics = meter.measure(step, result, time.perf_counter() - start, agreed, rate)
            shares.end(engine, meter, metrics.seconds)
            hopeless = result.skipped and not engine.loss_scale.can_fall
            skipped_in_a_row = skipped_in_a_row + 1 if hopeless else 0
            with meter.apart("reports", ledger):
                _report(session, metrics, traced=step - first == _TRACED[-1] or step == last - 1)
                if shares.is_due(step - first, ends=agreed.stop or step == last - 1):
                    shares.write(_ranks_file(session), engine, meter, step + 1)
            faults.point("step.told", step=step)
            back = heed_spike(session, step + 1, result)
            if back is not None:
                return StepsTaken(step + 1, back=back)
            if skipped_in_a_row >= _MOST_SKIPPED:
                return _lost(session, step + 1, metrics.loss)
            found = _between_steps(session, step + 1, last, agreed)
            if found is not None:
                return found
            start = shares.begin(engine, meter)
    return StepsTaken(last)


def _take_step(session: Session, step: int, batch: Batch) -> StepResult | Suspicion:
    """One step; now and then with its passes done twice."""
    if session.repeat.is_due(step):
        return session.repeat.step(step, batch, session.training.batch)
    return train_step(session.engine, step, batch)


def _agree(session: Session, load: ExpertLoad, waited: float) -> Agreed:
    session.meter.data_wait += waited
    stop = session.worker.stop.requested
    known = session.saves.report() if session.saves else SaveReport()
    return agree(session.engine.mesh, load, stop=stop, data_wait=waited, saves=known)


def _report(session: Session, metrics: StepMetrics, *, traced: bool) -> None:
    """Write and tell what a step measured."""
    if session.directory and session.metrics:
        session.directory.require_own(session.fence)
        session.metrics.add(metrics)
    session.reporter.on_step(metrics)
    if traced and session.engine.recorder.spans:
        _write_timeline(session)


def _ranks_file(session: Session) -> Path | None:
    return session.directory.ranks_file if session.directory else None


def _lost(session: Session, done: int, loss: float) -> StepsTaken:
    """Many steps in a row were not finite: go back if the weights are not either, else give up."""
    if session.saver and is_spoiled(session):
        return StepsTaken(done, back=Back(f"the weights are nan or infinite after step {done}"))
    raise PhalanxError(
        f"{_MOST_SKIPPED} steps in a row were not finite (loss {loss}); resume from the last "
        "checkpoint with a smaller recipe.learning_rate, or a smaller recipe.clip"
    )


def _between_steps(session: Session, done: int, last: int, agreed: Agreed) -> StepsTaken | None:
    """Heed a save that has failed; save and validate when it is time.

    Returns:
        None to go on; else what was taken, with a checkpoint of this step, or to go back.
    """
    recipe, stop = session.run.recipe, agreed.stop
    if session.saves and session.saves.heed(agreed.saves, done) == "spoiled":
        return StepsTaken(done, back=_spoiled(session.saves))
    ends, saves = stop or done == last, recipe.saves_at(done)
    back = (
        look(session, done) if session.saver and session.watch.every and (ends or saves) else None
    )
    if back is not None:
        return StepsTaken(done, back=back)
    if session.watch.is_due(done):
        session.watch.remember()
    if ends:
        return _end_steps(session, done, stopped=done < last)
    if saves:
        _save(session, done)
    if not recipe.evaluate_every or done % recipe.evaluate_every:
        return None
    if not validate(session, done):
        return None
    return _end_steps(session, done, stopped=True, saved=saves)


def _end_steps(session: Session, done: int, *, stopped: bool, saved: bool = False) -> StepsTaken:
    """Save, and see that it is saved: nothing comes after this that could try again."""
    while session.saves:
        if not saved:
            _save(session, done)
        match session.saves.wait(session.engine.mesh, done):
            case "":
                break
            case "spoiled":
                return StepsTaken(done, back=_spoiled(session.saves))
        saved = False
    return StepsTaken(done, stopped)


def _spoiled(saves: Saves) -> Back:
    return Back(f"the state of step {saves.failed_step} is nan or infinite, and is not saved")


def _save(session: Session, done: int) -> None:
    if session.saver:
        engine = session.engine
        faults.point("save.begin", step=done)
        with session.meter.apart("checkpoints", engine.mesh.ledger):
            if session.directory:
                session.directory.require_own(session.fence)
            kept = identity(session.run, session.corpus) | {"fence": session.fence}
            kept["skips"] = session.training.skips.to_json()
            state = progress(engine, done, kept)
            session.saver.save(done, own_pieces(engine), state)
            session.meter.saves += 1
        faults.point("save.copied", step=done)


def _write_timeline(session: Session) -> None:
    """Put the spans of all ranks together, on one clock that starts at the first."""
    recorder, mesh = session.engine.recorder, session.engine.mesh
    recorder.collect(all_of_it=True)
    mine = list(recorder.spans)
    recorder.spans.clear()
    recorder.keeps_spans = False
    everyone: list[list[Span]] = [mine] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(everyone, mine)
    spans = [span for spans in everyone for span in spans]
    zero = min((span.start for span in spans), default=0.0)
    shifted = tuple(s._replace(start=s.start - zero, end=s.end - zero) for s in spans)
    if session.directory and session.metrics:
        write = session.directory.write_timeline
        session.metrics.amend(partial(write, Timeline("measured", shifted)))
