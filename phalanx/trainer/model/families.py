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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.model import ModelShape
from phalanx.trainer.model.parameters import Declaration


class Place(NamedTuple):
    """Where one of our parameters lies among theirs.

    Attributes:
        name: of their tensor.
        part, parts: ours is this one of so many equal parts of theirs, along our first dim.
        transposed: theirs is [n_in, n_out].
        expert: theirs is the matrix of this expert in our stack of them; None where ours is none.
    """

    name: str
    part: int = 0
    parts: int = 1
    transposed: bool = False
    expert: int | None = None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their tensor, if ours has `shape`."""
        whole = (shape[0] * self.parts, *shape[1:])
        return whole[::-1] if self.transposed else whole


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        model_type: what a configuration calls it.
        architecture: the class that loads it.
        kind: what all its models have in common, as fields of our shape.
        keys: what a configuration calls the other fields of our shape.
        silent: our value where a configuration does not say, or theirs of a key in `fixed`.
        fixed: what a configuration must say for the arithmetic to be ours; silence is consent
            unless `silent` says otherwise.
        aliases: two keys of a configuration that must agree, because one field of ours is both.
        modules: what it calls our modules, `{}` for the layer.
        fused: our modules that are parts of one of theirs, in order.
        transposes: the matrices of blocks are [n_in, n_out].
        window: what a configuration calls how many tokens back attention looks, if it has a word.
        window_switch: the key that must be true for the window to count, if there is one.
    """

    model_type: str
    architecture: str
    kind: Mapping[str, Any]
    keys: Mapping[str, str]
    silent: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    modules: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[str, ...] = ()
    transposes: bool = False
    window: str = ""
    window_switch: str = ""

    def places(self, declaration: Declaration) -> list[Place]:
        """Where it keeps a parameter of ours: one tensor, or one for each expert."""
        module, _, attribute = declaration.name.rpartition(".")
        layer = ""
        if module.startswith("blocks."):
            _, layer, module = module.split(".", 2)
        theirs = f"{self.modules[module]}.{attribute}"
        if declaration.expert_dim is not None:
            experts = range(declaration.shape[declaration.expert_dim])
            return [Place(theirs.format(layer, e), expert=e) for e in experts]
        place = Place(
            name=theirs.format(layer),
            part=self.fused.index(module) if module in self.fused else 0,
            parts=len(self.fused) if module in self.fused else 1,
            transposed=self.transposes and bool(layer) and len(declaration.shape) > 1,
        )
        return [place]

    def configuration(self, shape: ModelShape) -> dict[str, Any]:
        """What `config.json` says of a model."""
        said = {key: getattr(shape, field) for field, key in self.keys.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: allowed[0] for key, allowed in self.fixed.items()},
            **said,
            **{alias: said[key] for alias, key in self.aliases.items()},
            **({self.window: None} if self.window else {}),
            **({self.window_switch: False} if self.window_switch else {}),
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """The shape that a configuration describes.

        Raises:
            RefusedError: its arithmetic is not ours.
            UsageError: a size is missing, or none.
        """
        said = {**config, **_rotary(config), **_experts(config)}
        for key, allowed in self.fixed.items():
            self._require(key, said.get(key, self.silent.get(key, allowed[0])), allowed)
        values = {field: self._value(said, field) for field in self.keys}
        for twin, key in self.aliases.items():
            self._require(twin, said.get(twin, False), (said.get(key, False),))
        return ModelShape(**self.kind, **values)

    def has(self, shape: ModelShape) -> bool:
        """Whether what its configuration says of a model reads back as the same shape."""
        return replace(self.shape(self.configuration(shape)), name=shape.name) == shape

    def attention_window(self, config: Mapping[str, Any]) -> int | None:
        """How many tokens a token sees, itself included; None where it sees all before it.

        Our attention has no window: a shorter sequence does not need one.
        """
        if not self.window or not config.get(self.window_switch or "", not self.window_switch):
            return None
        size = config.get(self.window, self.silent.get(self.window))
        return size if isinstance(size, int) else None

    def _value(self, said: Mapping[str, Any], field: str) -> Any:
        key = self.keys[field]
        value = self.silent.get(field) if said.get(key) is None else said[key]
        if not isinstance(value, int | float):
            raise UsageError(f"a configuration of {self.model_type} has {key}={value!r}, no number")
        return value

    def _require(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            options = " or ".join(str(option) for option in allowed)
            raise RefusedError(
                f"{key}={value} is not known for {self.model_type} models; it can be {options}"
            )


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of rotary positions, under the names of any version."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    return {**rotary, "rope_type": kind}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """How many experts it says, which of two names a version has for it."""
    return {"num_experts": config.get("num_experts", config.get("num_local_experts"))}


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
    fixed={"hidden_act": ("silu",), "rope_type": ("default",)},
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
        "rope_type": ("default",),
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
ALL = (LLAMA, GPT2, MISTRAL, QWEN2, QWEN3, STARCODER2, MIXTRAL, QWEN3_MOE)
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
    words = [str(values[key]) for key in ("norm", "activation", "positions")]
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
