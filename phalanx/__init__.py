"""Phalanx: many ranks, one update."""

__version__ = "0.1.0"
