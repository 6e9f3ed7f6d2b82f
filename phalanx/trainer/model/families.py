"""Architectures of Hugging Face Transformers: their names, their shapes, their configuration.

    ours                       llama                             gpt2
    embedding                  model.embed_tokens                transformer.wte
    blocks.0.attention_norm    model.layers.0.input_layernorm    transformer.h.0.ln_1
    blocks.0.attention.q       model.layers.0.self_attn.q_proj   transformer.h.0.attn.c_attn, 1 of 3
    blocks.0.mlp.down          model.layers.0.mlp.down_proj      transformer.h.0.mlp.c_proj
    head                       lm_head                           lm_head

GPT-2 keeps the matrices of its blocks transposed, and q, k and v in one. Mistral, Qwen2, Qwen3 and
Starcoder2 are named as Llama is; so are Mixtral and Qwen3-MoE, but for their experts: ours are one
stack of matrices, theirs a tensor each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.core.errors import RefusedError
from phalanx.core.model import ModelShape
from phalanx.trainer.model.family import Family, RowMap
from phalanx.trainer.model.interleaved import (
    by_head,
    in_a_row,
    latent_rope,
    latent_rows,
    latent_scale,
    local_theta,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    kind={"norm": "rmsnorm", "activation": "swiglu", "positions": "rope"},
    keys={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
        "tied": "tie_word_embeddings",
        "bias": "attention_bias",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
        "max_positions": "max_position_embeddings",
    },
    silent={
        "kv_heads": 0,
        "head_dim": 0,
        "tied": False,
        "bias": False,
        "rope_theta": 10_000.0,
        "norm_eps": 1e-6,
        "max_positions": 2048,
    },
    fixed={"hidden_act": ("silu",)},
    aliases={"mlp_bias": "attention_bias"},
    modules={
        "embedding": "model.embed_tokens",
        "attention_norm": "model.layers.{}.input_layernorm",
        "attention.q": "model.layers.{}.self_attn.q_proj",
        "attention.k": "model.layers.{}.self_attn.k_proj",
        "attention.v": "model.layers.{}.self_attn.v_proj",
        "attention.o": "model.layers.{}.self_attn.o_proj",
        "mlp_norm": "model.layers.{}.post_attention_layernorm",
        "mlp.gate": "model.layers.{}.mlp.gate_proj",
        "mlp.up": "model.layers.{}.mlp.up_proj",
        "mlp.down": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    kind={"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    keys={
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "ffn": "n_inner",
        "vocab": "vocab_size",
        "tied": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
        "max_positions": "n_positions",
    },
    silent={"ffn": 0, "tied": True, "norm_eps": 1e-5},
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    modules={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "attention_norm": "transformer.h.{}.ln_1",
        "attention.q": "transformer.h.{}.attn.c_attn",
        "attention.k": "transformer.h.{}.attn.c_attn",
        "attention.v": "transformer.h.{}.attn.c_attn",
        "attention.o": "transformer.h.{}.attn.c_proj",
        "mlp_norm": "transformer.h.{}.ln_2",
        "mlp.up": "transformer.h.{}.mlp.c_fc",
        "mlp.down": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    fused=("attention.q", "attention.k", "attention.v"),
    transposes=True,
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys={ours: key for ours, key in LLAMA.keys.items() if ours != "bias"},
    silent={**LLAMA.silent, "kv_heads": 8, "sliding_window": 4096},
    aliases={},
    window="sliding_window",
)
QWEN2 = replace(
    MISTRAL,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    kind={**LLAMA.kind, "qkv_bias": True},
    silent={**LLAMA.silent, "kv_heads": 32, "max_positions": 32768, "sliding_window": 4096},
    window_switch="use_sliding_window",
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    kind={**LLAMA.kind, "qk_norm": True},
    silent={**QWEN2.silent, "head_dim": 128},
    fixed={**QWEN2.fixed, "attention_bias": (False,)},
    modules={
        **LLAMA.modules,
        "attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "attention.k_norm": "model.layers.{}.self_attn.k_norm",
    },
)
STARCODER2 = replace(
    MISTRAL,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    kind={"norm": "layernorm", "activation": "gelu", "positions": "rope", "bias": True},
    keys={**MISTRAL.keys, "norm_eps": "norm_epsilon"},
    silent={**LLAMA.silent, "kv_heads": 2, "tied": True, "norm_eps": 1e-5, "max_positions": 4096},
    fixed={
        "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
        "use_bias": (True,),
    },
    modules={
        **{ours: name for ours, name in LLAMA.modules.items() if ours != "mlp.gate"},
        "mlp.up": "model.layers.{}.mlp.c_fc",
        "mlp.down": "model.layers.{}.mlp.c_proj",
    },
)
MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        **MISTRAL.keys,
        "moe_ffn": "intermediate_size",
        "experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
    },
    silent={**MISTRAL.silent, "sliding_window": None, "experts": 8, "top_k": 2}
    | {"norm_eps": 1e-5, "rope_theta": 1e6, "max_positions": 131072},
    modules={
        **{ours: name for ours, name in LLAMA.modules.items() if not ours.startswith("mlp.")},
        "router": "model.layers.{}.block_sparse_moe.gate",
        "experts.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "experts.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "experts.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    },
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={
        **QWEN3.keys,
        "moe_ffn": "moe_intermediate_size",
        "experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "normalised": "norm_topk_prob",
    },
    silent={**QWEN3.silent, "head_dim": 0, "kv_heads": 4, "moe_ffn": 768, "experts": 128}
    | {"top_k": 8, "normalised": False},
    fixed={**QWEN3.fixed, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    modules={
        **{ours: name for ours, name in QWEN3.modules.items() if not ours.startswith("mlp.")},
        "router": "model.layers.{}.mlp.gate",
        "experts.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "experts.up": "model.layers.{}.mlp.experts.{}.up_proj",
        "experts.down": "model.layers.{}.mlp.experts.{}.down_proj",
    },
)
GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    kind={**LLAMA.kind, "activation": "geglu", "norms": "both"},
    silent={**LLAMA.silent, "kv_heads": 4, "head_dim": 256, "tied": True, "max_positions": 8192}
    | {"sliding_window": 4096},
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    aliases={},
    modules={
        **LLAMA.modules,
        "attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
        "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    window="sliding_window",
    full_every=2,
    shifted=True,
    reads=lambda said: {
        "attention_cap": said.get("attn_logit_softcapping", 50.0) or 0.0,
        "logit_cap": said.get("final_logit_softcapping", 30.0) or 0.0,
        "attention_scale": said.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": said["hidden_size"] ** 0.5,
    },
    writes=lambda shape: {
        "attn_logit_softcapping": shape.attention_cap or None,
        "final_logit_softcapping": shape.logit_cap or None,
        "query_pre_attn_scalar": round((shape.attention_scale or 1.0) ** -2),
        "hidden_act": "gelu_pytorch_tanh",
    },
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    kind={**GEMMA2.kind, "qk_norm": True},
    silent={**GEMMA2.silent, "max_positions": 131072, "rope_theta": 1e6},
    modules={
        **GEMMA2.modules,
        "attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "attention.k_norm": "model.layers.{}.self_attn.k_norm",
    },
    full_every=6,
    reads=lambda said: {
        "attention_cap": said.get("attn_logit_softcapping") or 0.0,
        "logit_cap": said.get("final_logit_softcapping") or 0.0,
        "attention_scale": said.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": said["hidden_size"] ** 0.5,
        "local_theta": local_theta(said),
    },
    writes=lambda shape: {
        **GEMMA2.writes(shape),
        "rope_local_base_freq": shape.local_theta,
    },
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    kind={**LLAMA.kind, "norms": "after", "qk_norm": True, "norm_all_heads": True},
    silent={**LLAMA.silent, "norm_eps": 1e-5},
    aliases={},
    modules={
        **LLAMA.modules,
        "attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "attention.k_norm": "model.layers.{}.self_attn.k_norm",
        "attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
)
PHI3 = replace(
    MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    silent={**LLAMA.silent, "norm_eps": 1e-5, "max_positions": 4096},
    modules={
        **LLAMA.modules,
        **dict.fromkeys(
            ("attention.q", "attention.k", "attention.v"), "model.layers.{}.self_attn.qkv_proj"
        ),
        **dict.fromkeys(("mlp.gate", "mlp.up"), "model.layers.{}.mlp.gate_up_proj"),
    },
    rows={
        "attention.q": lambda shape: in_a_row(shape, "q"),
        "attention.k": lambda shape: in_a_row(shape, "k"),
        "attention.v": lambda shape: in_a_row(shape, "v"),
        "mlp.gate": lambda shape: RowMap(np.arange(shape.ffn), 2 * shape.ffn),
        "mlp.up": lambda shape: RowMap(np.arange(shape.ffn) + shape.ffn, 2 * shape.ffn),
    },
    reads=lambda said: {"rotary_share": said.get("partial_rotary_factor") or 1.0},
    writes=lambda shape: {"partial_rotary_factor": shape.rotary_share},
)
NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    kind={"norm": "layernorm", "positions": "rope", "bias": True},
    keys={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
        "tied": "tie_word_embeddings",
        "rope_theta": "rope_theta",
        "norm_eps": "layer_norm_eps",
        "max_positions": "max_position_embeddings",
        "parallel_branches": "use_parallel_residual",
    },
    silent={"tied": False, "rope_theta": 10_000.0, "norm_eps": 1e-5, "max_positions": 2048}
    | {"parallel_branches": True},
    fixed={"attention_bias": (True,)},
    modules={
        "embedding": "gpt_neox.embed_in",
        "attention_norm": "gpt_neox.layers.{}.input_layernorm",
        **dict.fromkeys(
            ("attention.q", "attention.k", "attention.v"),
            "gpt_neox.layers.{}.attention.query_key_value",
        ),
        "attention.o": "gpt_neox.layers.{}.attention.dense",
        "mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    rows={
        "attention.q": lambda shape: by_head(shape, 0),
        "attention.k": lambda shape: by_head(shape, 1),
        "attention.v": lambda shape: by_head(shape, 2),
    },
    reads=lambda said: {
        "activation": {"gelu": "gelu-erf"}.get(said.get("hidden_act", "gelu"), "gelu"),
        "rotary_share": said.get("partial_rotary_factor", said.get("rotary_pct", 0.25)),
        "rope_theta": float(said.get("rope_theta") or said.get("rotary_emb_base") or 10_000.0),
    },
    writes=lambda shape: {
        "hidden_act": "gelu" if shape.activation == "gelu-erf" else "gelu_new",
        "rotary_pct": shape.rotary_share,
        "rotary_emb_base": shape.rope_theta,
        "partial_rotary_factor": shape.rotary_share,
    },
)
DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    kind={**LLAMA.kind, "routing": "sigmoid"},
    keys={
        **{ours: key for ours, key in LLAMA.keys.items() if ours not in ("head_dim", "bias")},
        "moe_ffn": "moe_intermediate_size",
        "experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "normalised": "norm_topk_prob",
        "expert_groups": "n_group",
        "groups_kept": "topk_group",
        "routed_scale": "routed_scaling_factor",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope": "qk_nope_head_dim",
        "qk_rope": "qk_rope_head_dim",
        "v_head": "v_head_dim",
    },
    silent={**LLAMA.silent, "q_lora_rank": 0, "max_positions": 4096},
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    aliases={},
    modules={
        **{ours: name for ours, name in LLAMA.modules.items() if ours[-2:] not in (".k", ".v")},
        "attention.q_down": "model.layers.{}.self_attn.q_a_proj",
        "attention.q_norm": "model.layers.{}.self_attn.q_a_layernorm",
        "attention.q_up": "model.layers.{}.self_attn.q_b_proj",
        "attention.kv_down": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "attention.k_rope": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "model.layers.{}.self_attn.kv_a_layernorm",
        "attention.k_up": "model.layers.{}.self_attn.kv_b_proj",
        "attention.v_up": "model.layers.{}.self_attn.kv_b_proj",
        "router": "model.layers.{}.mlp.gate",
        **{
            f"{ours}.{n}": f"model.layers.{{}}.mlp.{theirs}.{n}_proj"
            for ours, theirs in (("experts", "experts.{}"), ("shared", "shared_experts"))
            for n in ("gate", "up", "down")
        },
    },
    rows={
        "attention.q": lambda shape: latent_rows(shape, "q"),
        "attention.q_up": lambda shape: latent_rows(shape, "q"),
        "attention.kv_down": lambda shape: latent_rows(shape, "kv_down"),
        "attention.k_rope": lambda shape: latent_rows(shape, "k_rope"),
        "attention.k_up": lambda shape: latent_rows(shape, "k_up"),
        "attention.v_up": lambda shape: latent_rows(shape, "v_up"),
    },
    reads=latent_scale,
    writes=lambda shape: {"q_lora_rank": shape.q_lora_rank or None, **latent_rope(shape)},
    router_bias="model.layers.{}.mlp.gate.e_score_correction_bias",
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    kind={**LLAMA.kind, "routing": "softmax", "normalised": False},
    keys={ours: key for ours, key in DEEPSEEK_V3.keys.items() if ours != "normalised"},
    silent={**DEEPSEEK_V3.silent, "shared_experts": 0, "routed_scale": 1.0}
    | {"dense_layers": 0, "expert_groups": 1, "groups_kept": 1},
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("group_limited_greedy", "greedy"),
    },
    router_bias="",
)
ALL = (
    LLAMA,
    GPT2,
    MISTRAL,
    QWEN2,
    QWEN3,
    STARCODER2,
    MIXTRAL,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    OLMO2,
    PHI3,
    NEOX,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
)
FAMILIES = {f.model_type: f for f in ALL}


def family_of(shape: ModelShape) -> Family:
    """The family that has this model: what it says of it reads back as the same shape.

    Raises:
        RefusedError: there is none.
    """
    for family in FAMILIES.values():
        if family.has(shape):
            return family
    known = "; ".join(f"{name} ({_features(f.kind)})" for name, f in FAMILIES.items())
    raise RefusedError(
        f"Transformers has no model with {_features(vars(shape))}, {shape.kv_heads} kv heads of "
        f"{shape.heads}; it has {known}"
    )


def _features(values: Mapping[str, Any]) -> str:
    """What tells families apart, in a few words."""
    words = [str(values[key]) for key in ("norm", "activation", "positions") if key in values]
    switches = ("bias", "qkv_bias", "qk_norm", "experts", "kv_lora_rank")
    return ", ".join(words + [key for key in switches if values.get(key)])


def family_called(model_type: str) -> Family:
    """The family of a configuration.

    Raises:
        RefusedError: models of that kind are not trained here.
    """
    if model_type not in FAMILIES:
        raise RefusedError(
            f"a model of type {model_type!r} is not known; it can be {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
