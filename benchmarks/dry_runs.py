"""What rehearsing one rank costs: seconds, memory, and whether it is flat in the number of ranks.

    python benchmarks/dry_runs.py [--json]

Seconds are CPU seconds of one process, start-up included, so that a busy machine counts little.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

LLAMA = ("llama-3.1-405b", "h100x16384", "8192", "16Mi", 5000)
DEEPSEEK = ("deepseek-v3", "h800x2048", "4096", "60Mi", 1000)
JOBS = {
    "Llama-3.1-405B on 16,384": (*LLAMA, "tp=8 pp=16 zero=1 schedule=interleaved v=2"),
    "DeepSeek-V3 on 2,048": (*DEEPSEEK, "pp=16 ep=64 schedule=dualpipev recompute=selective"),
}
FLAT = (16, 1024, 65536, 1048576)  # devices; the work of a rank stays the same


class Cost(NamedTuple):
    """What a rehearsal cost.

    Attributes:
        seconds: CPU seconds.
        bytes: of the process at its largest.
        passed: whether it sent and held what was planned.
        peak_error: the planned peak over the one held, less 1.
    """

    seconds: float
    bytes: int
    passed: bool
    peak_error: float


def cost_of(model: str, cluster: str, seq: str, tokens: str, rank: int, layout: str) -> Cost:
    """Rehearse in a process of its own."""
    words = [model, cluster, "--layout", layout, "--seq", seq, "--tokens", tokens]
    code = (
        "import resource, sys\nfrom phalanx.cli.main import main\n"
        f"main({['dryrun', *words, '--rank', str(rank), '--json']!r})\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, file=sys.stderr)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    case = json.loads(done.stdout)["cases"][0]
    seconds, size = done.stderr.splitlines()[-1].split()
    error = case["planned_peak_bytes"] / case["peak_bytes"] - 1
    return Cost(float(seconds), int(size), case["passed"], error)


def flat() -> dict[str, Cost]:
    """The same work per rank on more and more devices."""
    return {
        f"Llama-3.1-8B on {count:,}": cost_of(
            "llama-3.1-8b", f"h100x{count}", "4096", str(4096 * count // 2), 0, "tp=4 pp=4"
        )
        for count in FLAT
    }


def main() -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {name: cost_of(*job) for name, job in JOBS.items()} | flat()
    if args.json:
        document: dict[str, Any] = {name: cost._asdict() for name, cost in found.items()}
        print(json.dumps(document, indent=2))
        return
    for name, cost in found.items():
        verdict = "as planned" if cost.passed else "not as planned"
        print(
            f"{name:30} {cost.seconds:6.1f} s  {cost.bytes / 1e9:5.2f} GB  {verdict}, "
            f"peak {cost.peak_error:+.1%}"
        )


if __name__ == "__main__":
    main()
