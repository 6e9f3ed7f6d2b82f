"""How long one device computes: products by shape, attention by scores, the rest by bytes.

A product of M x K by K x N takes the slower of two clocks, arithmetic and memory. Arithmetic runs
at the share of the peak that large products reach, less for a short inner length K, and less again
where the tiles of the result do not fill the last wave over all cores. Sizes are columns: every
kernel of a unit is priced for all layouts of a table at once.

Symbols: M, N, K sizes of a product, T tokens of a micro-batch on one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from phalanx.core.recompute import Recompute
from phalanx.core.sustained import Sustained
from phalanx.cost.table import Choice, Column, Floats

# Tiles of the result that libraries choose from, and what each reaches of the first one's rate.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.7))
# Each score costs an exponential beside its products, however wide a head is: FlashAttention-3
# (arXiv:2407.08608), figure 5: heads of 64 reach about 0.75 of the rate of those of 128 channels.
HEAD_WIDTH, EXPONENTIAL_WIDTH = 128.0, 64.0
FUSED_BACKWARD = 2.5  # products of fused attention's backward over forward's: 5 to 2

# What recomputation may repeat alone; see `core.recompute.PARTS`.
Part = Literal["block", "core", "norms", "mlp", "activation", "latent", "experts"]


class Passes(NamedTuple):
    """Seconds of the three passes over one micro-batch: forward and the halves of backward."""

    F: Column = 0.0  # forward
    I: Column = 0.0  # noqa: E741  # input gradient
    W: Column = 0.0  # weight gradient

    def plus(self, other: "Passes") -> "Passes":
        """Both, one after the other."""
        return Passes(self.F + other.F, self.I + other.I, self.W + other.W)

    def times(self, count: Column) -> "Passes":
        """All of it `count` times."""
        return Passes(self.F * count, self.I * count, self.W * count)

    @property
    def total(self) -> Column:
        """Seconds of all three."""
        return self.F + self.I + self.W

    @property
    def backward(self) -> Column:
        """Seconds of both halves of backward."""
        return self.I + self.W


class Product(NamedTuple):
    """A matrix product M x K by K x N with its two gradients, for one micro-batch on one rank.

    Attributes:
        name: of the operator.
        M, N, K: sizes, columns; of experts M is the mean load of one.
        batch: how many independent ones there are.
        part: of a block, that recomputation repeats it with.
        weights: K x N are weights, and their gradient is a pass of its own.
        kernels: that compute all of them in forward; backward runs twice as many.
        launched: how many of each the host starts by itself.
        last: no backward of its own block reads the result.
        low_precision: in the format of the recipe; else in that of the rest.
    """

    name: str
    M: Column
    N: Column
    K: Column
    batch: Column = 1.0
    part: Part = "block"
    weights: bool = True
    kernels: Column = 1.0
    last: bool = False
    low_precision: bool = True
    launched: float = 1.0


class Scores(NamedTuple):
    """Fused attention for one micro-batch on one rank.

    Attributes:
        name: of the operator.
        flops: FLOP of its two products in forward, only the half that the mask leaves.
        part: of a block, that recomputation repeats it with.
        first: by the first generation of fused kernels.
        width: channels of a head, the mean of keys and values.
        launched: how many of its kernels the host starts by itself.
    """

    name: str
    flops: Column
    part: Part = "core"
    first: bool = False
    width: float = HEAD_WIDTH
    launched: float = 1.0


class MemoryBoundKernel(NamedTuple):
    """Passes over tensors in memory, for one micro-batch on one rank.

    Attributes:
        name: of the operator.
        forward, backward: bytes that are read and written.
        kernels: how many do it, in each of the two.
        launched: how many of each the host starts by itself.
        part: of a block, that recomputation repeats it with.
        last: no backward of its own block reads the result.
    """

    name: str
    forward: Column
    backward: Column
    kernels: Column = 1
    part: Part = "block"
    last: bool = False
    launched: float = 1.0


Work = Product | Scores | MemoryBoundKernel


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One accelerator as arithmetic sees it.

    Attributes:
        peak: dense FLOP/s of products in the format that runs.
        wide: dense FLOP/s of attention, which stays in 16 bits under fp8.
        hbm: bytes/s of memory.
        element: bytes of an operand of products.
        wide_element: the same of products that stay in the format of the rest.
        product: share of the peak that a very large product reaches in the format that runs; 0 is
            that of the rates.
        accumulate: bytes that adding up the gradient of one weight moves within its product.
        rates: the other shares, see `Sustained`.
    """

    peak: float
    wide: float
    hbm: float
    element: float
    accumulate: float
    rates: Sustained
    wide_element: int = 2
    product: float = 0.0

    def product_seconds(
        self,
        M: Column,
        N: Column,
        K: Column,
        batch: Column = 1.0,
        added: Column = 0.0,
        low_precision: Column = True,
    ) -> Column:
        """The slower of arithmetic and memory for `batch` products M x K by K x N.

            2 M N K / (peak x share x K/(K + depth) x fill)
            (M K + K N + M N) bytes / (hbm x share)

        Args:
            M: rows of the first matrix: tokens, or the channels of a weight's gradient.
            N: columns of the second.
            K: the inner length, which a short one makes slow.
            batch: how many independent products there are.
            added: bytes that every element of the result moves beside itself: of a gradient that is
                added up within its product.
            low_precision: whether it runs in the format of the recipe, a column.

        Returns:
            Seconds of all of them, a column like the sizes.
        """
        rates = self.rates
        low = np.asarray(low_precision)
        peak = np.where(low, self.peak, self.wide)
        share = np.where(low, self.product or rates.product, rates.product)
        element = np.where(low, self.element, self.wide_element)
        depth = rates.depth * peak / self.wide
        reached = peak * share * K / (K + depth)
        arithmetic = 2 * M * N * K * batch / (reached * fill(M, N, batch, rates.cores))
        moved = batch * ((M * K + K * N + M * N) * element + M * N * added)
        return np.maximum(arithmetic, moved / (self.hbm * rates.memory))

    def scores_seconds(
        self, flops: Column, *, first: bool = False, width: float = HEAD_WIDTH
    ) -> Column:
        """Seconds of fused attention, whose scores never leave the chip.

        Args:
            flops: FLOP of its products, a column; of causal attention the half below the diagonal.
            first: by the first generation of fused kernels, which has a rate of its own.
            width: channels of a head; the rates are those of `HEAD_WIDTH`.
        """
        rates = self.rates
        if first:
            return flops / (self.wide * rates.attention_first)
        slower = (1 + EXPONENTIAL_WIDTH / width) / (1 + EXPONENTIAL_WIDTH / HEAD_WIDTH)
        return flops * slower / (self.wide * rates.attention)

    def memory_seconds(self, size: Column) -> Column:
        """Seconds of reading and writing `size` bytes, a column, at the rate that passes reach."""
        return size / (self.hbm * self.rates.memory)


