"""Drills from Python: `phalanx.drill` injures a run on this machine and compares the results."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.api.names import RunLike, run_of
from phalanx.core.errors import UsageError
from phalanx.core.html import html_table
from phalanx.drills.campaign import DrillCase, DrillRuns, drilled
from phalanx.drills.injuries import KINDS, injuries
from phalanx.drills.log import DrillLog
from phalanx.trainer.run.launch import require_torch
from phalanx.trainer.run.limits import refuse_untrainable

__all__ = ["KINDS", "DrillCase", "DrillLog", "DrillReport", "drill"]

STEPS = 12
SHORTEST = 6
KILLS = 3


@dataclass(frozen=True)
class DrillReport:
    """What came of a drill.

    Attributes:
        cases: one for each fault that came about, in order.
        unmet: faults that never came about, since the run does not come by there.
        seed: of all that was drawn.

    Example:
        >>> DrillReport(cases=(), unmet=(), seed=7).passed
        True
    """

    cases: tuple[DrillCase, ...]
    unmet: tuple[str, ...]
    seed: int

    @property
    def passed(self) -> bool:
        """Whether every injured run came to the bits of the undisturbed one."""
        return all(case.equal for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx drill --json` prints."""
        cases = [
            {key: value for key, value in asdict(case).items() if key != "happened"}
            for case in self.cases
        ]
        return {
            "schema": 1,
            "passed": self.passed,
            "seed": self.seed,
            "cases": cases,
            "unmet": list(self.unmet),
        }

    def _repr_html_(self) -> str:
        """The cases as a table, for a notebook."""
        headers = ("fault", "where", "rank", "noticed", "back", "steps repeated", "equal")
        rows = [
            (c.fault, c.where, c.rank, c.noticed_seconds, c.back_seconds, c.steps_repeated, c.equal)
            for c in self.cases
        ]
        return html_table(f"drill, seed {self.seed}", rows, headers)


def drill(
    run: RunLike,
    *,
    faults: Sequence[str] = (),
    kills: int = KILLS,
    steps: int = STEPS,
    seed: int = 0,
    log: DrillLog | None = None,
) -> DrillReport:
    """Injure a run on this machine, and compare each result with the undisturbed one, bit for bit.

    Args:
        run: the path of a run file, its tables, or a `Run`, for at most four ranks.
        faults: kinds of them: kill, random, crash, hang, preempt, corrupt; none means all.
        kills: how many at random instants.
        steps: of the run, at most; saves and a validation are among them.
        seed: of the steps, ranks and instants that are drawn.
        log: shows each case as it ends, and keeps it in a file, so that a drill that is started
            again goes on after those in it.

    Returns:
        For each fault when it was noticed, when the run was back at work, how many steps were
        done twice, and whether the bits are the same.

    Raises:
        UsageError: an unknown kind of fault, nothing to do, or the log of another drill.
        PhalanxError: somebody ended the drill; its exit code is 75.
        RefusedError: the run cannot be cut so, or needs more ranks than a drill starts.

    Example:
        >>> import phalanx
        >>> phalanx.drill({"layout": "dp=2"}, faults=["kil"])
        Traceback (most recent call last):
        phalanx.core.errors.UsageError: unknown kind of fault 'kil'; did you mean kill?
    """
    if steps < SHORTEST or kills < 0:
        raise UsageError(f"{steps} steps and {kills} kills; a drill needs {SHORTEST} steps or more")
    require_torch()
    resolved = drilled(run_of(run), steps)
    refuse_untrainable(resolved)
    planned = injuries(resolved, faults, kills, seed)
    log = log or DrillLog()
    log.open({"seed": seed, "kills": kills, "faults": list(faults), "run": resolved.to_toml()})
    with tempfile.TemporaryDirectory(prefix="phalanx-drill-", ignore_cleanup_errors=True) as home:
        campaign = DrillRuns(resolved, Path(home))
        found = [
            case
            for number, injury in enumerate(planned)
            for case in log.cases(number, partial(campaign.suffer, injury))
        ]
    cases = tuple(case for case in found if case.happened or not case.equal)
    unmet = tuple(f"{case.fault}, {case.where}" for case in found if not case.happened)
    return DrillReport(cases, unmet, seed)
