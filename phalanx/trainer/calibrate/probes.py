"""Steps of the real trainer on small models: what kernels that are timed alone do not show.

Every rank takes them by itself, all at the same moment, so that nothing is waited for.
"""

import statistics
import time
from functools import partial
from typing import NamedTuple

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.synthetic import SyntheticStream
from phalanx.trainer.calibrate.bench import Bench, Sample, Sampled
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh

_FEWEST, _WARM = 5, 2


class Probe(NamedTuple):
    """A small run.

    Attributes:
        layers, hidden, heads, ffn, vocab: of its model.
        seq, batch, mb: tokens of a sequence, sequences of a step and of a micro-batch.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    mb: int

    def run(self, precision: str) -> Run:
        """The run of one rank.

        Args:
            precision: of its layout.
        """
        shape = ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            ffn=self.ffn,
            vocab=self.vocab,
        )
        layout = Layout.parse(f"mb={self.mb} zero=0 precision={precision}")
        return Run(model=shape, layout=layout, recipe=Recipe(seq=self.seq, batch=self.batch))


PROBES = (
    Probe(2, 32, 2, 64, 64, 16, 4, 1),  # next to no arithmetic: what starting kernels costs
    Probe(6, 32, 2, 64, 64, 16, 2, 1),
    Probe(2, 64, 2, 192, 256, 128, 8, 2),
    Probe(2, 128, 4, 384, 1024, 256, 4, 2),
    Probe(3, 192, 6, 512, 512, 128, 8, 4),
    Probe(2, 256, 4, 704, 2048, 256, 4, 1),
    Probe(2, 256, 4, 704, 512, 512, 4, 2),
    Probe(2, 384, 6, 1024, 1024, 256, 4, 4),
)
QUICK_PROBES = (PROBES[0], PROBES[1], PROBES[2], PROBES[3])


class ProbeTime(NamedTuple):
    """Seconds of one step.

    Attributes:
        probe: what was run.
        step: all of it.
        compute: share of it in forwards and backwards.
        update: share of it in the norm and the optimizer.
    """

    probe: Probe
    step: Sampled
    compute: float
    update: float


def time_probe(bench: Bench, probe: Probe, precision: str) -> ProbeTime:
    """Take steps of a probe for as long as the bench says.

    Args:
        bench: where.
        probe: what to run.
        precision: of its layout.
    """
    run = probe.run(precision)
    engine = build_engine(run, build_mesh(run.layout, bench.mesh.device))
    stream = SyntheticStream(probe.vocab, probe.seq, probe.batch, run.recipe.seed)
    batch = stream.batch(0, engine.positions())
    recorder, taken = engine.recorder, list[tuple[Sample, float, float]]()
    bench.fence()
    begun, step = time.perf_counter(), 0
    while step < _WARM + _FEWEST or time.perf_counter() - begun < bench.seconds:
        recorder.clear()
        sample = bench.time(partial(train_step, engine, step, batch))
        spent = recorder.seconds
        if step >= _WARM:
            taken.append((sample, spent.get("compute", 0.0), spent.get("optimizer", 0.0)))
        step += 1
    bench.fence()
    total = bench.agreed([sample for sample, _, _ in taken])
    shares = [
        statistics.median(spent[i] / spent[0].wall for spent in taken)  # type: ignore[operator]
        for i in (1, 2)
    ]
    return ProbeTime(probe, total, *(bench.mean((share,) * 3).median for share in shares))
