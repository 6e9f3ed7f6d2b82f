"""The expert axis: what ep sends. Its twin is phalanx/train/parallel/expert.py.

Splits: the experts of each layer.
"""

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run


def refuse(run: Run) -> None:
    """Raise RefusedError where experts cannot be computed."""
    shape = run.model
    if shape.is_moe and shape.bias:
        raise RefusedError("experts have no biases here; use model.bias=false")
