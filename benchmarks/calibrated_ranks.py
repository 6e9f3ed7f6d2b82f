"""What each rank of `calibrated.py` does; a module of its own, since ranks import it."""

import json
import statistics
from functools import partial
from pathlib import Path

from phalanx.api.calibrations import calibrate_rank
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.synthetic import SyntheticStream
from phalanx.trainer.calibrate.bench import Bench, Sample
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.worker import Worker

SHAPE = ModelShape(layers=4, hidden=320, heads=5, ffn=896, vocab=1536)
SEQ, BATCH = 192, 8
LAYOUTS = (
    *("mb=1", "mb=2", "mb=8", "mb=4 recompute=full"),
    *("dp=2 mb=2", "dp=2 zero=3 mb=4", "tp=2 mb=4", "cp=2 mb=4"),
    *("pp=2 mb=1", "pp=2 mb=1 schedule=zb-h1"),
)


def run_of(line: str) -> Run:
    """The run of a layout.

    Args:
        line: of the layout, without a precision.
    """
    layout = Layout.parse(f"{line} precision=fp32")
    return Run(model=SHAPE, layout=layout, recipe=Recipe(seq=SEQ, batch=BATCH))


def lines_of(ranks: int) -> list[str]:
    """The layouts of so many ranks."""
    return [line for line in LAYOUTS if run_of(line).layout.ranks == ranks]


def measure_rank(worker: Worker, folder: Path, rounds: int, seconds: float) -> int:
    """Take steps of all layouts of so many ranks, in turns; rank 0 writes what came of them.

    Args:
        worker: this process, joined with the others.
        folder: for the results.
        rounds: how often each layout has its turn.
        seconds: of a turn.
    """
    bench = Bench(build_mesh(Layout(dp=worker.ranks), worker.device), seconds)
    engines, taken = {}, dict[str, list[Sample]]()
    for line in lines_of(worker.ranks):
        run = run_of(line)
        engine = build_engine(run, build_mesh(run.layout, worker.device))
        stream = SyntheticStream(SHAPE.vocab, SEQ, BATCH, run.recipe.seed)
        step = partial(train_step, engine, 0, stream.batch(0, engine.positions()))
        step()
        step()
        engines[line], taken[line] = step, []
    for turn in range(rounds):
        for line in engines if turn % 2 == 0 else reversed(engines):
            bench.fence()
            once = bench.agreed([bench.time(engines[line])], sends=True).median
            for _ in range(max(int(seconds / once), 3)):
                bench.fence()
                taken[line].append(bench.time(engines[line]))
    found = {}
    for line, samples in taken.items():
        sends = worker.ranks > 1
        share = statistics.mean(sample.disturbed for sample in samples)
        disturbed = bench.mean((share,) * 3).median
        found[line] = (bench.agreed(samples, sends=sends).median, disturbed)
    if worker.rank == 0:
        (folder / f"measured-{worker.ranks}.json").write_text(json.dumps(found))
    return 0


def calibrate_here(worker: Worker, path: Path, quick: bool) -> int:
    """Calibrate, and show nothing."""
    return calibrate_rank(worker, path, lambda _: None, quick=quick)
