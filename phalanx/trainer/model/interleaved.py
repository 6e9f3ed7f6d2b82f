"""Which rows of another architecture's tensors are ours, where several lie in one.

And what else such architectures say in a way of their own.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.model import ModelShape
from phalanx.trainer.model.family import RowMap, yarn_scale


def local_theta(said: Mapping[str, Any]) -> float:
    """The base of the wavelengths in layers with a window (Gemma 3)."""
    found = (said.get("rope_parameters") or {}).get("sliding_attention", {})
    return float(found.get("rope_theta") or said.get("rope_local_base_freq") or 10_000.0)


def _turned_last(shape: ModelShape) -> NDArray[np.int64]:
    """Their channel for each of ours in a head: they turn its first channels, and we its last."""
    d, turned = shape.head_dim, shape.rotary_dim
    return np.concatenate([np.arange(turned, d), np.arange(turned)])


def in_a_row(shape: ModelShape, name: str) -> RowMap:
    """Queries, then keys, then values, in one tensor (Phi-3).

    Args:
        shape: of the model.
        name: q, k or v.
    """
    d, counts = shape.head_dim, (shape.heads, shape.kv_heads, shape.kv_heads)
    which = "qkv".index(name)
    heads = np.arange(counts[which])[:, None] + sum(counts[:which])
    channels = np.arange(d) if name == "v" else _turned_last(shape)
    return RowMap((heads * d + channels).ravel(), d * sum(counts))


def by_head(shape: ModelShape, which: int) -> RowMap:
    """Query, key and value of one head after the other (GPT-NeoX).

    Args:
        shape: of the model.
        which: 0 queries, 1 keys, 2 values.
    """
    d, heads = shape.head_dim, np.arange(shape.heads)[:, None]
    channels = np.arange(d) if which == 2 else _turned_last(shape)
    return RowMap(((3 * heads + which) * d + channels).ravel(), 3 * d * shape.heads)


def latent_rows(shape: ModelShape, name: str) -> RowMap:
    """RowMap of latent attention: DeepSeek turns neighbours (2i, 2i + 1), and we (i, i + d/2).

    Args:
        shape: of the model.
        name: q, kv_down, k_rope, k_up or v_up.
    """
    nope, rope, value, rank = shape.qk_nope, shape.qk_rope, shape.v_head, shape.kv_lora_rank
    heads = np.arange(shape.heads)[:, None]
    pairs = np.concatenate([np.arange(0, rope, 2), np.arange(1, rope, 2)])
    match name:
        case "q":
            channels = np.concatenate([np.arange(nope), nope + pairs])
            return RowMap((heads * (nope + rope) + channels).ravel(), shape.heads * (nope + rope))
        case "kv_down":
            return RowMap(np.arange(rank), rank + rope)
        case "k_rope":
            return RowMap(rank + pairs, rank + rope)
        case "k_up":
            channels = np.arange(nope)
        case _:
            channels = nope + np.arange(value)
    return RowMap((heads * (nope + value) + channels).ravel(), shape.heads * (nope + value))


def latent_scale(said: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of a stretched model are scaled up (DeepSeek-V2, arXiv:2405.04434, section 3.1.4)."""
    scale = said.get("mscale_all_dim") or 0
    found: dict[str, Any] = {"kv_heads": int(said["num_attention_heads"])}
    if said["rope_type"] != "yarn" or not scale:
        return found
    width = said["qk_nope_head_dim"] + said["qk_rope_head_dim"]
    grown = yarn_scale(float(said["factor"]), float(scale))
    return {**found, "attention_scale": width**-0.5 * grown**2}


def latent_rope(shape: ModelShape) -> dict[str, Any]:
    """The way back: `mscale_all_dim` from the scale of scores, `mscale` from that of angles."""
    rope = shape.rope
    if rope.kind != "yarn" or not shape.attention_scale or rope.factor <= 1:
        return {}
    per = 0.1 * math.log(rope.factor)
    grown = math.sqrt(shape.attention_scale * math.sqrt(shape.qk_width))
    said = {
        "rope_type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original,
        "beta_fast": rope.fast,
        "beta_slow": rope.slow,
        "mscale_all_dim": round((grown - 1) / per, 9),
        "mscale": round(((rope.attention or grown) * grown - 1) / per, 9),
    }
    return {"rope_scaling": said}
