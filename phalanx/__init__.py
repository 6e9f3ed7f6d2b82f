"""Phalanx: many ranks, one update.

The same functions as the command line has, for scripts and notebooks. Importing the package is
free; each name brings what it needs when it is first used, and torch comes only with training.

Example:
    >>> import phalanx
    >>> found = phalanx.estimate("llama-3.1-8b", "h100x8", "tp=8", batch=8, seq=8192)
    >>> found.peak_bytes < 80e9
    True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.api.checkpoints import CheckpointList as CheckpointList
    from phalanx.api.checkpoints import checkpoints as checkpoints
    from phalanx.api.drills import DrillReport as DrillReport
    from phalanx.api.drills import drill as drill
    from phalanx.api.dryruns import DryRun as DryRun
    from phalanx.api.dryruns import dry_run as dry_run
    from phalanx.api.planning import estimate as estimate
    from phalanx.api.planning import messages as messages
    from phalanx.api.plans import Plan as Plan
    from phalanx.api.plans import plan as plan
    from phalanx.api.publications import Published as Published
    from phalanx.api.publications import published as published
    from phalanx.api.reports import doctor as doctor
    from phalanx.api.reports import report as report
    from phalanx.api.schedules import schedule as schedule
    from phalanx.api.training import Summary as Summary
    from phalanx.api.training import train as train
    from phalanx.api.verification import Verdict as Verdict
    from phalanx.api.verification import verify as verify
    from phalanx.core.cluster import Cluster as Cluster
    from phalanx.core.errors import CheckpointError as CheckpointError
    from phalanx.core.errors import DataError as DataError
    from phalanx.core.errors import PhalanxError as PhalanxError
    from phalanx.core.errors import RefusedError as RefusedError
    from phalanx.core.errors import ScheduleError as ScheduleError
    from phalanx.core.errors import UsageError as UsageError
    from phalanx.core.estimate import Estimate as Estimate
    from phalanx.core.layout import Layout as Layout
    from phalanx.core.message import Message as Message
    from phalanx.core.model import ModelShape as ModelShape
    from phalanx.core.run import Recipe as Recipe
    from phalanx.core.run import Run as Run
    from phalanx.core.schedule import Schedule as Schedule
    from phalanx.reports.finding import Findings as Findings
    from phalanx.reports.report import RunReport as RunReport

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("dry_run", "DryRun"), "phalanx.api.dryruns"),
    **dict.fromkeys(("checkpoints", "CheckpointList"), "phalanx.api.checkpoints"),
    **dict.fromkeys(("estimate", "messages"), "phalanx.api.planning"),
    **dict.fromkeys(("plan", "Plan"), "phalanx.api.plans"),
    **dict.fromkeys(("published", "Published"), "phalanx.api.publications"),
    "Message": "phalanx.core.message",
    **dict.fromkeys(("report", "doctor"), "phalanx.api.reports"),
    "RunReport": "phalanx.reports.report",
    "Findings": "phalanx.reports.finding",
    "schedule": "phalanx.api.schedules",
    **dict.fromkeys(("drill", "DrillReport"), "phalanx.api.drills"),
    **dict.fromkeys(("verify", "Verdict"), "phalanx.api.verification"),
    **dict.fromkeys(("train", "Summary"), "phalanx.api.training"),
    "Cluster": "phalanx.core.cluster",
    "Estimate": "phalanx.core.estimate",
    "Layout": "phalanx.core.layout",
    "ModelShape": "phalanx.core.model",
    **dict.fromkeys(("Recipe", "Run"), "phalanx.core.run"),
    "Schedule": "phalanx.core.schedule",
    **dict.fromkeys(("PhalanxError", "UsageError", "RefusedError"), "phalanx.core.errors"),
    **dict.fromkeys(("ScheduleError", "DataError", "CheckpointError"), "phalanx.core.errors"),
}
__all__ = [
    "CheckpointError",
    "CheckpointList",
    "Cluster",
    "DataError",
    "DrillReport",
    "DryRun",
    "Estimate",
    "Findings",
    "Layout",
    "Message",
    "ModelShape",
    "PhalanxError",
    "Plan",
    "Published",
    "Recipe",
    "RefusedError",
    "Run",
    "RunReport",
    "Schedule",
    "ScheduleError",
    "Summary",
    "UsageError",
    "Verdict",
    "checkpoints",
    "doctor",
    "drill",
    "dry_run",
    "estimate",
    "messages",
    "plan",
    "published",
    "report",
    "schedule",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what a public name stands for, once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted([*globals(), *_HOMES])
