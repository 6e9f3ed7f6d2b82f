"""What dragging in a picture changes: from a fraction of its width to values of inputs."""

from collections.abc import Callable, Mapping

from phalanx.explore.draw import powers
from phalanx.explore.inputs import BY_KEY, Value, nudged
from phalanx.explore.panels.roofline import INTENSITY
from phalanx.explore.state import State


def _number(state: State, key: str) -> float:
    value = state[key]
    return 0.0 if isinstance(value, str) else float(value)


def _roof(state: State, at: float) -> dict[str, Value]:
    """Along the roofline: tokens per chip, so the batch."""
    tokens = INTENSITY.value(at) * _number(state, "dp")
    item = BY_KEY["B"]
    coarse = float(f"{min(max(tokens, item.low), item.high):.2e}")
    return {"B": nudged(item, coarse, 0)}


def _sweep(state: State, at: float) -> dict[str, Value]:
    """Along the sweep: how chips are shared between DP and TP."""
    n = int(_number(state, "dp") * _number(state, "tp"))
    found = [dp for dp in powers(n) if n % dp == 0]
    dp = found[round(at * (len(found) - 1))]
    return {"dp": dp, "tp": n // dp}


DRAGS: Mapping[str, Callable[[State, float], dict[str, Value]]] = {"roof": _roof, "sweep": _sweep}
