"""Sizes and schedules that Hypothesis draws in these tests."""

from hypothesis import strategies as st

from phalanx.core.schedule import Schedule
from phalanx.schedules.build import build


@st.composite
def schedules(draw: st.DrawFn, most: int = 5) -> Schedule:
    """Any schedule that can be trained with, on at most `most` ranks."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    if name == "interleaved":
        p, v = draw(st.integers(2, most)), draw(st.integers(2, 4))
        return build(name, p, p * draw(st.integers(1, 4)), v)
    return build(name, draw(st.integers(1, most)), draw(st.integers(1, 3 * most)))
