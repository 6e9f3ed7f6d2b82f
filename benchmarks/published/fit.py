"""Fits what accelerators reach to the published runs of `runs_fit.csv`, and to nothing else.

    python benchmarks/published/fit.py             fit, print, write the catalog's rates
    python benchmarks/published/fit.py --dry-run   fit and print

Every constant has a prior: a middle from the literature and a width in natural logarithms. The fit
is Gauss and Newton's on ln(predicted / published) plus the priors, in which a row that is far off
counts for less (Student's t), and a row counts for less the more there are like it (of one program,
model, device and format: n rows weigh n^(1/2)). What the rows of an accelerator cannot say stays at
its prior, or is borrowed from the accelerator whose rows can.

Then every row is predicted without the rows of its source, and without those of its kind, by one
step of the same from the fit: that is what the intervals are made of.
"""

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog import evidence as evidence_file
from phalanx.catalog import sustained as rates_files
from phalanx.catalog.evidence import Evidence
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.sustained import Sustained
from phalanx.planner.estimate import Priced
from phalanx.planner.published.cells import Row, UnusableError
from phalanx.planner.published.rows import PublishedRun, read_rows, read_run
from phalanx.planner.published.runs import baseline, chosen
from phalanx.planner.uncertainty import bits

Vector = NDArray[np.float64]