def fill(M: Column, N: Column, batch: Column, cores: int) -> Column:
    """Share of the cores that are busy while the tiles of the result are made, for the best tile.

    The last wave runs as long as a full one. Source: NVIDIA, "Matrix Multiplication Background
    User's Guide", section "Tile and wave quantization".

    Args:
        M: rows of one result, a column.
        N: its columns, likewise.
        batch: how many independent results there are.
        cores: of the device; one core has no waves, and is always busy.

    Example:
        One tile more than there are cores asks for another wave:

        >>> [round(float(fill(256, 128 * tiles, 1, cores=108)), 2) for tiles in (108, 109)]
        [1.0, 0.69]
    """
    if cores == 1:
        return 1.0
    best: Column = 0.0
    for height, width, rate in TILES:
        tiles = np.ceil(M / height) * np.ceil(N / width) * batch
        exact = M * N * batch / (height * width)
        best = np.maximum(best, rate * exact / (np.ceil(tiles / cores) * cores))
    return best


@dataclass(frozen=True)
class Kernels:
    """Kernels of a unit with their prices, in arrays of shape (passes, kernels, ...).

    The dots are the shape of the table.

    Attributes:
        works: what they do.
        seconds: in F, I and W.
        peak: the same at the peak of the device; what is bound by memory has none.
        launches: number of kernels in forward and in backward.
    """

    works: tuple[Work, ...]
    seconds: Floats
    peak: Floats
    launches: Floats

    def sum(self, kind: type | None = None) -> Passes:
        """Seconds of the kernels of one kind, or of all, one after the other.

        Args:
            kind: `Product`, `Scores` or `MemoryBoundKernel`; None sums all.
        """
        return Passes(*self.seconds[:, self._are(kind)].sum(axis=1))

    def at_peak(self, kind: type) -> Passes:
        """What those of one kind would take at the peak."""
        return Passes(*self.peak[:, self._are(kind)].sum(axis=1))

    def _are(self, kind: type | None) -> list[bool]:
        return [kind is None or isinstance(work, kind) for work in self.works]

    def repeated(self, recompute: Choice[Recompute], *, stops_early: bool) -> "Again":
        """The part of the forward that backward repeats.

        none: nothing; selective: the attention core; full: everything, but for what only later
        blocks read if recomputation stops early; full:k: that of every k-th block only; parts:
        those; operators: all but the attention core, and of the products every second one.

        Args:
            recompute: of every row of the table that these kernels are priced for.
            stops_early: the program repeats a block no further than its last saved tensor.
        """
        shares = [_repeated_shares(self.works, mode, stops_early) for mode in recompute.values]
        forward = np.stack([self.seconds[0], self.launches[0]])
        each = np.tensordot(np.array(shares), forward, axes=([1], [1]))  # values x 2 x table
        return Again(*(_pick(each[:, i], recompute.codes) for i in range(2)))


