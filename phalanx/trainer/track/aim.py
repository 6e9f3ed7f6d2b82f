"""Aim: the repository that AIM_REPO names, else one in the run's folder."""

import os
import uuid

import aim

from phalanx.trainer.track.tracking import TrackedRun, Tracker, Values, remembered


class Aim:
    """A run of Aim, taken up again by its hash."""

    def __init__(self, place: TrackedRun) -> None:
        """Open it.

        Args:
            place: name, project, folder and values of the run.
        """
        repository = os.environ.get("AIM_REPO") or str(place.folder / "aim")
        aim.Repo.from_path(repository, init=True)
        hash_file = place.folder / "aim-run"
        self._run = aim.Run(
            run_hash=remembered(hash_file, lambda: uuid.uuid4().hex[:24]),
            repo=repository,
            experiment=place.project,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
            force_resume=True,
        )
        self._run.name = place.name
        self._run["run"] = dict(place.config)

    def add(self, step: int, values: Values, when: float) -> None:
        """Draw values; see `Tracker`.

        Args:
            step: how many are done.
            values: by name.
            when: in seconds since 1970; Aim takes the time itself.
        """
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.close()


def open_tracker(place: TrackedRun) -> Tracker:
    """Open it for a run."""
    return Aim(place)
