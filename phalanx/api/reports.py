"""A run explained, and what to change: `phalanx.report` and `phalanx.doctor`."""

from pathlib import Path

from phalanx.api.names import ClusterLike, cluster_of
from phalanx.core.errors import require_type
from phalanx.reports.causes import causes
from phalanx.reports.difference import ReportDifference
from phalanx.reports.finding import Findings
from phalanx.reports.machine import examine
from phalanx.reports.report import RunReport, report_on

_PATH = "the folder of a run, such as runs/NAME"
RUNS = Path("runs")


def report(path: str | Path, *, cluster: ClusterLike | None = None) -> RunReport:
    """Where the time of a run went, beside what the planner expects of it.

    The folder may have been copied from another machine, and the run may be training.

    Args:
        path: the folder of the run.
        cluster: the devices to plan it on; None for those that it ran on, where the catalog knows
            them. On a CPU its measured peak stands for them.

    Returns:
        The terms of a step, which add up to it, and of the wall clock; bytes, ranks, events.

    Raises:
        UsageError: the folder is no run, or nobody knows the cluster.

    Example:
        >>> import phalanx
        >>> found = phalanx.report("tests/reports/recorded")
        >>> found.state, found.terms[0].name
        ('done', 'arithmetic at the peak')
    """
    require_type("path", path, (str, Path), _PATH)
    return report_on(Path(path), None if cluster is None else cluster_of(cluster))


def compare_reports(first: RunReport, second: RunReport) -> ReportDifference:
    """What changed between two runs, term by term, and which keys of their files differ.

    Args:
        first: the run that is compared with.
        second: the run that is asked about.
    """
    return ReportDifference(first, second)


def doctor(path: str | Path | None = None, *, cluster: ClusterLike | None = None) -> Findings:
    """What to change: of a run that was done, or of this machine before one.

    Args:
        path: the folder of a run; None looks at this machine.
        cluster: the devices of the run, as `report` takes them.

    Returns:
        Every cause in the order in which to check it, seen or not, with evidence, a change, and
        the share that the planner expects it to bring.

    Raises:
        UsageError: the folder is no run, or nobody knows the cluster.

    Example:
        >>> import phalanx
        >>> phalanx.doctor().findings[0].cause
        'versions'
    """
    if path is None:
        return Findings("this machine", examine(RUNS))
    found = report(path, cluster=cluster)
    return Findings(found.name, causes(found), found.notes)
