"""Weights & Biases: offline in the run's folder unless WANDB_MODE says otherwise.

`wandb sync runs/NAME/track/wandb/offline-run-*` sends it later; all parts of a run have one id.
"""

import os
import uuid
from typing import Any

import wandb

from phalanx.trainer.track.tracking import TrackedRun, Tracker, Values, remembered


class WeightsAndBiases:
    """A run of W&B. Its own steps only rise, so ours are a value that the others are drawn over."""

    def __init__(self, place: TrackedRun) -> None:
        """Open it.

        Args:
            place: name, project, folder and values of the run.
        """
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            id=remembered(place.folder / "wandb-id", lambda: uuid.uuid4().hex[:16]),
            project=place.project,
            name=place.name,
            dir=str(place.folder),
            config=dict(place.config),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, disable_code=True
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Values, when: float) -> None:
        """Draw values; see `Tracker`.

        Args:
            step: how many are done.
            values: by name.
            when: in seconds since 1970.
        """
        self._run.log({**values, "step": step, "time": when})

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


def open_tracker(place: TrackedRun) -> Tracker:
    """Open it for a run."""
    return WeightsAndBiases(place)
