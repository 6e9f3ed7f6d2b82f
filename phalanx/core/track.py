"""Where the figures of a run go besides its own files, as the table [track] says."""

from dataclasses import dataclass

from phalanx.core.errors import UsageError

TRACKERS = ("tensorboard", "wandb", "mlflow", "aim")


@dataclass(frozen=True, kw_only=True)
class Track:
    """Trackers that follow a run. `metrics.jsonl` is written in any case.

    Example:
        >>> Track(to="tensorboard+mlflow").trackers
        ('tensorboard', 'mlflow')

    Attributes:
        to: tensorboard, wandb, mlflow or aim, joined by a plus; empty for none. They write to the
            folder `track` of the run, unless their own environment variables name a server; W&B
            stays offline unless WANDB_MODE says otherwise. One that is not installed, or down, is
            told in a line, and training goes on.
        project: that the run is filed under there; MLflow and Aim say experiment.
    """

    to: str = ""
    project: str = "phalanx"

    def __post_init__(self) -> None:
        """Reject trackers that nobody knows."""
        for name in self.trackers:
            if name not in TRACKERS:
                raise UsageError(
                    f"track.to is {self.to!r}; it can be {', '.join(TRACKERS)}, joined by +"
                )
        if not self.project:
            raise UsageError("track.project is empty; it is a name, such as phalanx")

    @property
    def trackers(self) -> tuple[str, ...]:
        """Each of them once."""
        return tuple(dict.fromkeys(self.to.split("+"))) if self.to else ()
