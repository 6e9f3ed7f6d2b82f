"""What hides messages behind arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.roofline import SwitchedFabric, domain_weights_floor, expected_ranks

rates = st.floats(1e10, 1e12)


@given(st.integers(1, 512), st.sampled_from([8, 72]), rates, rates)
def test_inner_sharding_never_raises_the_floor(inner: int, G: int, local: float, nic: float):
    fabric = SwitchedFabric(G, local, G * nic)
    assert domain_weights_floor(1e15, fabric, inner) <= domain_weights_floor(1e15, fabric)


@given(st.integers(1, 512), st.integers(1, 64))
def test_a_token_visits_fewer_ranks_than_experts(e: int, k: int):
    assert expected_ranks(e, k) <= min(e, k) + 1e-9
