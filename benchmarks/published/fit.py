"""Fits what accelerators reach to the published runs of `runs_fit.csv`, and to nothing else.

    python benchmarks/published/fit.py             fit, print, write phalanx/catalog/rates/*.toml
    python benchmarks/published/fit.py --dry-run   fit and print

Every constant has a prior: a middle from the literature and a width in natural logarithms. The fit
minimises the mean absolute ln(predicted / published), in which no row counts for more than CLIP and
a row counts for less the more there are like it (a step in fp16, a step under FSDP, one layer: the
weight of a group of n rows is n^(1/4)), plus the priors.
What the rows of an accelerator cannot say stays at its prior, or is
borrowed from the accelerator whose rows can.
"""

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog import sustained as rates_files
from phalanx.core.sustained import Sustained
from phalanx.planner.estimate import Priced
from phalanx.planner.published.rows import PublishedRun, read_rows, read_run
from phalanx.planner.published.runs import baseline
from phalanx.planner.workload import workload_of

Vector = NDArray[np.float64]

HERE = Path(__file__).parent
ROWS = HERE / "runs_fit.csv"
CLIP = 0.25
PRIOR_WEIGHT = 0.0015
MICRO = 1e-6


@dataclass(frozen=True)
class Prior:
    """Where a constant is expected: e^(ln middle +- width)."""

    middle: float
    width: float


@dataclass(frozen=True)
class Part:
    """One accelerator family: its rows, and what is known before them.

    Attributes:
        gpu: the value of the column `gpu`.
        accelerators: catalog names that share the set.
        cores: streaming multiprocessors that share the tiles.
        priors: of what is fitted.
        fixed: what is known from elsewhere.
        borrowed: names that are taken from the set fitted first.
    """

    gpu: str
    accelerators: tuple[str, ...]
    cores: int
    priors: dict[str, Prior]
    fixed: dict[str, float]
    borrowed: tuple[str, ...] = ()


# product: cuBLAS reaches 0.75 to 0.85 of the peak of A100 and 0.65 to 0.75 of H100's, whose clock
#   falls under full load.
# depth: filling and draining a tile takes a time, so it grows with the peak of one core: about
#   1e-10 s x peak / cores.
# memory: 0.75 to 0.9 in stream benchmarks. domain: busbw of nccl-tests over the data sheet, 230/300
#   on A100 and 370/450 on H100. network: 0.7 to 0.9 of the NIC;
#   on hosts with 8 links of 400 Gb/s nccl-tests show 340 to 380 of 400 GB/s.
# interference: NCCL takes 10 to 20 % of the cores. launch: a few microseconds in CUDA, tens of them
#   for an operator of an eager framework with its autograd.
# jitter: 0.2 to 0.8 % per doubling, the slope of weak scaling in published tables.
# attention, from benchmarks of kernels, forward and backward, causal, 2k to 16k tokens:
#   A100 180/312, FlashAttention-2 (arXiv:2307.08691), figure 4; H100 between FlashAttention-2's 320
#   and FlashAttention-3's 550 of 989 (arXiv:2407.08608), figures 5 and 6.
COMMON = {
    "memory": Prior(0.80, 0.15),
    "domain": Prior(0.75, 0.08),
    "interference": Prior(0.15, 0.6),
    "launch": Prior(40 * MICRO, 0.5),
    "attention_first": Prior(0.25, 0.5),
}
PARTS = {
    "a100": Part(
        gpu="A100",
        accelerators=("a100-sxm-80gb", "a100-sxm-40gb", "a100-pcie-80gb"),
        cores=108,
        priors={
            **COMMON,
            "product": Prior(0.80, 0.12),
            "depth": Prior(300, 0.4),
            "network": Prior(0.75, 0.15),
            "jitter": Prior(0.004, 0.5),
        },
        fixed={"attention": 0.58},
    ),
    "h100": Part(
        gpu="H100",
        accelerators=("h100-sxm", "h100-sxm-96gb", "h100-pcie", "h200-sxm", "h800-sxm"),
        cores=132,
        priors={**COMMON, "product": Prior(0.70, 0.12), "depth": Prior(750, 0.4)},
        fixed={"attention": 0.42, "assumed_peak": 912e12, "network": 0.85},
        borrowed=("jitter",),
    ),
    "b200": Part(
        gpu="B200",
        accelerators=("b200", "b300", "gb200-nvl72", "gb300-nvl72"),
        cores=148,
        priors={
            "memory": Prior(0.75, 0.15),
            "domain": Prior(0.70, 0.15),
            "launch": Prior(40 * MICRO, 0.3),
            "product": Prior(0.70, 0.12),
            "depth": Prior(1500, 0.4),
        },
        fixed={"attention": 0.42, "network": 0.85},
        borrowed=("jitter", "interference", "attention_first"),
    ),
}
ASSUMED_SPREAD = 0.25  # for parts that no row used