ROWS = Path(__file__).parent / "runs_fit.csv"
NOISE = 0.07  # of a row, in natural logarithms, against which priors are weighed
TAIL = 2.0  # noises beyond which a row counts for less
MOST_MOVE = 0.4  # of a constant in one round
ENOUGH = 0.01
DIFFERENCE = 0.03  # for derivatives
FEW = 6  # rows for which the spread over all rows stands in for that of a kind
HOLDS = 1.28  # standard deviations within which 80 % lie
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
        gpus: values of the column `gpu`; of those behind the first a pace of their own is fitted.
        files: catalog names by the file that they share; in the order of `gpus` where these differ.
        cores: streaming multiprocessors that share the tiles.
        priors: of what is fitted.
        fixed: what is known from elsewhere.
        borrowed: names that are taken from the set fitted first.
        paces: whether each of the gpus has a pace and a file of its own.
    """

    gpus: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    cores: int
    priors: dict[str, Prior]
    fixed: dict[str, float]
    borrowed: tuple[str, ...] = ()
    paces: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """What is fitted: constants, and the paces of the gpus behind the first."""
        return (*self.priors, *(self.gpus[1:] if self.paces else ()))

    def prior(self, key: str) -> Prior:
        """Of a constant or of a pace."""
        return self.priors.get(key, PACE)

    def file_of(self, gpu: str) -> str:
        """The file with the rates of a gpu."""
        names = list(self.files)
        return names[self.gpus.index(gpu)] if self.paces else names[0]


# product: cuBLAS reaches 0.75 to 0.85 of the peak of A100 and 0.65 to 0.75 of H100's, whose clock
#   falls under full load; in few bits it falls more, and scales cost time.
# depth: filling and draining a tile takes a time, so it grows with the peak of one core: about
#   1e-10 s x peak / cores.
# memory: 0.75 to 0.9 in stream benchmarks. domain: busbw of nccl-tests over the data sheet, 230/300
#   on A100 and 370/450 on H100. network: 0.7 to 0.9 of the NIC;
#   on hosts with 8 links of 400 Gb/s nccl-tests show 340 to 380 of 400 GB/s.
# interference: NCCL takes 10 to 20 % of the cores. launch: a few microseconds in CUDA, tens of
#   them for an operator of an eager framework with its autograd. gap: 2 to 5 us from the end of a
#   kernel to the first result of the next, in a stream or in a graph.
# jitter: 0.2 to 0.8 % per doubling, the slope of weak scaling in published tables.
# attention, from benchmarks of kernels, forward and backward, causal, 2k to 16k tokens:
#   A100 180/312, FlashAttention-2 (arXiv:2307.08691), figure 4; H100 between FlashAttention-2's 320
#   and FlashAttention-3's 550 of 989 (arXiv:2407.08608), figures 5 and 6.
# pace: parts of one generation differ by their limits of power.
PACE = Prior(1.0, 0.08)
COMMON = {
    "memory": Prior(0.80, 0.15),
    "domain": Prior(0.75, 0.10),
    "network": Prior(0.80, 0.15),
    "interference": Prior(0.15, 0.6),
    "launch": Prior(40 * MICRO, 0.4),
    "gap": Prior(3 * MICRO, 0.5),
    "product": Prior(0.70, 0.12),
}
FEW_BITS = {"product_fp8": Prior(0.60, 0.2)}
PARTS = {
    "a100": Part(
        gpus=("A100",),
        files={"a100": ("a100-sxm-80gb", "a100-sxm-40gb", "a100-pcie-80gb")},
        cores=108,
        priors={
            **COMMON,
            "product": Prior(0.80, 0.12),
            "depth": Prior(300, 0.4),
            "attention_first": Prior(0.25, 0.5),
            "jitter": Prior(0.004, 0.5),
        },
        fixed={"attention": 0.58},
    ),
    "h100": Part(
        gpus=("H100", "H200", "H800"),
        files={"h100": ("h100-sxm", "h100-sxm-96gb", "h100-pcie", "h200-sxm", "h800-sxm")},
        cores=132,
        priors={
            **COMMON,
            **FEW_BITS,
            "depth": Prior(750, 0.5),
            "attention": Prior(0.45, 0.2),
            "attention_first": Prior(0.25, 0.5),
        },
        fixed={"assumed_peak": 912e12},
        borrowed=("jitter",),
    ),
    "b200": Part(
        gpus=("B200", "B300", "GB200", "GB300"),
        files={
            "b200": ("b200",),
            "b300": ("b300",),
            "gb200": ("gb200-nvl72",),
            "gb300": ("gb300-nvl72",),
        },
        cores=148,
        priors={
            **COMMON,
            **FEW_BITS,
            "product_fp4": Prior(0.45, 0.3),
            "depth": Prior(1500, 0.5),
            "attention": Prior(0.40, 0.25),
        },
        fixed={},
        borrowed=("jitter", "attention_first"),
        paces=True,
    ),
}
MOST_SHARE = 0.98  # of a peak
PACED = ("product", "product_fp8", "product_fp4", "attention")
ASSUMED_SPREAD = 0.25  # for parts that no row used


@dataclass(frozen=True)
class Item:
    """One row that can be fitted: the run, and its layout with its workload."""

    row: Row
    run: PublishedRun
    priced: Priced

    @property
    def source(self) -> Hashable:
        """Rows that came from one hand: a program, a model."""
        return self.row.get("program", ""), self.row.get("model", "")

    @property
    def alike(self) -> Hashable:
        """Rows that say nearly the same."""
        return (*self.source, self.row["gpu"], self.row["dtype"], self.run.one_layer)  # type: ignore[misc]  # a tuple

    @property
    def kind(self) -> tuple[int, bool, str]:
        """Bits, mixture, program."""
        workload = self.priced.workload
        return (
            bits(self.priced.layout.precision),
            workload.shape.is_moe,
            workload.framework.name,
        )


@dataclass(frozen=True)
class Fit:
    """What one family came to.

    Attributes:
        part: the family.
        items: its rows.
        base: the set that the fitted constants replace.
        point: their logarithms.
        left: ln(predicted / published) of every row.
        slopes: how it changes with the constants, of shape (rows, constants).
        weights: of the rows.
    """

    part: Part
    items: list[Item]
    base: Sustained
    point: Vector
    left: Vector
    slopes: Vector
    weights: Vector

    def rates(self, gpu: str) -> Sustained:
        """The fitted set of a gpu."""
        return _rates(self.part, self.base, self.point, gpu)

    def without(self, group: Callable[[Item], Hashable]) -> Vector:
        """What is left of every row if the rows of its group are not fitted, to first order."""
        result = self.left.copy()
        widths = np.array([self.part.prior(key).width for key in self.part.keys])
        all_of = self._bend(slice(None)) + np.diag(widths**-2.0)
        groups = [group(item) for item in self.items]
        for name in set(groups):
            rows = np.array([each == name for each in groups])
            bend = all_of - self._bend(rows)
            pull = self.slopes[rows].T @ (self.weights[rows] * self.left[rows]) / NOISE**2
            result[rows] += self.slopes[rows] @ np.linalg.solve(bend, pull)
        return result

    def _bend(self, rows: Any) -> Vector:
        slopes = self.slopes[rows]
        bend: Vector = (slopes.T * self.weights[rows]) @ slopes / NOISE**2
        return bend


def main() -> int:
    """Fit every part, print what came out, write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--rounds", type=int, default=6, help="of the search (default 6)")
    parser.add_argument("--again", action="store_true", help="start from what the catalog has")
    args = parser.parse_args()
    fits: dict[str, Fit] = {}
    sets: dict[str, Sustained] = {}
    for name, part in PARTS.items():
        lender = list(sets.values())[-1] if sets else None
        fits[name] = fit(name, part, lender, args.rounds, again=args.again)
        for gpu in part.gpus:
            sets.setdefault(part.file_of(gpu), report(fits[name], part.file_of(gpu), gpu))
    shown_evidence = kinds_of(fits)
    if not args.dry_run:
        for part in PARTS.values():
            for file, accelerators in part.files.items():
                write(file, sets[file], accelerators)
        write("assumed", assumed(sets), ())
        evidence_file.PATH.write_text(shown_evidence, encoding="utf-8")
    return 0


