"""Sizes and schedules that Hypothesis draws in these tests."""

from collections.abc import Sequence

from hypothesis import strategies as st

from phalanx.core.schedule import Schedule
from phalanx.schedules.build import NAMES, build

WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved", "pipedream")


@st.composite
def schedules(draw: st.DrawFn, names: Sequence[str] = NAMES, most: int = 5) -> Schedule:
    """Any schedule of these names that can be had, on at most `most` ranks."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, most))
    if name == "interleaved":
        p = max(p, 2)
        return build(name, p, p * draw(st.integers(1, 4)), draw(st.integers(2, 4)))
    if name == "dualpipe":
        p += p % 2
        return build(name, p, 2 * p + 2 * draw(st.integers(0, 4)))
    if name == "dualpipev":
        return build(name, p, 2 * p + draw(st.integers(0, 6)))
    return build(name, p, draw(st.integers(1, 3 * most)))
