"""How long pipeline ranks stand idle in a step, for schedules whose papers give a formula.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; F forward, I and W the halves of
backward and B = I + W, in seconds of one micro-batch through all layers of a rank.
"""

from typing import NamedTuple

from phalanx.core.errors import RefusedError, UsageError


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch on one rank; the default is one unit each."""

    F: float = 1.0  # forward
    I: float = 1.0  # noqa: E741  # the letter of torch.distributed.pipelining
    W: float = 1.0  # weight-gradient half

    @property
    def B(self) -> float:  # noqa: N802  # the letter of the legend
        """Whole backward."""
        return self.I + self.W


class Bubble(NamedTuple):
    """Idle time of a rank in one step, beside the time it works."""

    idle: float
    work: float

    @property
    def over_ideal(self) -> float:
        """Bubble over ideal time: (p - 1)/m for 1F1B. Narayanan et al. 2021, section 2.2.1."""
        return self.idle / self.work

    @property
    def idle_fraction(self) -> float:
        """Bubble over total time: (p - 1)/(m + p - 1) for 1F1B. Huang et al. 2018, section 2.3."""
        return self.idle / (self.idle + self.work)


UNIT = PassSeconds()

FORMULAS = {
    "gpipe": "(p-1) (F+B)",
    "1f1b": "(p-1) (F+B)",
    "interleaved": "(p-1) (F+B) / v",
    "zb-h1": "(p-1) (F+I-W)",
    "zb-h2": "(p-1) (F+I-2W)",
    "zb-v": "0 where F = I = W",
    "dualpipe": "(p/2-1) (F&B+B-3W)",
    "dualpipev": "(p/2-1) (F&B+B-3W)",
}


def bubble(
    name: str,
    p: int,
    m: int,
    seconds: PassSeconds = UNIT,
    v: int = 1,
    overlapped: float | None = None,
) -> Bubble:
    """Idle and working time of a rank.

        gpipe, 1f1b            (p-1) (F + B)
        interleaved            (p-1) (F + B) / v
        zb-h1                  (p-1) (F + I - W)
        zb-h2                  (p-1) (F + I - 2 W)
        zb-v                   0, for F = I = W
        dualpipe, dualpipev    (p/2 - 1) (F&B + B - 3 W)

    All but gpipe and 1f1b suppose that m is large enough to fill the pipeline (m >= p, for zb-h2
    and dualpipe m >= 2p). Sources: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Qi et
    al. 2024 (arXiv:2401.10241), table 2 and section 6; DeepSeek-V3 (arXiv:2412.19437), table 2.

    Args:
        name: of the schedule, see `FORMULAS`.
        p: pipeline ranks.
        m: micro-batches per step.
        seconds: F, I and W.
        v: chunks of layers per rank.
        overlapped: F&B, a forward and a backward that hide each other's messages; default F + B.

    Raises:
        UsageError: an unknown schedule, or a count below 1.
        RefusedError: no formula covers these numbers.
    """
    if name not in FORMULAS:
        raise UsageError(f"no bubble formula for {name!r}; there is one for {', '.join(FORMULAS)}")
    if min(p, m, v) < 1:
        raise UsageError(f"p={p} m={m} v={v}; each is at least 1")
    F, I, W = seconds  # noqa: E741
    both = F + seconds.B
    if name == "zb-v" and not F == I == W:
        raise RefusedError(f"zb-v has a formula only for F = I = W, not {F}, {I}, {W}; simulate it")
    if name.startswith("dualpipe") and p % 2:
        raise RefusedError(f"{name} needs an even number of ranks; p={p}, try {p - 1} or {p + 1}")
    idle = {
        "gpipe": (p - 1) * both,
        "1f1b": (p - 1) * both,
        "interleaved": (p - 1) * both / v,
        "zb-h1": (p - 1) * (F + I - W),
        "zb-h2": (p - 1) * (F + I - 2 * W),
        "zb-v": 0.0,
    }
    dual = (p / 2 - 1) * ((both if overlapped is None else overlapped) + seconds.B - 3 * W)
    return Bubble(idle=max(idle.get(name, dual), 0.0), work=m * both)


def peak_in_flight(name: str, p: int, m: int, rank: int = 0, v: int = 1) -> float:
    """Micro-batches whose activations a rank holds at its peak, in passes through all its layers.

        gpipe          m
        1f1b           min(p - r, m)
        interleaved    min(2 (p - r - 1) + (v - 1) p + 1, m v) / v

    Sources: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Megatron-LM's warm-up counts.

    Raises:
        UsageError: another schedule: read it off the rows instead.
    """
    match name:
        case "gpipe":
            return m
        case "1f1b":
            return min(p - rank, m)
        case "interleaved":
            return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) / v
        case _:
            raise UsageError(f"no formula for {name!r}; count the rows of the schedule")
