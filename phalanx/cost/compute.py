"""How long one device computes: products by shape, attention by scores, the rest by bytes.

A product of M x K by K x N takes the slower of two clocks, arithmetic and memory. Arithmetic runs
at the share of the peak that large products reach, less for a short inner length K, and less again
where the tiles of the result do not fill the last wave over all cores.

Symbols: M, N, K sizes of a product, T tokens of a micro-batch on one rank.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from phalanx.core.recompute import Recompute
from phalanx.core.sustained import Sustained

# Tiles of the result that libraries choose from, and what each reaches of the first one's rate.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.7))
FUSED_BACKWARD = 2.5  # products of fused attention's backward over forward's: 5 to 2


# What recomputation may repeat alone; see `core.layout.RECOMPUTE_PARTS`.
Part = Literal["block", "core", "norms", "mlp", "activation", "latent", "experts"]


class Passes(NamedTuple):
    """Seconds of the three passes over one micro-batch: forward and the halves of backward."""

    F: float = 0.0  # forward
    I: float = 0.0  # noqa: E741  # input gradient
    W: float = 0.0  # weight gradient

    def plus(self, other: "Passes") -> "Passes":
        """Both, one after the other."""
        return Passes(self.F + other.F, self.I + other.I, self.W + other.W)

    def times(self, count: float) -> "Passes":
        """All of it `count` times."""
        return Passes(self.F * count, self.I * count, self.W * count)

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.F + self.I + self.W


NONE = Passes()


class Product(NamedTuple):
    """A matrix product with its two gradients; `batch` independent ones in `kernels` kernels."""

    name: str
    M: float
    N: float
    K: float
    batch: float = 1.0
    part: Part = "block"
    weights: bool = True  # K x N are weights, and their gradient is a pass of its own
    kernels: float = 1.0
    last: bool = False  # no backward of its own block reads the result


class Scores(NamedTuple):
    """Fused attention: the FLOP of its two products, only the half that the mask leaves."""

    name: str
    flops: float
    part: Part = "core"
    first: bool = False  # by the first generation of fused kernels


class Sweep(NamedTuple):
    """Passes over tensors in memory: bytes read and written, and how many kernels do it."""

    name: str
    forward: float
    backward: float
    kernels: int = 1
    part: Part = "block"
    last: bool = False


Work = Product | Scores | Sweep


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One accelerator as arithmetic sees it.

    Attributes:
        peak: dense FLOP/s of products in the format that runs.
        wide: dense FLOP/s of attention, which stays in 16 bits under fp8.
        hbm: bytes/s of memory.
        element: bytes of an operand of products.
        accumulate: bytes that adding up the gradient of one weight moves within its product.
        rates: the other shares, see `Sustained`.
    """

    peak: float
    wide: float
    hbm: float
    element: int
    accumulate: float
    rates: Sustained

    def product_seconds(
        self, M: float, N: float, K: float, batch: float = 1.0, added: float = 0.0
    ) -> float:
        """The slower of arithmetic and memory for `batch` products M x K by K x N.

        2 M N K / (peak x share x K/(K + depth) x fill)
        (M K + K N + M N) bytes / (hbm x share)
        """
        if M <= 0 or batch <= 0:
            return 0.0
        rates = self.rates
        depth = rates.depth * self.peak / self.wide
        reached = self.peak * rates.product * K / (K + depth)
        arithmetic = 2 * M * N * K * batch / (reached * fill(M, N, batch, rates.cores))
        moved = batch * ((M * K + K * N + M * N) * self.element + M * N * added)
        return max(arithmetic, moved / (self.hbm * rates.memory))

    def scores_seconds(self, flops: float, *, first: bool = False) -> float:
        """Fused attention, whose scores never leave the chip."""
        rates = self.rates
        return flops / (self.wide * (rates.attention_first if first else rates.attention))

    def sweep_seconds(self, size: float) -> float:
        """Reading and writing `size` bytes."""
        return size / (self.hbm * self.rates.memory)


def fill(M: float, N: float, batch: float, cores: int) -> float:
    """Share of the cores that are busy while the tiles of the result are made, for the best tile.

    The last wave runs as long as a full one. Source: NVIDIA, "Matrix Multiplication Background
    User's Guide", section "Tile and wave quantization".
    """
    if cores == 1:
        return 1.0
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = ceil(M / rows) * ceil(N / columns) * batch
        exact = M * N * batch / (rows * columns)
        best = max(best, rate * exact / (ceil(tiles / cores) * cores))
    return best


