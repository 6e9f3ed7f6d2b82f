"""The sizes of a decoder-only transformer, and the facts that follow from them.

Symbols: L layers, h hidden, a heads, g kv heads, d head size, f ffn width, V vocabulary,
E experts, K experts per token, s sequence length.
"""

from dataclasses import dataclass, fields
from math import inf
from typing import Literal

from phalanx.core.errors import UsageError
from phalanx.core.operators import blocks, describe, elements
from phalanx.core.rope import RopeScaling

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "geglu", "gelu", "gelu-erf"]
Norms = Literal["before", "after", "both"]
Positions = Literal["rope", "learned"]
Routing = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything about a model that changes its parameters or its arithmetic.

    Example:
        >>> shape = ModelShape(layers=2, hidden=64, heads=4, vocab=256)
        >>> shape.head_dim, shape.params()
        (16, 139584)

    Attributes:
        name: what it is called in the catalog, or "custom".
        layers: L, number of transformer blocks.
        hidden: h, width of the residual stream.
        heads: a, query heads.
        kv_heads: g, key and value heads; 0 means as many as `heads`.
        head_dim: d, width of one head; 0 means hidden / heads.
        ffn: f, width of the MLP; 0 means 4 h for gelu, 8/3 h rounded up to 64 for swiglu.
        vocab: V, number of token ids.
        tied: the output head is the embedding, transposed.
        norm: of the residual stream, before attention and the MLP.
        activation: of the MLP; swiglu and geglu have three matrices, gelu (by tanh) and gelu-erf
            two.
        positions: rotary embeddings in attention, or a learned table.
        rope_theta: base of the wavelengths of rotary embeddings.
        norm_eps: added to the variance in norms.
        max_positions: rows of the learned position table.
        bias: linear layers carry a bias (GPT family), but for those of latent attention.
        qkv_bias: queries, keys and values carry a bias, whatever `bias` says (Qwen2).
        qk_norm: an RMSNorm of each query and key head before positions (Qwen3).
        experts: E, routed experts of a layer; 0 means that every layer is dense.
        top_k: K, routed experts that each token visits.
        shared_experts: experts that every token visits.
        moe_ffn: width of one expert; 0 means `ffn`.
        dense_layers: first layers that are dense in a mixture of experts.
        routing: what makes affinities of a token's logits over the experts.
        normalised: the weights of the K chosen experts are made to sum to 1.
        expert_groups: equal groups that the experts stand in.
        groups_kept: best groups among whose experts a token chooses.
        routed_scale: factor on what the routed experts add.
        q_lora_rank: width of the compressed queries of latent attention; 0 compresses none.
        kv_lora_rank: width of the compressed keys and values; 0 is ordinary attention.
        qk_nope: width of a latent head's query and key without positions.
        qk_rope: width of a latent head's query and key with rotary positions.
        v_head: width of a latent head's value.
        rope_scaling: how rotary positions are stretched, in one line: a kind (linear, dynamic,
            llama3, yarn) and its numbers, as `llama3 factor=32 low=1 high=4 original=8192`.
        rotary_share: share of a head's channels that rotary positions turn, its last ones.
        window: tokens that a token sees, itself included; 0 means all before it (Mistral).
        full_every: every so many layers one sees all tokens, in spite of `window`; 0 has none.
        window_from: layers before this one see all tokens, in spite of `window`.
        local_theta: base of the wavelengths in layers with a window; 0 means `rope_theta`.
        attention_cap: scores are c tanh(score / c) (Gemma 2); 0 caps none.
        attention_scale: of scores; 0 means 1 / sqrt(d).
        sinks: each head has a learned score that takes part in the softmax and selects nothing.
        logit_cap: logits are c tanh(logit / c); 0 caps none.
        norms: where a branch is normalised: before it, after it (OLMo 2), or both (Gemma 2).
        norm_all_heads: with `qk_norm`, over all channels of all heads together (OLMo 2).
        parallel_branches: attention and the MLP read the same input (GPT-NeoX).
        embedding_scale: factor on what is looked up; 0 means 1.
    """

    name: str = "custom"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 256
    tied: bool = False
    norm: Norm = "rmsnorm"
    activation: Activation = "swiglu"
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_positions: int = 2048
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    moe_ffn: int = 0
    dense_layers: int = 0
    routing: Routing = "softmax"
    normalised: bool = True
    expert_groups: int = 1
    groups_kept: int = 1
    routed_scale: float = 1.0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head: int = 0
    rope_scaling: str = ""
    rotary_share: float = 1.0
    window: int = 0
    full_every: int = 0
    window_from: int = 0
    local_theta: float = 0.0
    attention_cap: float = 0.0
    attention_scale: float = 0.0
    sinks: bool = False
    logit_cap: float = 0.0
    norms: Norms = "before"
    norm_all_heads: bool = False
    parallel_branches: bool = False
    embedding_scale: float = 0.0

    def __post_init__(self) -> None:
        """Resolve the sizes that follow from others, and reject impossible ones."""
        for key in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, key) < 1:
                raise UsageError(f"model.{key} is {getattr(self, key)}; it must be at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < inf:
                raise UsageError(f"model.{field.name} is {value}; it must be at least 0")
        resolved = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self._default_head_dim(),
            "ffn": self.ffn or self._default_ffn(),
        }
        for key, value in resolved.items():
            object.__setattr__(self, key, value)
            if value < 1:
                raise UsageError(f"model.{key} is {value}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads cannot share {self.kv_heads} kv heads; "
                f"model.kv_heads must divide {self.heads}"
            )
        if self.is_mla:
            self._check_latent_attention()
        elif self.positions == "rope" and self.head_dim % 2:
            raise UsageError(f"rope needs an even head size; model.head_dim is {self.head_dim}")
        if self.rope_theta == 0:
            raise UsageError("model.rope_theta is 0; it must be above 0")
        if self.is_moe:
            self._check_experts()
        self._check_variants()

    def _check_variants(self) -> None:
        object.__setattr__(self, "rope_scaling", str(self.rope))
        if not 0 < self.rotary_share <= 1:
            raise UsageError(
                f"model.rotary_share is {self.rotary_share}; it is above 0 and at most 1"
            )
        if self.positions == "rope" and self.rotary_dim % 2:
            raise UsageError(
                f"rope turns pairs of channels; model.rotary_share={self.rotary_share} of "
                f"{self.head_dim} is {self.rotary_dim}"
            )
        if self.parallel_branches and self.norms != "before":
            raise UsageError("parallel branches are normalised before; use model.norms=before")
        if self.norm_all_heads and not self.qk_norm:
            raise UsageError("model.norm_all_heads says how model.qk_norm is done; set both")
        if self.is_moe and self.activation not in ("swiglu", "gelu"):
            raise UsageError(f"experts have swiglu or gelu; model.activation is {self.activation}")

    def _check_experts(self) -> None:
        object.__setattr__(self, "moe_ffn", self.moe_ffn or self.ffn)
        E, groups = self.experts, self.expert_groups
        if self.dense_layers > self.layers:
            raise UsageError(
                f"model.dense_layers is {self.dense_layers}; of {self.layers} layers it can be 0 "
                f"to {self.layers}"
            )
        if groups < 1 or E % groups:
            raise UsageError(f"{E} experts cannot stand in {groups} equal groups")
        if not 1 <= self.groups_kept <= groups:
            raise UsageError(f"model.groups_kept is {self.groups_kept}; it can be 1 to {groups}")
        most = E // groups * self.groups_kept
        if not 1 <= self.top_k <= most:
            raise UsageError(f"model.top_k is {self.top_k}; of {E} experts it can be 1 to {most}")

    def _check_latent_attention(self) -> None:
        for key in ("qk_nope", "qk_rope", "v_head"):
            if getattr(self, key) < 1:
                raise UsageError(
                    f"model.{key} is {getattr(self, key)}; latent attention needs at least 1"
                )
        if self.qk_rope % 2:
            raise UsageError(f"rope needs an even size; model.qk_rope is {self.qk_rope}")
        if self.v_head > self.qk_width:
            raise UsageError(
                f"model.v_head is {self.v_head}; it can be up to qk_nope + qk_rope = "
                f"{self.qk_width}"
            )
        if self.kv_heads != self.heads:
            raise UsageError(
                f"latent attention has a key and a value for each head; model.kv_heads can be "
                f"{self.heads}, not {self.kv_heads}"
            )
        for key in ("qk_norm", "qkv_bias"):
            if getattr(self, key):
                raise UsageError(f"latent attention has no {key}; use model.{key}=false")

    def _default_head_dim(self) -> int:
        if self.hidden % self.heads:
            raise UsageError(
                f"model.hidden {self.hidden} is not a multiple of {self.heads} heads; "
                "set model.head_dim"
            )
        return self.hidden // self.heads

    def _default_ffn(self) -> int:
        if not self.is_gated:
            return 4 * self.hidden
        return -(-8 * self.hidden // 3 // 64) * 64

    @property
    def rope(self) -> RopeScaling:
        """How rotary positions are stretched."""
        return RopeScaling.parse(self.rope_scaling)

    @property
    def is_gated(self) -> bool:
        """Whether an MLP has a gate, and so three matrices."""
        return self.activation in ("swiglu", "geglu")

    def window_of(self, layer: int) -> int:
        """Tokens that a token sees in block `layer` (from 0); 0 means all before it."""
        full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return 0 if full or layer < self.window_from else self.window

    @property
    def is_moe(self) -> bool:
        """Whether some layers route tokens to experts."""
        return self.experts > 0

    def routes(self, layer: int) -> bool:
        """Whether block `layer` (from 0) has experts; the first `dense_layers` have none."""
        return self.is_moe and layer >= self.dense_layers

    @property
    def expert_width(self) -> int:
        """Width of one expert, f."""
        return self.moe_ffn or self.ffn

    @property
    def group_best(self) -> int:
        """How many affinities of a group say how good it is, when groups are chosen.

        The best one with softmax (DeepSeek-V2, arXiv:2405.04434, section 2.1.3), K / kept of
        them with sigmoid (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        """
        best = 1 if self.routing == "softmax" else self.top_k // self.groups_kept
        return min(max(best, 1), self.experts // self.expert_groups)

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values carry a bias."""
        return self.bias or self.qkv_bias

    def kv_heads_of_rank(self, tp: int) -> int:
        """Key and value heads on one of `tp` ranks; of more ranks than heads, several share one."""
        return max(self.kv_heads // tp, 1)

    @property
    def qk_width(self) -> int:
        """Channels of one query or key."""
        return self.qk_nope + self.qk_rope if self.is_mla else self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of one key and its value."""
        return self.qk_width + (self.v_head if self.is_mla else self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Channels of a query or key that rotary positions turn."""
        return self.qk_rope if self.is_mla else int(self.head_dim * self.rotary_share)

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts; the first `dense_layers` have none."""
        return self.layers - self.dense_layers if self.is_moe else 0

    def embedding_params(self) -> int:
        """Parameters before the first block: token table and learned positions."""
        return elements(describe(self).embedding)

    def head_params(self) -> int:
        """Parameters after the last block, without a tied head: final norm and projection."""
        tied = self.vocab * self.hidden if self.tied else 0
        return elements(describe(self).head) - tied

    def params(self) -> int:
        """Total parameters; a tied table counts once."""
        return self._params_with(self.experts)

    def active_params(self) -> int:
        """Parameters that one token uses: equal to `params` for a dense model."""
        return self._params_with(self.top_k)

    def _params_with(self, experts: int) -> int:
        """Total parameters, of so many experts in each layer."""
        inner = sum(count * elements(block, experts) for block, count in blocks(self))
        return self.embedding_params() + inner + self.head_params()
