"""What an architecture of Hugging Face Transformers says and keeps: names, shapes, configuration.

A `Family` is data: which class loads it, what its configuration calls our sizes, where its tensors
lie. The families themselves are in families.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.model import ModelShape
from phalanx.trainer.model.parameters import Declaration

# What a configuration may say that changes no arithmetic of a step.
SILENT_KEYS = frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_bias",
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "base_model_tp_plan",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cls_token_id",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "ep_size",
        "head_dim",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "initializer_std",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "moe_layer_freq",
        "n_ctx",
        "name_or_path",
        "num_experts",
        "num_key_value_heads",
        "num_local_experts",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "qk_head_dim",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rotary_dim",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_aux",
        "sliding_window",
        "sliding_window_pattern",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_sliding_window",
    )
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class RowMap:
    """Which rows of a tensor of theirs are ours, where parts of several are interleaved.

    Attributes:
        index: int64, of theirs, one for each row of ours.
        count: how many rows theirs has.
    """

    index: NDArray[np.int64]
    count: int


class Place(NamedTuple):
    """Where one of our parameters lies among theirs.

    Attributes:
        name: of their tensor.
        part, parts: ours is this one of so many equal parts of theirs, along our first dim.
        transposed: theirs is [n_in, n_out].
        expert: theirs is the matrix of this expert in our stack of them; None where ours is none.
        rows: ours are these rows of theirs; None where they are all, or a part.
        shift: ours is theirs plus this (Gemma stores what is added to 1).
    """

    name: str
    part: int = 0
    parts: int = 1
    transposed: bool = False
    expert: int | None = None
    rows: RowMap | None = None
    shift: float = 0.0

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their tensor, if ours has `shape`."""
        count = self.rows.count if self.rows else shape[0] * self.parts
        whole = (count, *shape[1:])
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
        full_every: which layers see all tokens where a configuration does not say.
        rows: of our modules that lie in parts of theirs which are not equal or not in a row.
        shifted: the weights of norms are stored less 1.
        router_bias: its tensor that evens out the load of experts, `{}` for the layer; if any.
        reads: more fields of our shape, from a configuration.
        writes: what a configuration says of them.
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
    full_every: int = 0
    rows: Mapping[str, Callable[[ModelShape], RowMap]] = field(default_factory=dict)
    shifted: bool = False
    router_bias: str = ""
    reads: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda said: {}
    writes: Callable[[ModelShape], dict[str, Any]] = lambda shape: {}

    def places(self, declaration: Declaration, shape: ModelShape) -> list[Place]:
        """Where it keeps a parameter of ours: one tensor, or one for each expert.

        Args:
            declaration: of the parameter.
            shape: of the model.

        Raises:
            KeyError: it has no such parameter.
        """
        module, _, attribute = declaration.name.rpartition(".")
        layer = ""
        if module.startswith("blocks."):
            _, layer, module = module.split(".", 2)
        theirs = self.modules[module] + ("" if module in BARE else f".{attribute}")
        if declaration.expert_dim is not None:
            experts = range(declaration.shape[declaration.expert_dim])
            return [Place(theirs.format(layer, e), expert=e) for e in experts]
        place = Place(
            name=theirs.format(layer),
            part=self.fused.index(module) if module in self.fused else 0,
            parts=len(self.fused) if module in self.fused else 1,
            transposed=self.transposes and bool(layer) and len(declaration.shape) > 1,
            rows=self.rows[module](shape) if module in self.rows else None,
            shift=1.0 if self.shifted and module.endswith("norm") else 0.0,
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
            **self._write_window(shape),
            **self._write_rope(shape),
            **self.writes(shape),
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
        self._require_known(config)
        values = {field: self._value(said, field) for field in self.keys}
        for twin, key in self.aliases.items():
            self._require(twin, said.get(twin, False), (said.get(key, False),))
        values |= self._read_window(config, int(values["layers"]))
        if self.kind.get("positions") == "rope":
            values |= self._read_rope(said, values)
        return ModelShape(**{**self.kind, **values, **self.reads(said)})

    def _require_known(self, config: Mapping[str, Any]) -> None:
        """Refuse a key that nobody here knows: it may change the arithmetic."""
        known = {*SILENT_KEYS, *self.keys.values(), *self.fixed, *self.aliases, *self.silent}
        known |= {self.window, self.window_switch, *self.writes(ModelShape())}
        for key, value in config.items():
            if key not in known and value not in (None, False, 0, "", [], {}):
                raise RefusedError(
                    f"{key}={str(value)[:40]} is not known for {self.model_type} models, and may "
                    "change the arithmetic; take it out of config.json if it does not"
                )

    def _read_window(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """How many tokens back attention looks, and in which layers."""
        if not self.window or not config.get(self.window_switch or "", not self.window_switch):
            return {}
        size = config.get(self.window, self.silent.get(self.window))
        if not isinstance(size, int) or size < 1:
            return {}
        kinds = config.get("layer_types")
        first = config.get("max_window_layers", 0) if self.window_switch else 0
        every = config.get("sliding_window_pattern") or self.full_every
        found = {"window": size, "full_every": every, "window_from": min(first, layers)}
        if kinds is None:
            return found
        if _SLIDING not in kinds:
            return {}
        return {"window": size, **_pattern(kinds)}

    def _write_window(self, shape: ModelShape) -> dict[str, Any]:
        if not self.window:
            return {}
        switch = {self.window_switch: shape.window > 0} if self.window_switch else {}
        said: dict[str, Any] = {self.window: shape.window or None, **switch}
        if self.full_every or (shape.window and (shape.full_every or shape.window_from)):
            layers = range(shape.layers)
            said["layer_types"] = [_SLIDING if shape.window_of(i) else _FULL for i in layers]
        if self.window_switch and shape.window:
            said["max_window_layers"] = shape.window_from
        return said

    def _read_rope(self, said: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """How rotary positions are stretched.

        Raises:
            RefusedError: in a way that is not known here.
        """
        kind = said["rope_type"]
        self._require("rope_type", kind, ("default", "linear", "dynamic", "llama3", "yarn"))
        if kind == "default":
            return {}
        longest = int(values.get("max_positions", 0))
        original = int(said.get("original_max_position_embeddings") or longest)
        if kind == "dynamic":
            original = longest
        words = {"factor": said.get("factor") or longest / original, "original": original}
        if kind == "linear":
            del words["original"]
        theirs = {"llama3": _LLAMA3, "yarn": _YARN}.get(kind, {})
        words |= {ours: said[key] for ours, key in theirs.items() if said.get(key) is not None}
        if kind == "yarn" and said.get("truncate") is False:
            words["rounded"] = 0
        if kind == "yarn" and not words.get("attention") and said.get("mscale_all_dim"):
            factors = [
                yarn_scale(words["factor"], said.get(key) or 0)
                for key in ("mscale", "mscale_all_dim")
            ]
            if said.get("mscale"):
                words["attention"] = factors[0] / factors[1]
        return {"rope_scaling": " ".join([kind, *(f"{k}={v!r}" for k, v in words.items())])}

    def _write_rope(self, shape: ModelShape) -> dict[str, Any]:
        rope = shape.rope
        if self.kind.get("positions") != "rope" or not rope.kind:
            return {}
        said = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind in ("llama3", "yarn"):
            said["original_max_position_embeddings"] = rope.original
            theirs = _LLAMA3 if rope.kind == "llama3" else _YARN
            said |= {key: getattr(rope, ours) for ours, key in theirs.items()}
            if not said.get("attention_factor", 1):
                del said["attention_factor"]
        if rope.kind == "yarn" and not rope.rounded:
            said["truncate"] = False
        return {"rope_scaling": said}

    def has(self, shape: ModelShape) -> bool:
        """Whether what its configuration says of a model reads back as the same shape."""
        if shape.positions != self.kind["positions"]:
            return False
        try:
            return replace(self.shape(self.configuration(shape)), name=shape.name) == shape
        except (RefusedError, UsageError):
            return False

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
    """What a configuration says of rotary positions, under the names of any version.

    Layers with a window may have angles of their own; these are the others'.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotary = rotary.get(_FULL, rotary)
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    return {**rotary, "rope_type": kind}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """How many experts it says, which of two names a version has for it."""
    return {"num_experts": config.get("num_experts", config.get("num_local_experts"))}


def _pattern(kinds: Sequence[str]) -> dict[str, int]:
    """Which layers see all tokens, as a rule that a shape can say.

    Raises:
        RefusedError: there is none.
    """
    full = [kind == _FULL for kind in kinds]
    if not set(kinds) <= {_FULL, _SLIDING}:
        raise RefusedError(f"layer_types={sorted(set(kinds))} can be {_FULL} or {_SLIDING}")
    first = full.index(False)
    for every in (0, *range(2, len(full) + 1)):
        for start in {0, first}:
            rule = [i < start or (every > 0 and (i + 1) % every == 0) for i in range(len(full))]
            if rule == full:
                return {"full_every": every, "window_from": start}
    raise RefusedError(
        "layer_types follow no rule that is known here; it can be every n-th full_attention, or "
        "the first n"
    )


def yarn_scale(factor: float, scale: float) -> float:
    """0.1 scale ln(factor) + 1 (YaRN, arXiv:2309.00071, equation 22, as DeepSeek-V2 has it).

    Args:
        factor: how much longer sequences are.
        scale: `mscale` of a configuration.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


BARE = frozenset({"attention.sinks"})  # whose tensor is named as the module
_LLAMA3 = {"low": "low_freq_factor", "high": "high_freq_factor"}
_YARN = {"fast": "beta_fast", "slow": "beta_slow", "attention": "attention_factor"}
