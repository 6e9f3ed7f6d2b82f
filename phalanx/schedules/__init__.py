"""Pipeline schedules: who does what, in which order. Lists only; nothing here runs a model."""
