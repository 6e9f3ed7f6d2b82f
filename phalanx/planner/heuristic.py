"""Layouts by rules of thumb, to compare with what a search finds.

`procedure` follows the guidelines of Megatron-LM: tensor parallelism up to the fast domain, a
pipeline just large enough that the model fits, data parallelism with the rest, then micro-batches.
`by_bubble` lists the (tp, pp, dp) whose memory, by the formulas of the papers, is small enough.

Symbols: t tp, p pp, d dp, m micro-batches per step and rank.
"""

from dataclasses import dataclass, replace

from phalanx.core.errors import RefusedError, divisors
from phalanx.core.estimate import Estimate
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.recompute import FULL, MODES, Recompute
from phalanx.cost.activations import checkpointed_bytes
from phalanx.cost.state import MIXED_ADAM, sharded
from phalanx.planner.estimate import Priced
from phalanx.planner.sweep import Request
from phalanx.planner.workload import refuse
from phalanx.schedules.layouts import spec_of

FEW_PERCENT = 0.05  # a bubble that needs no more micro-batches


def procedure(request: Request) -> Estimate:
    """The layout that the guidelines lead to.

        1. tp: the largest that divides the heads and stays in one fast domain
        2. pp: the smallest with which a micro-batch of one sequence fits, and then as little
           recomputation as fits
        3. dp: the rest
        4. mb: the largest that fits with a bubble of at most 5 %, or 1

    with ZeRO-1 and 1F1B. Source: Narayanan et al. 2021 (arXiv:2104.04473), takeaways 1 to 3.

    Raises:
        RefusedError: no pipeline depth fits.
    """
    tp = _tensor(request)
    layouts = (
        _layout(request, tp, pp, mode)
        for pp in divisors(request.cluster.count // tp)
        for mode in MODES
    )
    layout = next((layout for layout in layouts if _fits(request, layout)), None)
    if layout is None:
        raise RefusedError(
            f"with tp={tp}, no pipeline depth makes {request.shape.name} fit into "
            f"{request.cluster.name} under ZeRO-1; the search also looks at ZeRO-3"
        )
    return _priced(request, _with_larger_micro_batches(request, layout)).estimate()


def _tensor(request: Request) -> int:
    cluster = request.cluster
    domain = max(cluster.torus) if cluster.torus else cluster.domain_size
    options = [t for t in divisors(cluster.count) if request.shape.heads % t == 0 and t <= domain]
    return options[-1]


def _layout(request: Request, tp: int, pp: int, recompute: Recompute) -> Layout:
    dp = request.cluster.count // (tp * pp)
    return Layout(dp=dp, pp=pp, tp=tp, recompute=recompute, precision=request.precision)


def _priced(request: Request, layout: Layout) -> Priced:
    refuse(request, layout)
    return Priced(request, layout)


def _fits(request: Request, layout: Layout) -> bool:
    try:
        priced = _priced(request, layout)
    except RefusedError:
        return False
    return max(rank.total for rank in priced.rank_bytes()) <= request.capacity


def _with_larger_micro_batches(request: Request, layout: Layout) -> Layout:
    for mb in reversed(divisors(request.batch // layout.dp)):
        m = request.batch // (layout.dp * mb)
        if mb == 1 or spec_of(layout).bubble_of(layout.pp, m).idle_fraction > FEW_PERCENT:
            continue
        if _fits(request, larger := replace(layout, mb=mb)):
            return larger
    return layout


@dataclass(frozen=True)
class HeuristicFit:
    """A layout by the formulas of the papers.

    Attributes:
        layout: dp, pp and tp; ZeRO-1, everything recomputed.
        bytes: of state and activations on one device.
        bubble: idle share of the pipeline, (p - 1) / (m + p - 1).
    """

    layout: Layout
    bytes: float
    bubble: float


def by_bubble(
    shape: ModelShape, devices: int, tokens: float, capacity: float = 80e9, m: int = 8
) -> list[HeuristicFit]:
    """All (tp, pp, dp) with tp up to 8 that fit, least bubble first, then least tp.

        bytes = N/(t p) (2 + 2 + 12/d) + activations of one of m micro-batches, block inputs kept

    Sources: Rajbhandari et al. 2019 (arXiv:1910.02054), figure 1; Korthikanti et al. 2022
    (arXiv:2205.05198), table 2.

    Args:
        shape: the model.
        devices: how many.
        tokens: per step, over all devices.
        capacity: bytes of one device.
        m: micro-batches that the batch of one replica is cut into.

    Example:
        >>> from phalanx.catalog.load import model
        >>> best = by_bubble(model("llama-3.1-8b"), devices=8, tokens=65536)[0]
        >>> str(best.layout), f"{best.bytes:.3g}"
        ('dp=8 pp=1 tp=1 recompute=full', '4.46e+10')
    """
    found = []
    for tp in (t for t in divisors(devices) if t <= 8):
        for pp in (p for p in divisors(devices // tp) if p <= shape.layers):
            layout = Layout(dp=devices // (tp * pp), pp=pp, tp=tp, recompute=FULL)
            size = heuristic_bytes(shape, layout, tokens, m)
            if size <= capacity:
                idle = spec_of(layout).bubble_of(pp, m).idle_fraction
                found.append(HeuristicFit(layout, size, idle))
    return sorted(found, key=lambda fit: (fit.bubble, fit.layout.tp))


def heuristic_bytes(shape: ModelShape, layout: Layout, tokens: float, m: int) -> float:
    """State and activations of one device, see `by_bubble`.

    Args:
        shape: the model.
        layout: of it dp, pp, tp and zero.
        tokens: per step, over all devices.
        m: micro-batches that the batch of one replica is cut into.
    """
    state = sharded(MIXED_ADAM, layout.zero, layout.dp).total
    params = shape.params() / (layout.tp * layout.pp)
    of_micro_batch = tokens / layout.dp / m
    layers = shape.layers / layout.pp
    size = params * state + checkpointed_bytes(shape, of_micro_batch, layers, layout.tp)
    return float(size)
