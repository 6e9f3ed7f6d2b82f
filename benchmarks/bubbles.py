"""The bubble of a pipeline: measured, beside the bubble that the planner simulates.

With real compute on two ranks, and with paced actions (a rank sleeps for as long as an action is
said to take) on four and eight, through the trainer's own executor and wire. The simulation plays
the same schedule with the measured seconds of each kind of action on each stage, and with those
of a message between two ranks that have nothing else to do. On a machine
that is not quiet actions of one kind differ, and waits add up the worst of them: "replayed" plays
every action with its own seconds, so what is left over is the executor's and the wire's.

Bars: at pp=2 the measured bubble is within 10 % of the simulated one, with paced actions within
5 %; there ZB-H1 and ZB-V are below 1F1B.

python benchmarks/bubbles.py [--pp 4 8] [--ms 30] [--real]
"""

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass

import torch
from measure import describe
from ours import stream_of
from rich.console import Console
from rich.table import Table

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.core.timeline import Span, Timeline
from phalanx.oracle.pool import RankPool
from phalanx.planner.simulate import idle_within, occupancy, simulate
from phalanx.schedules.build import lowered
from phalanx.schedules.layouts import chunks
from phalanx.schedules.messages import only_computing
from phalanx.schedules.text import parse_action
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.paced import paced_stage
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.step import forward_backward, update
from phalanx.trainer.engine.update import UpdateRule
from phalanx.trainer.engine.wire import Form, Wire
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.parallel.comm import DirectGroup, Group
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh

Rounds = list[list[Span]]  # of one rank, round by round
PACED = ("1f1b", "interleaved v=2", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev")
REAL = ("gpipe", "1f1b", "interleaved v=2", "zb-h1", "zb-v", "dualpipe")
KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "I", Kind.WEIGHT_GRAD: "W"}


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        name: of the schedule.
        p: pipeline ranks.
        m: micro-batches.
        seconds: of all forwards and backwards of a step.
        measured: bubble over ideal time.
        simulated: the same, with the measured seconds of the actions.
        replayed: the same, with each action's own seconds.
        off: how far the measured is from the simulated, as a share of that.
        left: how far it is from the replayed.
        idle: the most that a rank idled between its first and last action, over ideal time.
    """

    name: str
    p: int
    m: int
    seconds: float
    measured: float
    simulated: float
    replayed: float
    off: float
    left: float
    idle: float


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, nargs="*", default=[4, 8], help="ranks of paced runs")
    parser.add_argument("--ms", type=float, default=30.0, help="of F, of I and of W")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each schedule")
    parser.add_argument("--real", action="store_true", help="also real compute on two ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    with RankPool(max([2, *args.pp])) as pool:
        for p in args.pp:
            title = f"paced, pp={p}, {2 * p} micro-batches, F = I = W = {args.ms:g} ms on a rank"
            tables[title] = [paced(pool, f"pp={p} schedule={name}", args) for name in PACED]
        if args.real:
            run = real_run("1f1b")
            title = f"real compute, pp=2, one thread each, {describe(run)}"
            tables[title] = [real(pool, name, args.rounds) for name in REAL]
    if args.json:
        rows = {title: [asdict(row) for row in rows] for title, rows in tables.items()}
        print(json.dumps({"schema": 1, "tables": rows}, indent=2))
        return
    for title, rows in tables.items():
        show(title, rows)


def paced(pool: RankPool, line: str, args: Namespace) -> Row:
    """Sleep through a schedule. Ranks with two stages share a rank's work between them."""
    layout = Layout.parse(line)
    m = 2 * layout.pp
    schedule = lowered(layout, m, reduce_every=False)
    seconds = args.ms / 1000 / chunks(layout)
    found = pool.run(layout.pp, sleep, schedule, seconds, args.rounds)
    hop = max(hop for _, hop in found)
    return compare(layout.schedule, schedule, [rounds for rounds, _ in found], hop)


def sleep(schedule: Schedule, seconds: float, rounds: int) -> tuple[Rounds, float]:
    """On every rank: its row, again and again; and the seconds of a message."""
    rank = torch.distributed.get_rank()
    group = DirectGroup("pipeline", range(schedule.p), torch.distributed.group.WORLD, Ledger())
    form = Form((8,), torch.float32, torch.device("cpu"))
    pace = dict.fromkeys((Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD), seconds)
    stages = {
        stage: paced_stage(stage, pace, form, ends=(stage + 1) % schedule.depth == 0)
        for stage in schedule.stages_of(rank)
    }
    recorder = Recorder(rank)
    executor = Executor(stages, Wire(group, schedule, form), recorder, UpdateRule())
    found = []
    for _ in range(rounds + 1):
        torch.distributed.barrier()
        recorder.clear()
        recorder.keeps_spans = True
        executor.run([_nothing()] * schedule.m, torch.ones(()))
        found.append(list(recorder.spans))
    return found[1:], hop_of(group, form)


