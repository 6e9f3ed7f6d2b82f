"""The tables of a cluster file, from what was measured on one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from phalanx.calibration.least_squares import Fit, fit
from phalanx.catalog.hardware import read_cluster
from phalanx.core.cluster import Cluster
from phalanx.core.estimate import Term
from phalanx.planner.estimate import Priced
from phalanx.planner.workload import workload_of
from phalanx.trainer.calibrate.bench import Sampled
from phalanx.trainer.calibrate.kernels import ProductTime
from phalanx.trainer.calibrate.measure import Measured
from phalanx.trainer.calibrate.messages import MessageTime
from phalanx.trainer.calibrate.probes import Probe

Tables = dict[str, Any]

_CERTAIN = 1.0  # weight of what kernels alone have shown, in probes
_UNIT_LAUNCH = 1e-6
_LEAST_SPREAD = 0.03  # of one machine on two days
_FUSED = 3.5  # products of fused attention forward and backward, over those of forward
_LOCAL = 1e-5, 5e9  # latency and bytes/s of what is nowhere measured: one rank sends nothing

# Terms of an estimate by what their seconds are proportional to.
_PARTS = {
    "product": ("matrix products",),
    "attention": ("attention",),
    "memory": ("passes over memory", "adding gradients up"),
    "launch": ("waiting for kernel launches",),
}


def tables_of(measured: Measured) -> Tables:
    """The cluster as a file describes it.

    Args:
        measured: on it.
    """
    lines = {key: _line(rows) for key, rows in _by_collective(measured.messages)}
    base = _base(measured, lines)
    probed = _probed(measured, base)
    rates = base["sustained"]
    rates |= probed.rates
    rates["spread"] = round(max(probed.spread, _LEAST_SPREAD), 4)
    base["measured"] = _measured(measured, probed)
    return base


class Probed(NamedTuple):
    """What steps of small models have shown.

    Attributes:
        rates: keys of [sustained].
        spread: of ln(measured / fitted).
        rows: measured and fitted seconds of every probe.
    """

    rates: Tables
    spread: float
    rows: tuple[tuple[Probe, float, float], ...]


def _base(measured: Measured, lines: Mapping[tuple[str, int], Fit]) -> Tables:
    """All but what only steps can show."""
    format_ = measured.precision
    reached, depth = _products([p for p in measured.products if p.format == format_])
    peaks = {f: _best(measured, f) for f in dict.fromkeys(p.format for p in measured.products)}
    peaks[format_] = max(peaks[format_], reached)
    latency, rate = _link(measured, lines)
    attention = _geometric(
        _FUSED * each.forward_flops / each.seconds.median for each in measured.attentions
    )
    link = {"gb_per_s": _short(rate / 1e9), "latency_us": _short(1e6 * latency)}
    host = measured.host or (0.0, measured.copies.median)
    share = _short(attention / peaks[format_])
    name = "gpu" if measured.is_gpu else "cpu"
    return {
        "name": name,
        "count": measured.ranks,
        "vendor": measured.device,
        "memory_gb": _short(measured.memory / 1e9),
        "hbm_gb_per_s": _short(measured.copies.median / 1e9),
        "per_host": measured.local_ranks,
        "precision": format_,
        "peak_tflops": {name: _short(peak / 1e12) for name, peak in peaks.items()},
        "domain": {
            "size": measured.local_ranks,
            "topology": "switch",
            "link": "measured",
            **link,
            "sustained_gb_per_s": link["gb_per_s"],
        },
        "network": {"link": "measured", **link, "sustained_gb_per_s": link["gb_per_s"]},
        "host": {
            "link": "measured",
            "gb_per_s": _short(host[1] / 1e9),
            "sustained_gb_per_s": _short(host[1] / 1e9),
            "latency_us": _short(1e6 * host[0]),
        },
        "sustained": {
            "cores": 1,
            "product": _short(reached / peaks[format_]),
            "depth": _short(depth),
            "attention": share,
            "attention_first": share,
            "memory": 1.0,
            "launch_us": _short(1e6 * measured.launch.median),
            "domain": 1.0,
            "network": 1.0,
            "interference": _short(measured.interference),
            "jitter": 0.0,
            "utilization": 0.4,
            "spread": _LEAST_SPREAD,
            "rows": len(measured.probes),
            "source": "measured by phalanx calibrate",
            "queued": measured.is_gpu,
        },
        "collectives": [_collective(*key, line) for key, line in lines.items()],
    }


def _best(measured: Measured, format_: str) -> float:
    """FLOP/s of the fastest product."""
    found = (p.flops / p.seconds.median for p in measured.products if p.format == format_)
    return max(found)


def _products(found: list[ProductTime]) -> tuple[float, float]:
    """FLOP/s of products of endless inner length, and the length at which half is reached.

    A projection is three products, whose inner lengths are K, N and M:
    seconds = 2 M N K / rate (3 + depth (1/K + 1/N + 1/M)).
    """
    sizes = np.array([(p.M, p.N, p.K) for p in found], dtype=np.float64)
    each = 2 * sizes.prod(axis=1)
    columns = np.stack([3 * each, each * (1 / sizes).sum(axis=1)], axis=1)
    seconds = np.array([p.seconds.median for p in found])
    wide, deep = fit(columns, seconds).factors
    if wide <= 0:
        best = max(p.flops / p.seconds.median for p in found)
        return best, 0.0
    return 1 / wide, deep / wide


def _by_collective(found: tuple[MessageTime, ...]) -> Iterator[tuple[Any, list[MessageTime]]]:
    for key, rows in groupby(found, key=lambda each: (each.name, each.ranks)):
        yield key, list(rows)


def _line(rows: list[MessageTime]) -> Fit:
    """Seconds as latency and seconds per byte."""
    sizes = np.array([row.bytes for row in rows], dtype=np.float64)
    seconds = np.array([row.seconds.median for row in rows])
    return fit(np.stack([np.ones_like(sizes), sizes], axis=1), seconds)


def _collective(name: str, ranks: int, line: Fit) -> Tables:
    per_byte = line.interval(1)
    slow, fast = (1e-9 / max(value, 1e-15) for value in (per_byte[1], per_byte[0]))
    return {
        "name": name,
        "ranks": ranks,
        "latency_us": _short(1e6 * float(line.factors[0])),
        "latency_us_80": [_short(1e6 * end) for end in line.interval(0)],
        "gb_per_s": _short(1e-9 / max(float(line.factors[1]), 1e-15)),
        "gb_per_s_80": [_short(slow), _short(fast)],
    }


def _link(measured: Measured, lines: Mapping[tuple[str, int], Fit]) -> tuple[float, float]:
    """Latency and bytes/s of a message to the next rank."""
    line = lines.get(("send", measured.ranks))
    if line is None:
        return _LOCAL
    return float(line.factors[0]), 1 / max(float(line.factors[1]), 1e-15)


def _probed(measured: Measured, base: Tables) -> Probed:
    """Shares with which the planner's own terms give the measured steps.

    On a GPU launches hide behind kernels, so that terms do not add up: there only the kernels that
    were timed alone count.
    """
    if measured.is_gpu:
        return Probed({}, _LEAST_SPREAD, ())
    probes = measured.probes
    planned = [_planned(each.probe, base) for each in probes]
    parts = np.array([[_seconds(step, names) for names in _PARTS.values()] for step in planned])
    passes = np.array([each.step.median * each.compute for each in probes])
    known = np.array([1.0, 1.0, math.nan, math.nan])
    inside = fit(parts, passes, known, _CERTAIN)
    updates = np.array([_seconds(step, ("optimizer",)) for step in planned])
    moved = fit(
        np.stack([updates, np.ones_like(updates)], axis=1),
        np.array([each.step.median * each.update for each in probes]),
    )
    rest = np.array([each.step.median * (1 - each.compute - each.update) for each in probes])
    around = float(np.median(rest)) + float(moved.factors[1])
    fitted = parts @ inside.factors + updates * moved.factors[0] + around
    product, attention, memory, launch = inside.factors
    rates, found = {}, base["sustained"]
    rates["product"] = _short(found["product"] / max(product, 1e-3))
    rates["attention"] = _short(found["attention"] / max(attention, 1e-3))
    rates["attention_first"] = rates["attention"]
    rates["memory"] = _short(1 / max(memory, 1e-3))
    rates["launch_us"] = _short(launch)
    rates["update"] = _short(1 / max(float(moved.factors[0]), 1e-3))
    rates["step_ms"] = _short(1e3 * around)
    steps = np.array([each.step.median for each in probes])
    spread = float(np.std(np.log(steps / fitted)))
    rows = zip((each.probe for each in probes), steps.tolist(), fitted.tolist(), strict=True)
    return Probed(rates, spread, tuple(rows))


def _planned(probe: Probe, base: Tables) -> Term:
    """The planner's step of a probe, were memory at its rate and a launch a microsecond."""
    rates = {**base["sustained"], "launch_us": 1e6 * _UNIT_LAUNCH, "update": 1.0}
    cluster = cluster_of({**base, "sustained": rates, "collectives": []})
    run = probe.run(str(base["precision"]))
    alone = replace(cluster, count=1)
    workload, layout = workload_of(run.model, alone, run.layout, probe.seq, probe.batch)
    return Priced(workload, layout).estimate().step


