"""Sizes that contradict each other are refused where they are given."""

import pytest

from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape

LATENT = {"kv_lora_rank": 20, "qk_nope": 12, "qk_rope": 6, "v_head": 14}


def test_latent_attention_says_how_wide_its_heads_are() -> None:
    shape = ModelShape(**LATENT)
    assert (shape.qk_width, shape.rotary_dim) == (18, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope": 0}, "model.qk_rope is 0; .* at least 1"),
        ({"qk_rope": 5}, "rope needs an even size; model.qk_rope is 5"),
        ({"v_head": 19}, r"v_head is 19; it can be up to qk_nope \+ qk_rope = 18"),
        ({"kv_heads": 2}, "model.kv_heads can be 4, not 2"),
        ({"qk_norm": True}, "use model.qk_norm=false"),
        ({"qkv_bias": True}, "use model.qkv_bias=false"),
    ],
)
def test_latent_attention_refuses_what_it_cannot_mean(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ModelShape(**{**LATENT, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": -4}, "model.experts is -4; it must be at least 0"),
        ({"shared_experts": -1}, "model.shared_experts is -1"),
        ({"experts": 4, "top_k": 2, "dense_layers": 5}, "of 4 layers it can be 0 to 4"),
        ({"kv_lora_rank": -1}, "model.kv_lora_rank is -1"),
        ({"norm_eps": float("inf")}, "model.norm_eps is inf"),
        ({"rope_theta": 0.0}, "model.rope_theta is 0; it must be above 0"),
    ],
)
def test_no_size_is_below_zero(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelShape(**changes)
