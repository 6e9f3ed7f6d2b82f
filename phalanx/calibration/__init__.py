"""Turns what was measured on a machine into a cluster that can be planned on.

The shares that a planner needs are those with which its own formulas give the measured seconds.
"""
