"""Frozen values that every room shares; standard library only."""
