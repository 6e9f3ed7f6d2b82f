"""Sizes and schedules that Hypothesis draws in these tests."""

from collections.abc import Sequence

from hypothesis import strategies as st

from phalanx.core.schedule import Schedule
from phalanx.schedules.registry import NAMES, find_schedule

WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved", "pipedream")


@st.composite
def schedules(draw: st.DrawFn, names: Sequence[str] = NAMES, most: int = 5) -> Schedule:
    """Any schedule of these names that can be had, on at most `most` ranks or so."""
    spec = find_schedule(draw(st.sampled_from(names)))
    p = spec.ranks.fewest(draw(st.integers(1, most)))
    m = spec.micro_batches(p).fewest(draw(st.integers(1, 3 * most)))
    return spec.build(p, m, spec.chunks.fewest(draw(st.integers(1, 4))))