@dataclass(frozen=True)
class Cost:
    """Seconds of some work, by what limits them.

    Attributes:
        peak: what its products would take at the peak.
        scores_peak: what its attention would take at the peak.
        products: matrix products.
        attention: fused attention.
        sweeps: passes over memory.
        kernels: number of kernels, not seconds.
    """

    peak: Passes = NONE
    scores_peak: Passes = NONE
    products: Passes = NONE
    attention: Passes = NONE
    sweeps: Passes = NONE
    kernels: Passes = NONE

    def plus(self, other: "Cost") -> "Cost":
        """Both, one after the other."""
        return Cost(
            self.peak.plus(other.peak),
            self.scores_peak.plus(other.scores_peak),
            self.products.plus(other.products),
            self.attention.plus(other.attention),
            self.sweeps.plus(other.sweeps),
            self.kernels.plus(other.kernels),
        )

    @property
    def busy(self) -> Passes:
        """Seconds that the device works."""
        return self.products.plus(self.attention).plus(self.sweeps)


def price(work: Work, machine: Machine) -> Cost:
    """Seconds of one piece of work in each pass."""
    match work:
        case Product():
            return _product(work, machine)
        case Scores():
            passes = Passes(1.0, FUSED_BACKWARD)
            return Cost(
                scores_peak=Passes(1.0, 2.0).times(work.flops / machine.wide),
                attention=passes.times(machine.scores_seconds(work.flops, first=work.first)),
                kernels=Passes(1, 2),
            )
        case Sweep():
            return Cost(
                sweeps=Passes(
                    machine.sweep_seconds(work.forward), machine.sweep_seconds(work.backward)
                ),
                kernels=Passes(work.kernels, work.kernels),
            )


def _product(work: Product, machine: Machine) -> Cost:
    M, N, K, batch = work.M, work.N, work.K, work.batch
    ideal = 2 * M * N * K * batch / machine.peak
    forward = machine.product_seconds(M, N, K, batch)
    inputs = machine.product_seconds(M, K, N, batch)
    added = machine.accumulate if work.weights else 0.0
    others = machine.product_seconds(K, N, M, batch, added)
    if work.weights:
        return Cost(
            peak=Passes(ideal, ideal, ideal),
            products=Passes(forward, inputs, others),
            kernels=Passes(work.kernels, work.kernels, work.kernels),
        )
    return Cost(
        peak=Passes(ideal, 2 * ideal),
        products=Passes(forward, inputs + others),
        kernels=Passes(work.kernels, 2 * work.kernels),
    )


def total(works: tuple[Work, ...], machine: Machine) -> Cost:
    """Seconds of all of them, one after the other."""
    cost = Cost()
    for work in works:
        cost = cost.plus(price(work, machine))
    return cost


class Again(NamedTuple):
    """The forward that backward repeats: seconds, and the number of kernels."""

    seconds: float = 0.0
    kernels: float = 0.0


def again(
    works: tuple[Work, ...], machine: Machine, recompute: Recompute, *, stops_early: bool
) -> Again:
    """What of the forward of a block backward repeats.

    none: nothing; selective: the attention core; full: everything, but for what only later blocks
    read if recomputation stops early; full:k: that of every k-th block only; parts: those;
    operators: all but the attention core, and of the products every second one.
    """
    parts = set(recompute.parts)
    if "mlp" in parts:
        parts.add("activation")
    repeated: list[Work]
    if recompute.segment:
        return _whole_again(works, machine, recompute, stops_early=stops_early)
    if "operators" in parts:
        products = [w for w in works if isinstance(w, Product)]
        repeated = [*(w for w in works if isinstance(w, Sweep)), *products[1::2]]
    else:
        repeated = [w for w in works if w.part in parts]
    cost = total(tuple(repeated), machine)
    return Again(cost.busy.F, cost.kernels.F)


def _whole_again(
    works: tuple[Work, ...], machine: Machine, recompute: Recompute, *, stops_early: bool
) -> Again:
    """A whole block; only the last one of a segment of k may stop early."""
    k = recompute.segment
    everything = total(works, machine)
    left_out = total(tuple(w for w in works if stops_early and _is_last(w)), machine)
    return Again(
        everything.busy.F - left_out.busy.F / k, everything.kernels.F - left_out.kernels.F / k
    )


def _is_last(work: Work) -> bool:
    return not isinstance(work, Scores) and work.last
