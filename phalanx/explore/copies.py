"""What can be taken away from the page: a command, and a run file."""

import shlex

from phalanx.api.names import is_of_catalog
from phalanx.core.run import Recipe, Run
from phalanx.explore.asked import batch_of, cluster_of, layout_of, shape_of
from phalanx.explore.state import Reading, State


def command_of(state: State) -> str:
    """The command that prices what the page shows; with changed sizes or rates, the one that opens it.

    Args:
        state: of the page.

    Raises:
        PhalanxError: the state cannot be.
    """
    reading = Reading(state)
    shape, cluster, layout = shape_of(reading), cluster_of(reading), layout_of(reading)
    if not is_of_catalog(shape) or "changed" in cluster.name:
        return f"phalanx explore --state {shlex.quote(state.query())}"
    return (
        f"phalanx estimate {shape.name} {cluster.name} --layout {shlex.quote(str(layout))} "
        f"--batch {batch_of(reading)} --seq {reading.whole('seq')}"
    )


def run_file_of(state: State) -> str:
    """The state as a run file for `phalanx train`.

    Args:
        state: of the page.

    Raises:
        PhalanxError: the state cannot be.
    """
    reading = Reading(state)
    recipe = Recipe(seq=reading.whole("seq"), batch=batch_of(reading))
    cluster = cluster_of(reading)
    name = "" if "changed" in cluster.name else cluster.name
    run = Run(model=shape_of(reading), layout=layout_of(reading), recipe=recipe, cluster=name)
    return run.to_toml()
