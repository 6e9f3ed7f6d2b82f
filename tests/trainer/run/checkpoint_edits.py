"""Copies of runs whose checkpoint says something else, with every checksum right."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.trainer.checkpoint.manifest import Manifest


def edited(run: Path, copy: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a run whose checkpoints' state is changed.

    Args:
        run: its folder.
        copy: to make.
        change: of the state, in place.
    """
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("step-*/manifest.json"):
        manifest = Manifest.decode(path.read_bytes())
        change(manifest.state)
        path.write_bytes(manifest.encode())
    return copy
