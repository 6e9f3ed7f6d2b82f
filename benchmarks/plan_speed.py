"""How many layouts are priced in a second, and what a whole search costs, start-up included.

    python benchmarks/plan_speed.py [--peer PYTHON] [--json]

`--peer` is the interpreter of an environment of its own with llm-analysis installed
(`pip install llm-analysis`); it prices GPT-3 175B on the same devices in the same run. All
figures are CPU seconds of one core, so that a busy machine counts little; still, repeat them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.planner.estimate import estimate
from phalanx.planner.sweep import Request, Sweep

WHOLE = (
    ("llama-3.1-405b", "h100x16384", "16M", "8192"),
    ("gpt-3-175b", "a100x4096", "3.2M", "2048"),
    ("llama-3.1-405b", "h100x1048576", "16M", "8192"),
    ("deepseek-v3", "h800x2048", "63M", "4096"),
)
SAMPLE = 200  # layouts that are priced one at a time

PEER = """
import json, logging, sys, time
logging.disable(logging.WARNING)
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import (
    ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name,
)
model = ModelConfig(name="gpt3", num_layers=96, n_head=96, hidden_dim=12288, vocab_size=50257,
                    max_seq_len=2048)
gpu, dtype = get_gpu_config_by_name("a100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
layouts = [(d, p, t) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16, 32) if (d := 4096 // p // t)
           and 1536 % d == 0]
start, count = time.process_time(), 0
while time.process_time() - start < 3:
    for d, p, t in layouts:
        cut = ParallelismConfig(tp_size=t, pp_size=p, dp_size=d, sp_size=t)
        analysis = LLMAnalysis(model, gpu, dtype, cut, flops_efficiency=0.5)
        analysis.training(batch_size_per_gpu=1, global_batch_size=1536, seq_len=2048,
                          total_num_tokens=300e9, ds_zero=DSZeRO(1),
                          activation_recomputation=ActivationRecomputation(1))
        count += 1
print(json.dumps([count, time.process_time() - start]))
"""


class Rate(NamedTuple):
    """How fast layouts were priced."""

    what: str
    layouts: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Layouts per CPU second."""
        return self.layouts / self.seconds


class Whole(NamedTuple):
    """One `phalanx plan` as a process of its own."""

    words: str
    seconds: float
    megabytes: float
    considered: int
    feasible: int


def whole(model: str, cluster: str, tokens: str, seq: str) -> Whole:
    """Run one search from the command line, and read what the system says it used."""
    program = (
        "import re, resource, sys; from phalanx.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        # ru_maxrss would count what this program held when it forked
        "most = re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(used.ru_utime + used.ru_stime, int(most) / 1000, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    words = [model, cluster, "--tokens", tokens, "--seq", seq]
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", *words, "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, megabytes = map(float, done.stderr.split())
    found = json.loads(done.stdout)
    counts = found["candidates"], found["feasible"]
    return Whole(f"plan {' '.join(words)}", seconds, megabytes, *counts)


def rates() -> list[Rate]:
    """Layouts of GPT-3 175B on 4,096 A100s, by column and one at a time."""
    shape, cluster = load.model("gpt-3-175b"), load.cluster("a100x4096")
    request = Request(shape=shape, cluster=cluster, seq=2048, batch=1536)
    start = time.process_time()
    sweep = Sweep(request)
    blocks = list(sweep.priced())
    spent = time.process_time() - start
    priced = sum(int(block.fits.sum()) for block in blocks)
    layouts = _sample(sweep, blocks)
    start = time.process_time()
    for layout in layouts:
        estimate(shape, cluster, layout, 2048, 1536)
    alone = time.process_time() - start
    return [
        Rate("phalanx, by column: looked at", sweep.considered, spent),
        Rate("phalanx, by column: priced", priced, spent),
        Rate("phalanx, estimate: one at a time, itemised", len(layouts), alone),
    ]


def _sample(sweep: Sweep, blocks: list[Any]) -> list[Layout]:
    draw = np.random.default_rng(0)
    layouts = []
    while len(layouts) < SAMPLE:
        block = blocks[draw.integers(len(blocks))]
        rows, shards = np.nonzero(block.fits)
        place = draw.integers(len(rows))
        size, zero = int(block.group.shards[0, shards[place]]), int(block.group.zero[0, 0])
        layouts.append(sweep.where.layout(block.rows, int(rows[place]), zero, size))
    return layouts


def peer(python: str) -> Rate:
    """llm-analysis in its own environment."""
    done = subprocess.run([python, "-c", PEER], capture_output=True, text=True, check=True)
    count, seconds = json.loads(done.stdout.splitlines()[-1])
    return Rate("llm-analysis, training(): one at a time", count, seconds)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="a Python with llm-analysis")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    found = rates() + ([peer(args.peer)] if args.peer else [])
    searches = [whole(*words) for words in WHOLE]
    if args.json:
        rows = [{**rate._asdict(), "per_second": rate.per_second} for rate in found]
        print(json.dumps({"rates": rows, "searches": [s._asdict() for s in searches]}, indent=2))
        return
    for rate in found:
        print(f"{rate.what:45} {rate.layouts:>10,} in {rate.seconds:6.2f} s: ", end="")
        print(f"{rate.per_second:>12,.0f} layouts/s")
    for one in searches:
        print(f"{one.words:62} {one.seconds:5.2f} CPU s {one.megabytes:5.0f} MB  ", end="")
        print(f"{one.considered:>11,} looked at, {one.feasible:>10,} fit")


if __name__ == "__main__":
    main()
