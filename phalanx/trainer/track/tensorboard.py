"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

from torch.utils.tensorboard.writer import SummaryWriter

from phalanx.trainer.track.tracking import TrackedRun, Tracker, Values

FLUSH_SECONDS = 10


class TensorBoard:
    """A writer of event files. Steps that come again replace those that were drawn."""

    def __init__(self, place: TrackedRun) -> None:
        """Open the file.

        Args:
            place: name and folder of the run; what lies behind its first step is purged.
        """
        self._folder = str(place.folder / "tensorboard")
        self._last = place.first_step
        self._writer = self._open(place.first_step + 1)

    def add(self, step: int, values: Values, when: float) -> None:
        """Draw values; see `Tracker`.

        Args:
            step: how many are done.
            values: by name.
            when: in seconds since 1970.
        """
        if step < self._last:  # the run went back
            self._writer.close()
            self._writer = self._open(step)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _open(self, purge: int) -> SummaryWriter:
        return SummaryWriter(self._folder, purge_step=purge, flush_secs=FLUSH_SECONDS)


def open_tracker(place: TrackedRun) -> Tracker:
    """Open it for a run."""
    return TensorBoard(place)
