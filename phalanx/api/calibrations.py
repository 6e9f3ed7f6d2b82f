"""A machine measured: what `phalanx calibrate` writes, and every planning command takes."""

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.catalog import load
from phalanx.core.cluster import Cluster
from phalanx.core.errors import UsageError
from phalanx.core.html import html_table

if TYPE_CHECKING:
    from phalanx.trainer.run.worker import Worker

SCHEMA = 1
DEFAULT = Path("calibrated.toml")


@dataclass(frozen=True)
class Calibration:
    """What was measured on a machine.

    Attributes:
        path: of the file.
        tables: what it says.
    """

    path: Path
    tables: dict[str, Any]

    @property
    def cluster(self) -> Cluster:
        """The devices, as planning takes them."""
        return load.cluster(str(self.path))

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx calibrate --json` prints: the content of the file."""
        return {"schema": SCHEMA, **self.tables}

    def _repr_html_(self) -> str:
        """What was found, for a notebook."""
        rows = [(key, value) for key, value in self.tables["sustained"].items()]
        return html_table(str(self.path), rows, ("share", "measured"))


def read_calibration(path: Path) -> Calibration:
    """Read the file of a calibration.

    Args:
        path: of the file.

    Raises:
        UsageError: there is none, or it is something else.
    """
    tables = load.read_toml(path)
    if "measured" not in tables or "sustained" not in tables:
        raise UsageError(f"{path} was not written by phalanx calibrate; give another file")
    load.cluster(str(path))
    return Calibration(path, tables)


def require_writable(path: Path) -> None:
    """See that a file can be written, before minutes are spent on what goes in.

    Args:
        path: of the file; only a calibration is written over.

    Raises:
        UsageError: it cannot be read back by its name, its folder is missing or may not be
            written, or it holds something else.
    """
    if path.suffix != ".toml":
        raise UsageError(f"{path} does not end in .toml, by which clusters are known; rename it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; make it, or give another file")
    if not os.access(folder, os.W_OK | os.X_OK) or path.is_dir():
        raise UsageError(f"{path} cannot be written; give another file")
    if path.exists():
        try:
            known = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        if "measured" not in known:
            raise UsageError(f"{path} holds something else; remove it, or give another file")


def calibrate_rank(
    worker: "Worker", path: Path, tell: Callable[[str], None], *, quick: bool = False
) -> int:
    """Measure this machine with all ranks at once; rank 0 writes the file.

    Args:
        worker: this process, joined with the others.
        path: of the file; what was there stays until the new one is complete.
        tell: is told what comes next, on every rank.
        quick: less of everything, for a test.

    Returns:
        0.

    Raises:
        PhalanxError: the file cannot be written.
    """
    from phalanx.calibration.machine import cluster_of, tables_of
    from phalanx.calibration.text import to_toml
    from phalanx.trainer.calibrate.measure import measure
    from phalanx.trainer.run.rundir import write_text

    measured = measure(worker, path.absolute().parent, tell, quick=quick)
    if worker.rank == 0:
        tables = tables_of(measured)
        cluster_of(tables)  # what cannot be read is not written
        write_text(path, to_toml(tables))
    return 0
