"""Answers `why not this layout?`: its price beside the best's, or what refuses it and fixes it."""

from dataclasses import dataclass, replace

from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, divisors
from phalanx.core.estimate import Estimate
from phalanx.core.layout import Layout
from phalanx.core.units import show_bytes
from phalanx.planner.estimate import estimate
from phalanx.planner.explain import Fix, nearest_mesh, shortage, suggest_fix
from phalanx.planner.parse import both, read_limits, show_limits
from phalanx.planner.search import Found, search
from phalanx.planner.sweep import Request, Smallest, Sweep
from phalanx.planner.workload import refuse

MESH = {"dp", "pp", "tp"}  # a line that names all three is one layout; another one, many
DOUBLINGS = 16  # of the devices, to see with how many a model would fit


@dataclass(frozen=True)
class Diagnosis:
    """What there is to say about a layout that was asked for.

    Attributes:
        asked: the words.
        estimate: its price; of words that leave something open, that of the fastest; None where
            nothing can be priced.
        rank: its place among all layouts that fit; 0 where it does not.
        refusal: why not; empty where it fits.
        fix: the smallest change that makes it fit, if there is one.
    """

    asked: str
    estimate: Estimate | None = None
    rank: int = 0
    refusal: str = ""
    fix: Fix | None = None


def diagnose(found: Found, words: str, *, binary: bool = False) -> Diagnosis:
    """Look at a layout, or at all that some words allow.

    Args:
        found: what the search found.
        words: as in a layout line. With dp, pp and tp it is one layout, whose other keys have
            their defaults; without, it stands for the fastest layout that has these values.
        binary: print GiB and not GB.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
    """
    keys = {word.partition("=")[0] for word in words.replace(",", " ").split()}
    if keys >= MESH and "|" not in words:
        return _one(found, words, binary=binary)
    asked = read_limits(words)
    try:
        request = replace(found.request, limits=both(asked, found.request.limits), top=1)
        best = search(request)
        if best.ranked:
            price = best.ranked[0].estimate
            return Diagnosis(words, price, found.rank(price))
        return Diagnosis(words, refusal=nothing_fits(request, doublings=0, binary=binary))
    except RefusedError as refusal:
        return Diagnosis(words, refusal=str(refusal))


def _one(found: Found, words: str, *, binary: bool) -> Diagnosis:
    request, layout = found.request, Layout.parse(words)
    if layout.precision.is_auto:
        layout = replace(layout, precision=request.precision)
    shape, cluster, framework = request.shape, request.cluster, request.framework
    if layout.ranks != cluster.count:
        return Diagnosis(words, refusal=_wrong_product(layout, cluster.count))
    try:
        price = estimate(shape, cluster, layout, request.seq, request.batch, framework)
    except RefusedError as refusal:
        return Diagnosis(words, refusal=str(refusal))
    if price.fits:
        return Diagnosis(words, price, found.rank(price))
    return Diagnosis(words, price, 0, shortage(price, binary=binary), suggest_fix(request, layout))


def _wrong_product(layout: Layout, devices: int) -> str:
    cp = f" x cp={layout.cp}" if layout.cp > 1 else ""
    return (
        f"dp={layout.dp} x pp={layout.pp}{cp} x tp={layout.tp} is {layout.ranks:,} ranks, and there"
        f" are {devices:,} devices; the nearest that fits is {nearest_mesh(layout, devices)}"
    )


def nothing_fits(request: Request, *, doublings: int = DOUBLINGS, binary: bool = False) -> str:
    """Say that no layout fits, by how much, and with how many devices one would.

    Args:
        request: a search that found nothing.
        doublings: how often to double the devices.
        binary: print GiB and not GB.
    """
    sweep = Sweep(request)
    least = sweep.smallest()
    limits = show_limits(request.limits)
    allowed = f" with {limits}" if limits else ""
    if not sweep.considered:
        return (
            f"no layout of {request.cluster.count:,} devices has {limits}: the degrees together "
            f"must divide {request.cluster.count:,}, and dp x mb the {request.batch:,} sequences "
            "of a step"
        )
    if least is None:
        counts = ", ".join(f"{reason} ({n:,})" for reason, n in sweep.refused.items() if n)
        counts += _nearest(request)
        return (
            f"none of {sweep.considered:,} layouts of {request.cluster.count} devices{allowed} "
            f"suits {request.shape.name}: {counts}"
        )
    short = show_bytes(least.bytes - request.capacity, binary=binary)
    need, have = (show_bytes(size, binary=binary) for size in (least.bytes, request.capacity))
    enough = _devices_that_fit(request, least, doublings)
    hint = f"it would fit on {enough} devices" if enough else f"it fits with {need} a device"
    return (
        f"{request.shape.name} does not fit on {request.cluster.name}{allowed}: even "
        f"{least.layout} needs {need} of {have}, {short} too much; {hint}"
    )


def _nearest(request: Request) -> str:
    """What refuses the plainest of all layouts, with what works; nothing if that is none."""
    devices = request.cluster.count
    tp = max(t for t in divisors(devices) if request.shape.heads % t == 0)
    layout = Layout(dp=devices // tp, tp=tp, precision=request.precision)
    try:
        refuse(replace(request, batch=layout.dp), layout)
    except RefusedError as refusal:
        return f"; {refusal}"
    return ""


def _devices_that_fit(request: Request, least: Smallest, doublings: int) -> int:
    """The fewest devices, by doubling, on which some layout fits; 0 if none of so many."""
    needed = least.bytes / request.capacity
    for doubling in range(1, doublings + 1):
        cluster: Cluster = request.cluster
        larger = replace(cluster, count=cluster.count << doubling, torus=())
        if 1 << doubling < needed / 2:
            continue
        try:
            found = Sweep(replace(request, cluster=larger)).smallest()
        except RefusedError:
            continue
        if found is not None and found.bytes <= request.capacity:
            return larger.count
    return 0