class Again(NamedTuple):
    """The forward that backward repeats: seconds, and the number of kernels."""

    seconds: Column = 0.0
    kernels: Column = 0.0


def price(works: Sequence[Work], machine: Machine) -> Kernels:
    """Seconds of every kernel in each pass, one at a time.

    Args:
        works: what a unit does for one micro-batch.
        machine: the device.
    """
    shape = np.broadcast_shapes(*(np.shape(size) for work in works for size in _sizes(work)))
    seconds = np.zeros((3, len(works), *shape))
    peak, launches = np.zeros_like(seconds), np.zeros((2, *seconds.shape[1:]))
    for i, work in enumerate(works):
        match work:
            case Scores():
                forward = machine.scores_seconds(work.flops, first=work.first, width=work.width)
                seconds[:2, i] = np.stack((forward, FUSED_BACKWARD * forward))
                peak[:2, i] = np.stack((work.flops, 2.0 * work.flops)) / machine.wide
                launches[0, i], launches[1, i] = work.launched, 2 * work.launched
            case MemoryBoundKernel():
                seconds[0, i] = machine.memory_seconds(work.forward)
                seconds[1, i] = machine.memory_seconds(work.backward)
                seconds[:2, i] += machine.rates.gap * work.kernels
                launches[:, i] = work.kernels * work.launched
    places = [i for i, work in enumerate(works) if isinstance(work, Product)]
    products = tuple(work for work in works if isinstance(work, Product))
    if products:
        seconds[:, places], peak[:, places] = _products(products, machine, shape)
        started = [np.broadcast_to(w.kernels * w.launched, shape) for w in products]
        launches[0, places] = np.stack(started)
        launches[1, places] = 2 * launches[0, places]
    return Kernels(tuple(works), seconds, peak, launches)


def _products(
    products: Sequence[Product], machine: Machine, shape: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Seconds and seconds at the peak of all products, in F, I and W."""

    def stacked(sizes: Sequence[Column]) -> Floats:
        return np.stack([np.broadcast_to(np.asarray(x, np.float64), shape) for x in sizes])

    M, N, K = (stacked([getattr(work, size) for work in products]) for size in "MNK")
    batch = stacked([work.batch for work in products])
    learns = np.array([work.weights for work in products])
    column = learns.reshape(-1, *(1,) * len(shape))
    low = np.array([work.low_precision for work in products]).reshape(column.shape)
    added = np.stack((0 * M, 0 * M, machine.accumulate * column + 0 * M))
    sizes = (np.stack((M, M, K)), np.stack((N, K, N)), np.stack((K, N, M)))
    seconds = machine.product_seconds(*sizes, np.stack((batch,) * 3), added, low)
    seconds = seconds + machine.rates.gap * stacked([work.kernels for work in products])
    flops = 2 * M * N * K * batch
    peak = np.stack((flops / np.where(low, machine.peak, machine.wide),) * 3)
    for table in (seconds, peak):  # without weights both gradients are one pass
        table[1] += np.where(column, 0.0, table[2])
        table[2] = np.where(column, table[2], 0.0)
    return seconds, peak


def _sizes(work: Work) -> tuple[Column, ...]:
    return tuple(size for size in work if not isinstance(size, str | bool))


def _repeated_shares(works: Sequence[Work], mode: Recompute, stops_early: bool) -> list[float]:
    """Which share of each kernel's forward one mode of recomputation repeats."""
    if mode.segment:  # only the last block of a segment may stop early
        last = 1 - 1 / mode.segment if stops_early else 1.0
        return [last if not isinstance(work, Scores) and work.last else 1.0 for work in works]
    if "operators" in mode.parts:
        products = [i for i, work in enumerate(works) if isinstance(work, Product)]
        second = set(products[1::2])
        bound = [isinstance(work, MemoryBoundKernel) for work in works]
        return [float(is_bound or i in second) for i, is_bound in enumerate(bound)]
    parts = mode.parts | ({"activation"} if "mlp" in mode.parts else set())
    return [float(work.part in parts) for work in works]


def _pick(each: Floats, codes: Column) -> Floats:
    """The row of `each`, of shape (values, ...), that every place of the table has."""
    if len(each) == 1:
        only: Floats = each[0]
        return only
    table = np.broadcast_shapes(each.shape[1:], np.shape(codes))
    spread = np.broadcast_to(each, (len(each), *table))
    found: Floats = np.take_along_axis(spread, np.broadcast_to(codes, table)[None], axis=0)[0]
    return found
