"""MLflow: the server that MLFLOW_TRACKING_URI names, else a store in the run's folder."""

import os

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from phalanx.trainer.track.tracking import TrackedRun, Tracker, Values, remembered

MOST_PARAMS = 100  # of one request
MOST_LETTERS = 500


class MLflow:
    """A run of MLflow, taken up again where the run is resumed."""

    def __init__(self, place: TrackedRun) -> None:
        """Open it.

        Args:
            place: name, project, folder and values of the run.
        """
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is what we want
            uri = (place.folder / "mlflow").absolute().as_uri()
        self._client = MlflowClient(uri)
        self._id = remembered(place.folder / "mlflow-run", lambda: self._create(place))
        self._client.update_run(self._id, status="RUNNING")

    def add(self, step: int, values: Values, when: float) -> None:
        """Draw values; see `Tracker`.

        Args:
            step: how many are done.
            values: by name.
            when: in seconds since 1970.
        """
        metrics = [Metric(name, value, int(when * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Say that this part of the run is over."""
        self._client.set_terminated(self._id)

    def _create(self, place: TrackedRun) -> str:
        known = self._client.get_experiment_by_name(place.project)
        experiment = known.experiment_id if known else self._client.create_experiment(place.project)
        run = self._client.create_run(experiment, run_name=place.name).info.run_id
        params = [Param(key, value[:MOST_LETTERS]) for key, value in place.config.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run, params=params[first : first + MOST_PARAMS])
        return str(run)


def open_tracker(place: TrackedRun) -> Tracker:
    """Open it for a run."""
    return MLflow(place)