def hop_of(group: Group, form: Form) -> float:
    """Half of a round trip between the first two ranks, the median of some; 0 on the others."""
    if group.index > 1:
        return 0.0
    x, trips = torch.zeros(form.shape, dtype=form.dtype), []
    for _ in range(31):
        start = time.perf_counter()
        for sender in (0, 1):
            if group.index == sender:
                group.send(x, 1 - sender, "hop").wait()
            else:
                group.receive(x, sender).wait()
        trips.append(time.perf_counter() - start)
    return statistics.median(trips) / 2


def _nothing() -> MicroBatch:
    none = torch.zeros((1, 1), dtype=torch.int64)
    return MicroBatch(
        tokens=none, targets=none, positions=none, documents=None, samples=none[0], seq=1, step=0
    )


def real_run(schedule: str) -> Run:
    """A small Llama whose actions take tens of milliseconds."""
    shape = ModelShape(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1408, vocab=512)
    recipe = Recipe(seq=256, batch=8, steps=1000, warmup=10)
    return Run(model=shape, layout=Layout.parse(f"pp=2 schedule={schedule}"), recipe=recipe)


def real(pool: RankPool, name: str, rounds: int) -> Row:
    """Train through a schedule."""
    run = real_run(name)
    schedule = lowered(run.layout, run.micro_batches, reduce_every=False)
    return compare(run.layout.schedule, schedule, pool.run(2, compute, run, rounds))


def compute(run: Run, rounds: int) -> Rounds:
    """On every rank: a few steps of training, the first not counted."""
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    stream, found = stream_of(run), []
    for step in range(rounds + 1):
        batch = stream.batch(step, engine.positions())
        torch.distributed.barrier()
        engine.recorder.clear()
        engine.recorder.keeps_spans = True
        loss = forward_backward(engine, step, batch)
        found.append(list(engine.recorder.spans))
        update(engine, loss)
    return found[1:]


def compare(name: str, schedule: Schedule, ranks: Sequence[Rounds], hop: float = 0.0) -> Row:
    """Simulate every round with its own seconds; the fastest is reported, least disturbed."""
    plain = only_computing(schedule)
    rows = []
    for spans in zip(*ranks, strict=True):
        computed = tuple(s for rank in spans for s in rank if s.category == "compute")
        measured = Timeline("measured", computed)
        simulated = simulate(plain, costs_of(plain, computed), hop)
        ours, theirs = occupancy(measured), occupancy(simulated)
        own = occupancy(replay(plain, computed, hop)).bubble_over_ideal
        rows.append(
            Row(
                name=name,
                p=schedule.p,
                m=schedule.m,
                seconds=ours.makespan,
                measured=ours.bubble_over_ideal,
                simulated=theirs.bubble_over_ideal,
                replayed=own,
                off=ours.bubble_over_ideal / theirs.bubble_over_ideal - 1,
                left=ours.bubble_over_ideal / own - 1,
                idle=max(idle_within(measured)) / ours.ideal,
            )
        )
    return min(rows, key=lambda row: row.seconds)


def replay(schedule: Schedule, spans: Sequence[Span], hop: float) -> Timeline:
    """Start every action as soon as it can, each lasting as long as it was measured to."""
    seconds = {parse_action(span.label): span.seconds for span in spans}
    done: dict[Action, float] = {}
    queues, free = [list(row) for row in schedule.rows], [0.0] * schedule.p
    played = []
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(needed in done for needed in needs(queue[0], schedule, seconds)):
                action = queue.pop(0)
                arrived = [
                    done[n] + (0.0 if schedule.ranks[n.stage] == rank else hop)
                    for n in needs(action, schedule, seconds)
                ]
                start = max([free[rank], *arrived])
                free[rank] = done[action] = start + seconds[action]
                played.append(Span(rank, str(action), "compute", start, free[rank]))
    return Timeline("planned", tuple(played))


def needs(action: Action, schedule: Schedule, known: Container[Action]) -> list[Action]:
    """What other stages have to have done before an action; its own rank's row does the rest."""
    place = action.stage % schedule.depth
    if action.kind is Kind.FORWARD:
        return [action._replace(stage=action.stage - 1)] if place else []
    if action.kind is Kind.WEIGHT_GRAD or place == schedule.depth - 1:
        return []
    behind = action._replace(stage=action.stage + 1)
    backwards = (behind._replace(kind=kind) for kind in (Kind.BACKWARD, Kind.INPUT_GRAD))
    return [backward for backward in backwards if backward in known]


def costs_of(schedule: Schedule, spans: Sequence[Span]) -> dict[Kind, tuple[float, ...]]:
    """Mean seconds of each kind of action on each stage."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for span in spans:
        action = parse_action(span.label)
        found.setdefault((action.kind, action.stage), []).append(span.seconds)
    return {
        kind: tuple(
            statistics.fmean(found.get((kind, stage), [0.0]))
            for stage in range(schedule.num_stages)
        )
        for kind in KINDS
    }


def show(title: str, rows: Sequence[Row]) -> None:
    """Print one table."""
    table = Table(title=title, title_justify="left")
    for column in ("", "s/step", "bubble", "simulated", "off", "replayed", "left", "idle inside"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.seconds:.3f}",
            f"{row.measured:.1%}",
            f"{row.simulated:.1%}",
            f"{row.off:+.1%}",
            f"{row.replayed:.1%}",
            f"{row.left:+.1%}",
            f"{row.idle:.1%}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
