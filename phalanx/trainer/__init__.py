"""The trainer: everything that imports torch."""
