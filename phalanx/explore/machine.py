"""What a state means to the clocks: a block, a fabric, and how fast collectives run on it."""

from typing import NamedTuple

from phalanx.cost.clocks import Axes, Clocks, mixed_clocks, switched_clocks
from phalanx.cost.roofline import LayerSizes, SwitchedFabric, domain_weights_seconds
from phalanx.explore.presets import axes_of
from phalanx.explore.state import Reading


class Hardware(NamedTuple):
    """One layer of the model, and the hardware under it.

    Attributes:
        block: sizes of the layer, shared experts counted in E and k.
        shared: experts that every token visits.
        peak: FLOP/s of one chip.
        local: bytes/s of one chip into the fast fabric; on a torus, of one axis.
        fabric: the switched cluster; on a torus only its local rate is used.
        torus: axes of a torus; 0 for switches.
        axes: of a torus, over which dp and tp spread.
        tokens: of one step.
        dp, tp, pp: degrees.
    """

    block: LayerSizes
    shared: int
    peak: float
    local: float
    fabric: SwitchedFabric
    torus: int
    axes: Axes
    tokens: float
    dp: int
    tp: int
    pp: int

    @property
    def width(self) -> int:
        """K F: how wide the MLP is that one token meets."""
        return self.block.k * self.block.f

    def weights_bandwidth(self, dp: int, inner: int = 1) -> float:
        """Bytes/s at which `dp` ranks gather or reduce weights that `inner` neighbours have cut.

        Args:
            dp: ranks of the group.
            inner: ranks of an inner axis.
        """
        if self.torus:
            return self.local * self.axes.dp
        if dp * inner <= self.fabric.G:
            return self.local
        return 1.0 / domain_weights_seconds(1.0, self.fabric, inner)

    def activations_bandwidth(self, tp: int) -> float:
        """Bytes/s at which `tp` ranks gather or scatter activations.

        Over domains, (tp - G)/tp of the bytes leave one.

        Args:
            tp: ranks of the group.
        """
        if self.torus:
            return self.local * self.axes.tp
        if tp <= self.fabric.G:
            return self.local
        return min(self.local, self.fabric.egress * tp / (tp - self.fabric.G))

    def where(self, ranks: int) -> str:
        """The links that a group of so many ranks crosses, in a few words.

        Args:
            ranks: of the group.
        """
        if self.torus:
            return "over the torus"
        if ranks <= self.fabric.G:
            return f"inside one domain of {self.fabric.G}"
        return f"across {-(-ranks // self.fabric.G)} domains of {self.fabric.G}"

    def mixed(self, dp: int, tp: int, tokens: float) -> tuple[float, float, float]:
        """Seconds of one forward layer: arithmetic, gathered weights, moved activations.

        Args:
            dp: ranks that shard weights.
            tp: ranks that split the MLP.
            tokens: of one step.
        """
        if not self.torus:
            return switched_clocks(self.block, tokens, (dp, tp), self.peak, self.fabric)
        h, f, wide = self.block.h, self.block.f, self.local
        clocks = mixed_clocks(self.block, tokens, (dp, tp), self.axes, self.peak, wide)
        weights = 4.0 * h * self.block.E * f / (tp * wide * self.axes.dp) if dp > 1 else 0.0
        activations = 4.0 * tokens * h / (dp * wide * self.axes.tp) if tp > 1 else 0.0
        return clocks.compute, weights, activations


def machine(state: Reading) -> Hardware:
    """Read model, hardware and degrees of a state.

    Args:
        state: what is read.
    """
    domain, each = state.whole("G"), state.number("Wn")
    local = state.number("W")
    return Hardware(
        block=LayerSizes(*(state.whole(key) for key in ("D", "F", "E", "k"))),
        shared=state.whole("s"),
        peak=state.number("C"),
        local=local,
        fabric=SwitchedFabric(domain, local, each * domain),
        torus=axes_of(state.text("chip")),
        axes=Axes(state.whole("mdp"), state.whole("mtp")),
        tokens=state.number("B"),
        dp=state.whole("dp"),
        tp=state.whole("tp"),
        pp=state.whole("pp"),
    )


def slower(clocks: Clocks) -> str:
    """Which of the two clocks rules, in the words of the page."""
    return "compute-bound" if clocks.ratio >= 1 else "communication-bound"