def fit(name: str, part: Part, lender: Sustained | None, rounds: int, *, again: bool) -> Fit:
    """Fit one family to its rows, from the middles of the priors or from what the catalog has."""
    items, base = read_items(part.gpus), starting_point(name, part, lender)
    counts = Counter(item.alike for item in items)
    whole = np.array([counts[item.alike] ** -0.5 for item in items])
    middle = np.log([part.prior(key).middle for key in part.keys])
    widths = np.array([part.prior(key).width for key in part.keys])
    point = last_time(part) if again else middle
    for _ in range(rounds):
        left = residuals(part, items, base, point)
        steps = [point + DIFFERENCE * row for row in np.eye(len(point))]
        slopes = np.stack([residuals(part, items, base, at) - left for at in steps], axis=1)
        slopes = slopes / DIFFERENCE
        weights = whole / (1 + (left / (TAIL * NOISE)) ** 2)
        bend = (slopes.T * weights) @ slopes / NOISE**2 + np.diag(widths**-2.0)
        pull = -slopes.T @ (weights * left) / NOISE**2 - (point - middle) / widths**2
        move = np.clip(np.linalg.solve(bend, pull), -MOST_MOVE, MOST_MOVE)
        point = point + move
        if np.max(np.abs(move)) < ENOUGH:
            break
    left = residuals(part, items, base, point)
    weights = whole / (1 + (left / (TAIL * NOISE)) ** 2)
    return Fit(part, items, base, point, left, slopes, weights)


def last_time(part: Part) -> Vector:
    """Logarithms of the constants and paces in the catalog."""
    sets = {gpu: rates_files.sustained(part.files[part.file_of(gpu)][0]) for gpu in part.gpus}
    first = sets[part.gpus[0]]
    values = [getattr(first, key) for key in part.priors]
    paces = [sets[key].product / first.product for key in part.keys[len(values) :]]
    found: Vector = np.log([*values, *paces])
    return found


def starting_point(name: str, part: Part, lender: Sustained | None) -> Sustained:
    """The set before the fit: middles of priors, fixed and borrowed values."""
    values: dict[str, Any] = {key: prior.middle for key, prior in part.priors.items()}
    lent = {key: getattr(lender, key) for key in part.borrowed} if lender else {}
    source = "fitted on runs_fit.csv"
    if lender and part.borrowed:
        source += f"; {', '.join(part.borrowed)} from {lender.name}"
    values = {**values, **part.fixed, **lent}
    fixed = {"utilization": 0.5, "spread": 0.0, "rows": 0}
    return Sustained(name=name, cores=part.cores, source=source, **fixed, **values)


def read_items(gpus: Sequence[str]) -> list[Item]:
    """The rows of one family that have a time; what they leave open is as in a prediction."""
    items = []
    for row in read_rows(ROWS):
        if row["gpu"] in gpus:
            try:
                run = read_run(row)
                if run.step_seconds:
                    items.append(Item(row, run, chosen(run)))
            except (UnusableError, RefusedError, UsageError):
                continue
    return items


def _rates(part: Part, base: Sustained, point: Vector, gpu: str) -> Sustained:
    values = dict(zip(part.keys, np.exp(point).tolist(), strict=True))
    pace = values.get(gpu, 1.0)
    found = replace(base, **{key: values[key] for key in part.priors})
    return replace(found, **{key: min(pace * getattr(found, key), MOST_SHARE) for key in PACED})


def residuals(part: Part, items: list[Item], base: Sustained, point: Vector) -> Vector:
    """ln(predicted / published) of every row."""
    sets = {gpu: _rates(part, base, point, gpu) for gpu in part.gpus}
    found = []
    for item in items:
        workload = replace(item.priced.workload, assumed=sets[item.row["gpu"]])
        priced = Priced(workload, item.priced.layout)
        predicted = priced.block_seconds() if item.run.one_layer else priced.step_seconds()
        found.append(math.log(predicted / (item.run.step_seconds or predicted)))
    return np.array(found)


