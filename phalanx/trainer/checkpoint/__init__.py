"""Checkpoints: saved by many ranks while they train, read under any layout, or not trusted at all.

A checkpoint is a directory of safetensors files and one JSON manifest with their sizes and hashes.
Nothing in it is ever executed. `names` says what lies where, `agreement` how ranks commit.
"""

from phalanx.trainer.checkpoint.find import newest
from phalanx.trainer.checkpoint.piece import Piece
from phalanx.trainer.checkpoint.read import Checkpoint
from phalanx.trainer.checkpoint.saver import Saver

__all__ = ["Checkpoint", "Piece", "Saver", "newest"]
