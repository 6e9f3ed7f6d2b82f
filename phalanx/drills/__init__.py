"""Drills: a user's own run, injured on purpose, compared with the run that was left alone."""
