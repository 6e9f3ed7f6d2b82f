"""The data axis: what it refuses. What it sends is in `cost/messages/data.py`."""

from phalanx.core.run import Run


def refuse(run: Run) -> None:
    """Raise RefusedError where the batch does not divide over dp and micro-batches."""
    run.layout.micro_batches(run.recipe.batch)