@dataclass(frozen=True)
class Item:
    """One row that can be fitted: the run, its layout with its workload, and its weight."""

    run: PublishedRun
    priced: Priced
    weight: float


def _with(priced: Priced, rates: Sustained) -> Priced:
    """The same layout on devices that reach so much."""
    return Priced(replace(priced.workload, assumed=rates), priced.layout)


def main() -> int:
    """Fit every part, print what came out, write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--only", choices=tuple(PARTS), help="fit one part")
    parser.add_argument("--rounds", type=int, default=250, help="of the search (default 250)")
    args = parser.parse_args()
    fitted: dict[str, Sustained] = {}
    for name, part in PARTS.items():
        if args.only not in (None, name):
            fitted[name] = rates_files.sustained(part.accelerators[0])
            continue
        lender = next(iter(fitted.values()), None)
        fitted[name] = fit(name, part, lender, args.rounds)
    if not args.dry_run:
        for name, rates in fitted.items():
            write(name, rates, PARTS[name].accelerators)
        write("assumed", assumed(fitted), ())
    return 0


def fit(name: str, part: Part, lender: Sustained | None, rounds: int) -> Sustained:
    """Fit one part to its rows."""
    items = read_items(part.gpu)
    keys = list(part.priors)
    start = np.log([part.priors[key].middle for key in keys])
    base = starting_point(name, part, lender)

    def loss(point: Vector) -> float:
        rates = replace(base, **dict(zip(keys, np.exp(point).tolist(), strict=True)))
        misses = np.minimum(np.abs(residuals(items, rates)), CLIP)
        weights = np.array([item.weight for item in items])
        strain = math.fsum(
            ((value - math.log(part.priors[key].middle)) / part.priors[key].width) ** 2
            for key, value in zip(keys, point.tolist(), strict=True)
        )
        return float(np.average(misses, weights=weights)) + PRIOR_WEIGHT * strain

    best = nelder_mead(loss, start, rounds)
    rates = replace(base, **dict(zip(keys, np.exp(best).tolist(), strict=True)))
    return report(items, rates, fitted=len(keys))


def starting_point(name: str, part: Part, lender: Sustained | None) -> Sustained:
    """The set before the fit: middles of priors, fixed and borrowed values."""
    values: dict[str, Any] = {key: prior.middle for key, prior in part.priors.items()}
    lent = {key: getattr(lender, key) for key in part.borrowed} if lender else {}
    source = "fitted on runs_fit.csv"
    if lender and part.borrowed:
        source += f"; {', '.join(part.borrowed)} from {lender.name}"
    values = {**values, **part.fixed, **lent}
    return Sustained(
        name=name,
        cores=part.cores,
        utilization=0.5,
        spread=0.0,
        rows=0,
        source=source,
        **values,
    )


def read_items(gpu: str) -> list[Item]:
    """The rows of one accelerator whose layout is complete; a group of n weighs n^(1/4)."""
    runs = [read_run(row) for row in read_rows(ROWS) if row["gpu"] == gpu]
    usable = [run for run in runs if run.step_seconds and len(run.layouts) == 1]
    counts = Counter((run.practice.name, run.one_layer) for run in usable)
    return [
        Item(
            run,
            Priced(
                *workload_of(
                    run.shape, run.cluster, run.layouts[0], run.seq, run.batch, run.framework
                )
            ),
            counts[run.practice.name, run.one_layer] ** -0.75,
        )
        for run in usable
    ]


def residuals(items: list[Item], rates: Sustained) -> Vector:
    """ln(predicted / published) of every row."""
    found = []
    for item in items:
        priced = _with(item.priced, rates)
        predicted = priced.block_seconds() if item.run.one_layer else priced.step_seconds()
        found.append(math.log(predicted / (item.run.step_seconds or predicted)))
    return np.array(found)


def report(items: list[Item], rates: Sustained, fitted: int) -> Sustained:
    """Print the fit; return the set with its spread and the baseline beside it.

    The spread is the residual standard error: every fitted constant takes a degree of freedom.
    """
    left = residuals(items, rates)
    free = max(len(items) - fitted, 1)
    used = [
        baseline(_with(item.priced, replace(rates, utilization=1.0)).workload, item.priced.layout)
        / (item.run.step_seconds or 1.0)
        for item in items
        if not item.run.one_layer
    ]
    rates = replace(
        rates,
        utilization=statistics.median(used),
        spread=float(np.sqrt(np.sum(left**2) / free)),
        rows=len(items),
    )
    print(f"{rates.name}: {len(items)} rows")
    for key, value in shown(rates).items():
        print(f"  {key:16} {value}")
    for group in sorted({item.weight for item in items}):
        part = np.abs([e for e, item in zip(left, items, strict=True) if item.weight == group])
        print(
            f"  group of {len(part):3}: mean {np.mean(part):.1%}, median {np.median(part):.1%}, "
            f"worst {np.max(part):.1%}"
        )
    constant = np.abs(np.log(np.array(used) / rates.utilization))
    print(f"  constant utilisation {rates.utilization:.1%}: mean {np.mean(constant):.1%}")
    return rates


def assumed(fitted: dict[str, Sustained]) -> Sustained:
    """For a part that no row used: the geometric mean of the parts that were fitted."""
    first = fitted["a100"]
    keys = (
        "product",
        "attention",
        "attention_first",
        "memory",
        "launch",
        "domain",
        "network",
        "interference",
        "jitter",
        "utilization",
    )
    means: dict[str, Any] = {
        k: statistics.geometric_mean(getattr(r, k) for r in fitted.values()) for k in keys
    }
    return replace(
        first,
        name="assumed",
        cores=1,
        depth=fitted["h100"].depth,
        spread=ASSUMED_SPREAD,
        rows=0,
        source="geometric mean of the fitted parts; no run of this part was used",
        **means,
    )


def shown(rates: Sustained) -> dict[str, float | int | str]:
    """The values of a file, rounded to what they are worth."""
    values = {
        key: float(f"{getattr(rates, key):.3g}")
        for key in (
            "product",
            "depth",
            "attention",
            "attention_first",
            "memory",
            "domain",
            "network",
            "interference",
            "jitter",
            "utilization",
            "spread",
        )
    }
    launch = {"launch_us": float(f"{rates.launch / MICRO:.3g}")}
    peak = {"assumed_peak_tflops": rates.assumed_peak / 1e12} if rates.assumed_peak else {}
    return {"cores": rates.cores, **values, **launch, **peak, "rows": rates.rows}


def write(name: str, rates: Sustained, accelerators: tuple[str, ...]) -> None:
    """Write one file of the catalog."""
    names = ", ".join(f'"{accelerator}"' for accelerator in accelerators)
    lines = [
        f"# What training reaches on {name}; written by benchmarks/published/fit.py",
        f"accelerators = [{names}]",
        *(f"{key} = {value}" for key, value in shown(rates).items()),
        f'source = "{rates.source}"',
    ]
    path = rates_files.ROOT / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {path.name}", file=sys.stderr)


def nelder_mead(
    loss: Callable[[Vector], float], start: Vector, rounds: int, step: float = 0.12
) -> Vector:
    """The point of least loss that a simplex finds from `start` (Nelder and Mead 1965)."""
    points = [start, *(start + step * row for row in np.eye(len(start)))]
    losses = [loss(point) for point in points]
    for _ in range(rounds):
        order = np.argsort(losses)
        points, losses = [points[i] for i in order], [losses[i] for i in order]
        if losses[-1] - losses[0] < 1e-6:
            break
        middle = np.mean(points[:-1], axis=0)
        point, value = _move(loss, middle, points[-1], (losses[0], losses[-2], losses[-1]))
        if value < losses[-1]:
            points[-1], losses[-1] = point, value
        else:
            points = [points[0], *((points[0] + p) / 2 for p in points[1:])]
            losses = [losses[0], *(loss(p) for p in points[1:])]
    return points[int(np.argmin(losses))]


def _move(
    loss: Callable[[Vector], float],
    middle: Vector,
    worst: Vector,
    losses: tuple[float, float, float],
) -> tuple[Vector, float]:
    """Reflect the worst point; go on if that was good, turn back half-way if it was bad."""
    best, second_worst, last = losses
    reflected = 2 * middle - worst
    value = loss(reflected)
    if value < best:
        further = 3 * middle - 2 * worst
        beyond = loss(further)
        return (further, beyond) if beyond < value else (reflected, value)
    if value < second_worst:
        return reflected, value
    inner = (middle + worst) / 2
    within = loss(inner)
    return (inner, within) if within < min(value, last) else (reflected, value)


if __name__ == "__main__":
    sys.exit(main())