def cluster_of(tables: Tables, where: str = "the calibration") -> Cluster:
    """The value that the tables describe.

    Args:
        tables: of a cluster file.
        where: for messages.

    Raises:
        UsageError: a key that is missing, unknown, or of the wrong kind.
    """
    return read_cluster(str(tables["name"]), tables, {}, where)


def _seconds(step: Term, names: tuple[str, ...]) -> float:
    return sum(term.seconds for term in step.children if term.name in names)


def _measured(measured: Measured, probed: Probed) -> Tables:
    """What a reader wants to see, and nothing is computed from."""
    return {
        "ranks": measured.ranks,
        "threads_per_rank": measured.threads,
        "disturbed": _short(measured.disturbed),
        "disk_gb_per_s": _short(measured.disk / 1e9),
        "launch_us": _three(measured.launch, 1e6),
        "copies_gb_per_s": _three(measured.copies, 1e-9),
        "products": [
            {
                "format": each.format,
                "M": each.M,
                "N": each.N,
                "K": each.K,
                "seconds": _three(each.seconds, 1.0),
            }
            for each in measured.products
        ],
        "attention": [
            {
                "format": each.format,
                "sequences": each.b,
                "heads": each.a,
                "tokens": each.s,
                "head_dim": each.d,
                "seconds": _three(each.seconds, 1.0),
            }
            for each in measured.attentions
        ],
        "messages": [
            {
                "collective": each.name,
                "ranks": each.ranks,
                "bytes": each.bytes,
                "seconds": _three(each.seconds, 1.0),
            }
            for each in measured.messages
        ],
        "steps": [
            {**probe._asdict(), "seconds": _short(seconds), "planned_seconds": _short(fitted)}
            for probe, seconds, fitted in probed.rows
        ],
    }


def _three(found: Sampled, factor: float) -> list[float]:
    return [_short(value * factor) for value in found]


def _geometric(values: Iterator[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def _short(value: float) -> float:
    """Four digits: more would pretend."""
    return float(f"{value:.4g}")
