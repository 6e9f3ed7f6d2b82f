"""The expert axis: what it refuses. What it sends is in `cost/messages/expert.py`."""

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.run import Run


def refuse(run: Run) -> None:
    """Raise RefusedError where experts cannot be computed, or not be spread over ep."""
    shape, layout = run.model, run.layout
    if shape.is_moe and shape.bias:
        raise RefusedError("experts have no biases here; use model.bias=false")
    if layout.ep == 1:
        return
    if not shape.is_moe:
        raise RefusedError(f"ep={layout.ep}, but the model has no experts; use ep=1")
    ranks = layout.sharers
    if ranks % layout.ep or shape.experts % layout.ep:
        fits = [e for e in divisors(ranks) if shape.experts % e == 0]
        raise RefusedError(
            f"ep={layout.ep} must divide {shape.experts} experts and the {ranks} ranks that share "
            f"a copy (shard x cp); ep can be {shorten(fits)}"
        )
