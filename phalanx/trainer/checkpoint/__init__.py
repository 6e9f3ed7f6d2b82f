"""Checkpoints: saved by many ranks while they train, read under any layout, or not trusted at all.

A checkpoint is a directory of safetensors files and one JSON manifest with their sizes and hashes.
Nothing in it is ever executed. `names` says what lies where, `agreement` how ranks commit.

What only lists and verifies needs no torch: names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.trainer.checkpoint.find import newest as newest
    from phalanx.trainer.checkpoint.find import open_verified as open_verified
    from phalanx.trainer.checkpoint.piece import Piece as Piece
    from phalanx.trainer.checkpoint.read import Checkpoint as Checkpoint
    from phalanx.trainer.checkpoint.saver import Saver as Saver

_HOMES = {
    "newest": "find",
    "open_verified": "find",
    "Piece": "piece",
    "Checkpoint": "read",
    "Saver": "saver",
}
__all__ = ["Checkpoint", "Piece", "Saver", "newest", "open_verified"]


def __getattr__(name: str) -> Any:
    """Import what a public name stands for, once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
