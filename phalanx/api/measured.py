"""What a run has measured of failures and saves, for a plan of a whole training."""

import json
from dataclasses import replace
from pathlib import Path

from phalanx.core.errors import UsageError
from phalanx.cost.reliability import checkpoint_bytes
from phalanx.planner.goodput import Conditions


def measured_conditions(run: Path, assumed: Conditions) -> Conditions:
    """Put what a run has measured in the place of what is assumed, as far as it has.

    Args:
        run: its folder.
        assumed: by default: how often devices fail, for example, no short run can say.

    Returns:
        The mean restart, and the rate at which a save that stopped training as long as this run's
        would be written.

    Raises:
        UsageError: it has no summary, or that has measured neither.
    """
    file = run / "summary.json"
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        restart = summary.get("restart_seconds")
        saving = summary.get("checkpoint_write_seconds")
        parameters = float(summary["parameters"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"cannot read what {run} has measured: {error}") from error
    if restart is None and not saving:
        raise UsageError(
            f"{run} has neither been restarted nor saved a checkpoint; take --restart and "
            "--storage from another run"
        )
    found = assumed
    if restart is not None:
        found = replace(found, restart=float(restart))
    if saving:
        found = replace(found, storage=checkpoint_bytes(parameters) / float(saving))
    return found