def report(found: Fit, name: str, gpu: str) -> Sustained:
    """Print the fit of one set; return it with its spread and the baseline beside it."""
    here = [found.part.file_of(item.row["gpu"]) == name for item in found.items]
    rates, left = found.rates(gpu), found.left[np.array(here)]
    without = found.without(lambda item: item.source)[np.array(here)]
    items = [item for item, is_here in zip(found.items, here, strict=True) if is_here]
    used = [
        baseline(
            replace(item.priced.workload, assumed=replace(rates, utilization=1.0)),
            item.priced.layout,
        )
        / (item.run.step_seconds or 1.0)
        for item in items
        if not item.run.one_layer
    ]
    rates = replace(
        rates,
        name=name,
        utilization=statistics.median(used),
        spread=spread_of(without),
        rows=len(items),
    )
    print(f"{name}: {len(items)} rows")
    for key, value in shown(rates).items():
        print(f"  {key:16} {value}")
    for what, misses in (("fitted", left), ("each without its source", without)):
        sizes = np.abs(np.expm1(misses))
        print(
            f"  {what:24} median {np.median(sizes):.1%}, p90 {np.quantile(sizes, 0.9):.1%}, "
            f"mean {np.mean(sizes):.1%}"
        )
    constant = np.abs(np.log(np.array(used) / rates.utilization))
    print(f"  constant utilisation {rates.utilization:.1%}: mean {np.mean(constant):.1%}")
    return rates


def spread_of(left: Vector) -> float:
    """The standard deviation whose 80 % interval holds 80 % of these."""
    return float(np.quantile(np.abs(left), 0.8)) / HOLDS if len(left) else 0.0


def kinds_of(fits: dict[str, Fit]) -> str:
    """What the fit has seen and how far off it was, as the file that says so."""
    seen: dict[tuple[str, int, bool, str], list[float]] = defaultdict(list)
    without_kind, closed, opened, most = list[float](), list[float](), list[float](), 0
    for found in fits.values():
        by_source = found.without(lambda item: item.source)
        by_kind = found.without(lambda item: item.kind)
        for item, left, alone in zip(found.items, by_source, by_kind, strict=True):
            file = found.part.file_of(item.row["gpu"])
            seen[(file, *item.kind)].append(float(left))
            without_kind.append(float(alone))
            (closed if item.run.complete else opened).append(float(left))
            most = max(most, item.priced.layout.ranks)
    everything = spread_of(np.array([left for each in seen.values() for left in each]))
    unseen = spread_of(np.array(without_kind))
    more = math.sqrt(max(spread_of(np.array(opened)) ** 2 - everything**2, 0.0))
    lines = [
        "# Which kinds of published runs were fitted; written by benchmarks/published/fit.py",
        f"all = {everything:.3g}",
        f"unseen = {unseen:.3g}",
        f"open = {more:.3g}",
        f"most_devices = {most}",
    ]
    for (file, size, mixture, program), left_of in sorted(seen.items()):
        n, own = len(left_of), spread_of(np.array(left_of))
        spread = math.sqrt((n * own**2 + FEW * everything**2) / (n + FEW))
        kind = Evidence(file, size, mixture, program, n, float(f"{spread:.3g}"))
        lines += ["", "[[kind]]", *(f"{key} = {_toml(v)}" for key, v in vars(kind).items())]
    print("\n".join(lines[1:5]))
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"' * isinstance(value, str) or str(value)
    )


def assumed(sets: dict[str, Sustained]) -> Sustained:
    """For a part that no row used: the geometric mean of the parts that were fitted."""
    first = sets["a100"]
    keys = (
        *("product", "attention", "attention_first", "memory", "launch", "gap", "domain"),
        *("network", "interference", "jitter", "utilization"),
    )
    means: dict[str, Any] = {
        k: statistics.geometric_mean(getattr(r, k) for r in sets.values()) for k in keys
    }
    few = [rates for rates in sets.values() if rates.product_fp8]
    means["product_fp8"] = statistics.geometric_mean(rates.product_fp8 for rates in few)
    return replace(
        first,
        name="assumed",
        cores=1,
        depth=sets["h100"].depth,
        spread=ASSUMED_SPREAD,
        rows=0,
        source="geometric mean of the fitted parts; no run of this part was used",
        **means,
    )


def shown(rates: Sustained) -> dict[str, float | int | str]:
    """The values of a file, rounded to what they are worth."""
    names = (
        *("product", "product_fp8", "product_fp4", "depth", "attention", "attention_first"),
        *("memory", "domain", "network", "interference", "jitter", "utilization", "spread"),
    )
    values = {key: float(f"{getattr(rates, key):.3g}") for key in names if getattr(rates, key)}
    times = {f"{key}_us": float(f"{getattr(rates, key) / MICRO:.3g}") for key in ("launch", "gap")}
    peak = {"assumed_peak_tflops": rates.assumed_peak / 1e12} if rates.assumed_peak else {}
    return {"cores": rates.cores, **values, **times, **peak, "rows": rates.rows}


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


if __name__ == "__main__":
    sys.exit(main())
