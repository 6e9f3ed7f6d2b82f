"""Everything that one rank of a running training needs, opened in order."""

import secrets
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from phalanx.core.errors import PhalanxError
from phalanx.core.run import Run
from phalanx.data.batches import HeldOutStream, SampleStream
from phalanx.data.corpus import Corpus
from phalanx.schedules.layouts import layers_of_stages
from phalanx.trainer.checkpoint import Saver
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.guard.corruption import CorruptionWatch
from phalanx.trainer.guard.repeat import PassRepeat
from phalanx.trainer.guard.stragglers import StragglerWatch
from phalanx.trainer.model.init import notes_on_weights
from phalanx.trainer.parallel.mesh import Mesh, build_mesh
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.run.cores import num_cores
from phalanx.trainer.run.events import EventLog
from phalanx.trainer.run.heartbeat import Heartbeat
from phalanx.trainer.run.limits import refuse_untrainable
from phalanx.trainer.run.meter import Meter, find_peak, from_rank_0
from phalanx.trainer.run.metrics_file import MetricsFile
from phalanx.trainer.run.report import Reporter, RunInfo, Silent
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.saves import Saves
from phalanx.trainer.run.shared import AT_HAND, PATIENCE, require_shared
from phalanx.trainer.run.shares import StepShares
from phalanx.trainer.run.state import own_pieces
from phalanx.trainer.run.text import open_text
from phalanx.trainer.run.worker import Worker
from phalanx.trainer.track.tracking import Tracked


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
        events: written and shown by rank 0; the others tell nobody.
        meter: of this session.
        watch: for silent corruption.
        repeat: does passes twice.
        stragglers: compares this rank with the others.
        fence: the number of this start, on rank 0; a later one may not write before it has ended.
        proof: for the summary.
        saves: what became of the saver's work; None where nothing is written.
        metrics: where each step is written; None where there is no directory.
        shares: where the time of this rank's steps goes.
        went_back: why it went back to a checkpoint, each reason once.
        rolled_back: after which steps it went back before a spike.
        slow: what was told of stragglers.
    """

    run: Run
    worker: Worker
    engine: Engine
    training: SampleStream
    validation: HeldOutStream | None
    corpus: Corpus
    saver: Saver | None
    directory: RunDirectory | None
    reporter: Reporter
    events: EventLog
    meter: Meter
    watch: CorruptionWatch
    repeat: PassRepeat
    stragglers: StragglerWatch
    fence: int = 0
    proof: str = ""
    saves: Saves | None = None
    metrics: MetricsFile | None = None
    shares: StepShares = field(default_factory=StepShares)
    went_back: set[str] = field(default_factory=set)
    rolled_back: list[int] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)


def open_session(
    worker: Worker, run: Run, directory: RunDirectory | None, reporter: Reporter
) -> Session:
    """Join the ranks into a mesh, open the corpus, build the model.

    Args:
        worker: this process, joined with the others.
        run: what to train, and how; its precision is resolved for the device.
        directory: where to write; None writes nothing.
        reporter: watches; used on rank 0.

    Raises:
        PhalanxError: the layout needs another number of ranks, the run cannot be trained here, its
            text or its weights cannot be read, or its folder cannot be written; with one line that
            says what to change.
    """
    layout = run.layout
    if layout.ranks != worker.ranks:
        raise PhalanxError(f"{layout} needs {layout.ranks} ranks, and there are {worker.ranks}")
    precision = Dtypes.named(layout.precision, worker.device)
    run = replace(run, layout=replace(layout, precision=precision.precision))
    refuse_untrainable(run)
    mesh = build_mesh(run.layout, worker.device, kv_heads=run.model.kv_heads)
    text = open_text(run)
    engine = build_engine(run, mesh)
    _listen_to(worker.heart, engine)
    main = worker.rank == 0
    reporter = reporter if main else Silent()
    events = _events(directory if main else None, reporter)
    if main and directory and run.track.trackers:
        reporter = Tracked(reporter, run, directory.path, events.note)
    saver = _saver(directory, run, mesh, events, worker) if directory else None
    if saver:
        saver.prepare(own_pieces(engine))
    session = Session(
        run=run,
        worker=worker,
        engine=engine,
        training=text.training,
        validation=text.held_out,
        corpus=text.corpus,
        saver=saver,
        directory=directory if main else None,
        reporter=reporter,
        events=events,
        meter=Meter(run, find_peak(mesh, run.layout.precision), heart=worker.heart),
        watch=CorruptionWatch(engine),
        repeat=PassRepeat(engine),
        stragglers=StragglerWatch(mesh, off=_times_say_nothing(worker)),
        saves=Saves(saver, events) if saver else None,
        metrics=MetricsFile(directory.metrics_file, events.note) if directory and main else None,
    )
    if run.weights:
        _tell_of_weights(session)
    return session


def _listen_to(heart: Heartbeat, engine: Engine) -> None:
    """Have every action and every wait of a rank heard by whoever watches it."""
    engine.recorder.doing, engine.recorder.arrived = heart.doing, heart.arrived
    engine.mesh.ledger.waits = heart.waits


def _times_say_nothing(worker: Worker) -> bool:
    """Whether times say nothing of a rank: on shared cores, or where the host runs ahead."""
    return worker.device.type != "cpu" or worker.local_ranks > num_cores()


def _events(directory: RunDirectory | None, reporter: Reporter) -> EventLog:
    return EventLog(directory.events_file if directory else None, reporter.on_event)


def _saver(
    directory: RunDirectory, run: Run, mesh: Mesh, events: EventLog, worker: Worker
) -> Saver:
    attempt = str(from_rank_0(secrets.token_hex(8), mesh))
    patience = AT_HAND if worker.local_ranks == worker.ranks else PATIENCE
    require_shared(directory.checkpoints, attempt, mesh, patience)
    return Saver(
        directory.checkpoints,
        run.layout.rank_at(mesh.at),
        mesh.world.size,
        keep=run.recipe.keep,
        keep_every=run.recipe.keep_every,
        attempt=attempt,
        on_event=partial(events.tell, "save"),
        finite=True,
    )


def _tell_of_weights(session: Session) -> None:
    """Say what is odd about the weights that training starts from: every rank calls it."""
    mesh, folder = session.engine.mesh, session.run.weights
    if session.worker.rank == 0:
        for note in notes_on_weights(folder):
            session.events.note(note)
    mine: dict[str, int] = {}
    for piece in own_pieces(session.engine):
        if piece.field == "weight" and (bad := int((~torch.isfinite(piece.data)).sum())):
            mine[piece.name] = mine.get(piece.name, 0) + bad
    everyone = [mine] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(everyone, mine)
    totals: dict[str, int] = {}
    for found in everyone:
        for name, count in found.items():
            totals[name] = totals.get(name, 0) + count
    for name, count in sorted(totals.items()):
        session.events.note(
            f"{folder}: {count:,} values of {name} are nan or infinite; training goes on with "
            "them, and only what is so besides fails a save"
        )
    if session.saver:
        session.saver.known = {f"weight of {name}": count for name, count in mine.items()}


def describe_session(session: Session, first: int) -> RunInfo:
    """What is known before the first step.

    Args:
        session: of this rank.
        first: the step that comes first, from 0.
    """
    run, worker, directory = session.run, session.worker, session.directory
    kind = "GPU" if worker.device.type == "cuda" else f"CPU x {torch.get_num_threads()} threads"
    return RunInfo(
        name=directory.name if directory else "",
        directory=str(directory.path) if directory else "",
        model=run.model,
        weights=run.weights,
        layout=run.layout,
        precision=session.engine.arithmetic.description or str(run.layout.precision),
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
        attempt=worker.attempt,
    )
