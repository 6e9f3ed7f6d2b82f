"""What cannot be trained: what no layout could cut so, and what a folder of weights asks for."""

from pathlib import Path

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.cost.refusals import refuse
from phalanx.schedules.layouts import is_asynchronous


def refuse_untrainable(run: Run) -> None:
    """Raise where a run cannot be cut so, or its weights want what the trainer does not have.

    Raises:
        RefusedError: the numbers that clash, and the nearest that works.
    """
    refuse(run)
    if run.recipe.spike == "skip" and is_asynchronous(run.layout):
        raise RefusedError(
            f"recipe.spike=skip with schedule={run.layout.schedule}: its weights have moved before "
            "the loss is known; use recipe.spike=tell, rollback or off"
        )
    if run.weights:
        _refuse_window(run)


def _refuse_window(run: Run) -> None:
    from phalanx.trainer.model.huggingface import attention_window  # brings torch

    window = attention_window(Path(run.weights))
    if window is not None and run.recipe.seq > window:
        raise RefusedError(
            f"the model in {run.weights} sees a window of {window} tokens, which is not trained "
            f"here, and recipe.seq={run.recipe.seq} is longer; use recipe.seq up to {window}"
        )
