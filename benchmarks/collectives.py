"""How long gloo's own collectives take, and how long ours take for the same bytes.

    python benchmarks/collectives.py [--ranks 2] [--json]

Both run in turn on the same processes; the figure is the median of the repeats.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from phalanx.oracle.pool import RankPool
from phalanx.trainer.parallel.comm import DirectGroup, Group
from phalanx.trainer.parallel.ledger import Ledger

SIZES = (1 << 14, 1 << 19, 1 << 22)
REPEATS = 15


def measure(ranks: int) -> list[dict[str, float | str]]:
    """On every rank: microseconds of each collective, for each size in bytes, by both ways."""
    everyone = range(ranks)
    groups = [kind("world", everyone, dist.group.WORLD, Ledger()) for kind in (Group, DirectGroup)]
    rows: list[dict[str, float | str]] = []
    for size in SIZES:
        x, part = torch.randn(size // 4), torch.empty(size // 4 // ranks)
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            native, direct = ([], [])
            for _ in range(REPEATS):
                for group, times in zip(groups, (native, direct), strict=True):
                    times.append(_time(_call(group, name, x, part)))
            a, b = statistics.median(native), statistics.median(direct)
            row = {"collective": name, "bytes": size, "gloo_us": a, "direct_us": b, "ratio": a / b}
            rows.append(row)
    return rows


def _call(group: Group, name: str, x: torch.Tensor, part: torch.Tensor) -> Callable[[], None]:
    match name:
        case "all_reduce":
            return lambda: group.all_reduce(x, "benchmark").wait()
        case "all_gather":
            return lambda: group.all_gather(x, part, "benchmark").wait()
        case _:
            return lambda: group.reduce_scatter(part, x, "benchmark").wait()


def _time(call: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    """Print one line for each collective and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with RankPool(args.ranks) as pool:
        rows = pool.run(args.ranks, measure, args.ranks)[0]
    if args.json:
        print(json.dumps({"schema": 1, "ranks": args.ranks, "rows": rows}))
        return
    print(f"{args.ranks} ranks; microseconds, median of {REPEATS}")
    for row in rows:
        print(
            "{collective:15} {bytes:>9,} B  gloo {gloo_us:>8,.0f}  direct {direct_us:>8,.0f}  "
            "gloo/direct {ratio:.2f}".format(**row)
        )


if __name__ == "__main__":
    main()
