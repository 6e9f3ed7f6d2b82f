"""The tensor axis: what it refuses. What it sends is in `cost/messages/tensor.py`."""

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.run import Run


def refuse(run: Run) -> None:
    """Raise RefusedError where heads or vocabulary do not divide over tp."""
    shape, tp = run.model, run.layout.tp
    fits = [t for t in divisors(shape.heads) if not shape.kv_heads % t or not t % shape.kv_heads]
    if tp not in fits:
        what = f"{shape.kv_heads} kv heads cannot be split over, or shared by,"
        if shape.heads % tp:
            what = f"{shape.heads} heads cannot be split over"
        raise RefusedError(f"{what} tp={tp}; tp can be {shorten(fits)}")
    widths = [(shape.vocab, "a vocabulary"), (shape.ffn, "an MLP width")]
    widths += [(shape.expert_width, "an expert's width")] if shape.is_moe else []
    for size, what in widths:
        if size < tp:
            raise RefusedError(f"{what} of {size} is smaller than tp={tp}; use a smaller tp")
