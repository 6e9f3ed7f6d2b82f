import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.planner.parse import better_batch, both, read_limits, sequences_per_step, show_limits


@pytest.mark.parametrize(
    ("tokens", "seq", "devices", "batch"),
    [
        (16e6, 8192, 16384, 2048),  # what Llama 3 calls 16M
        (16 * 2**20, 8192, 16384, 2048),
        (3.2e6, 2048, 4096, 1536),  # what GPT-3 calls 3.2M
        (1e6, 8192, 72, 120),
        (8192, 8192, 8, 1),
        (24000, 8000, 512, 3),  # whole: nothing is rounded, whatever it shares with the devices
    ],
)
def test_tokens_are_rounded_to_sequences_that_devices_can_share(
    tokens: float, seq: int, devices: int, batch: int
):
    assert sequences_per_step(tokens, seq, devices) == batch


@pytest.mark.parametrize(
    ("batch", "devices", "better"),
    [(31250, 2**20, 32768), (2048, 16384, 2048), (3, 8, 3), (1000, 1024, 1024), (120, 8, 120)],
)
def test_a_batch_that_few_devices_can_share_has_a_better_one_near(
    batch: int, devices: int, better: int
):
    assert better_batch(batch, devices) == better


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 4096))
def test_a_whole_number_of_sequences_stays_what_it_is(batch: int, seq: int, devices: int):
    assert sequences_per_step(batch * seq, seq, devices) == batch


@given(st.floats(1e5, 1e9), st.sampled_from([2048, 4096, 8192]), st.integers(1, 4096))
def test_rounding_moves_it_by_five_percent_or_half_a_sequence(
    tokens: float, seq: int, devices: int
):
    batch = sequences_per_step(tokens, seq, devices)
    assert abs(batch - tokens / seq) <= max(0.05 * tokens / seq, 0.5)


@pytest.mark.parametrize(("tokens", "seq"), [(4000, 8192), (1e30, 8192), (1e6, 0)])
def test_steps_that_cannot_be_are_refused(tokens: float, seq: int):
    with pytest.raises(UsageError, match=r"sequences? of"):
        sequences_per_step(tokens, seq, 8)


def test_limits_are_read_as_a_layout_is_and_may_name_several_values():
    limits = read_limits("pp=16, schedule=1f1b|interleaved sp=off shard=8")
    assert limits == {
        "pp": {16},
        "schedule": {"1f1b", "interleaved"},
        "sp": {False},
        "shard": {8},
    }
    assert read_limits(show_limits({"tp": frozenset({4, 8})})) == {"tp": {4, 8}}
    assert read_limits("") == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppp=4", "unknown layout key 'ppp'; did you mean pp"),
        ("pp", "write key=value"),
        ("pp=4 pp=8", "stands twice"),
        ("pp=four", "pp is a whole number"),
        ("zero=7", "zero can be 0, 1, 2, 3"),
        ("schedule=pipedream", "another update"),
        ("stages=4+4", "the search leaves stages at its default"),
    ],
)
def test_words_that_limit_nothing_are_explained(words: str, message: str):
    with pytest.raises(UsageError) as raised:
        read_limits(words)
    assert message in str(raised.value)


def test_two_limits_leave_what_both_allow():
    merged = both(read_limits("tp=1|2|4 pp=2"), read_limits("tp=4|8 cp=1"))
    assert merged == {"tp": {4}, "pp": {2}, "cp": {1}}
