"""A run file as values: model, layout, recipe, data. What `phalanx train RUN.toml` reads."""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from phalanx.core.errors import UsageError, require_whole
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.synonyms import unknown_key, unknown_table

T = TypeVar("T")

Decay = Literal["cosine", "linear", "constant"]
OptimizerName = Literal["adamw", "sgd"]
MasterWeights = Literal["fp32", "none", "stochastic"]
Moments = Literal["fp32", "bf16"]
Spike = Literal["off", "tell", "skip", "rollback"]
StragglerPolicy = Literal["off", "tell", "stop"]
TokenDtype = Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"]


_RECIPE_WORDS = {
    "decay": get_args(Decay),
    "optimizer": get_args(OptimizerName),
    "master_weights": get_args(MasterWeights),
    "moments": get_args(Moments),
    "spike": get_args(Spike),
    "straggler": get_args(StragglerPolicy),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is learned from, for how long and how fast; nothing here depends on the layout.

    Example:
        >>> recipe = Recipe(steps=100, warmup=10, learning_rate=1e-3)
        >>> recipe.learning_rate_at(0), recipe.learning_rate_at(10)
        (0.0001, 0.001)

    Attributes:
        seq: tokens per sequence.
        batch: sequences per optimizer step, over all ranks.
        steps: length of the learning-rate schedule.
        stop_at: stop after this many steps; 0 means at `steps`.
        learning_rate: peak, after warm-up.
        min_learning_rate: floor of the decay, as a fraction of the peak.
        warmup: steps of linear warm-up.
        decay: shape of the learning rate after warm-up: cosine, linear or constant.
        decay_from: the step, counted from 0, from which the learning rate decays; until then it
            stays at its peak. 0 means from the end of the warm-up.
        decay_from_rate: the learning rate at `decay_from`, as a fraction of the peak. With both, a
            run that is given more steps goes on where its learning rate was.
        weight_decay: decoupled, on matrices only.
        clip: largest global gradient norm; 0 clips nothing.
        clip_norm: which norm: 2, or inf for the largest element.
        optimizer: adamw or sgd.
        beta1: decay of AdamW's mean of gradients (arXiv:1711.05101).
        beta2: decay of AdamW's mean of their squares.
        eps: added to the root of that in AdamW.
        master_weights: fp32 copies of 16-bit weights, which the optimizer moves; or none, so that
            updates are rounded to the weights' own bf16, to the nearest (none) or by chance
            (stochastic).
        moments: of AdamW, kept in the format of master weights (fp32) or in bf16.
        label_smoothing: share of the target spread over the vocabulary.
        dropout: on embeddings and both residual branches.
        balance_loss: weight of the loss that keeps experts evenly loaded within each sequence.
        balance_speed: how far a step moves the biases that even out the load of experts over a
            batch; 0 has none.
        capacity: of an expert, in tokens of a sequence over those of an even load; what is above
            is dropped. 0 drops nothing.
        init_std: standard deviation of the initial matrices.
        seed: of weights, data order and dropout.
        checkpoint_every: steps between checkpoints; 0 saves only at the end.
        keep: how many checkpoints stay, counted from the newest; at least 1.
        max_restarts: how often at most the launcher starts the ranks again after one has died; 0
            never does. Three in a row without progress are the last in any case.
        grace: seconds from a request to stop until ranks that have not saved are ended; 0 gives
            them all the time they need. A batch system ends them itself, some time after it asked.
        keep_every: a checkpoint whose step is a multiple of this is saved and stays for good; 0
            has none.
        spike: what to do about a loss or gradient norm far above those of the last steps, or not
            finite: tell; skip its update; go back and skip the batches before it (rollback); or
            not look (off).
        spike_window: batches up to a spike that a rollback skips.
        check_every: steps between two looks for silent corruption, by checksums of what several
            ranks hold alike and of what lies at rest; 0 never looks. Each save is preceded by one.
        repeat_every: steps between two whose forward and backward passes are done twice and
            compared bit for bit, which finds wrong arithmetic; 0 never does.
        straggler: what to do about a rank whose own work takes longer than that of its peers:
            tell; save and stop, so that the run can go on without its machine; or not look (off).
        profile: steps whose kernels are timed by torch's profiler, after those that warm up; they
            take longer. 0 profiles none.
        evaluate_every: steps between validations; 0 validates only at the end.
        evaluate_batches: batches of held-out text per validation, always the same ones, no window
            twice; 0 never validates.
        sample_tokens: length of the text that the model writes at the end; 0 writes none.
    """

    seq: int = 256
    batch: int = 16
    steps: int = 100
    stop_at: int = 0
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.1
    warmup: int = 10
    decay: Decay = "cosine"
    decay_from: int = 0
    decay_from_rate: float = 1.0
    weight_decay: float = 0.1
    clip: float = 1.0
    clip_norm: float = 2.0
    optimizer: OptimizerName = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    master_weights: MasterWeights = "fp32"
    moments: Moments = "fp32"
    label_smoothing: float = 0.0
    dropout: float = 0.0
    balance_loss: float = 0.0
    balance_speed: float = 0.0
    capacity: float = 0.0
    init_std: float = 0.02
    seed: int = 0
    checkpoint_every: int = 0
    keep: int = 2
    keep_every: int = 0
    max_restarts: int = 100
    grace: float = 0.0
    spike: Spike = "tell"
    spike_window: int = 100
    check_every: int = 100
    repeat_every: int = 0
    straggler: StragglerPolicy = "tell"
    profile: int = 0
    evaluate_every: int = 0
    evaluate_batches: int = 4
    sample_tokens: int = 160

    def __post_init__(self) -> None:
        """Reject values outside their domain."""
        self._require_kinds()
        for key in ("seq", "batch", "steps", "keep", "spike_window"):
            _at_least(f"recipe.{key}", getattr(self, key), 1)
        for key in ("stop_at", "warmup", "checkpoint_every", "keep_every", "evaluate_every"):
            _at_least(f"recipe.{key}", getattr(self, key), 0)
        for key in ("evaluate_batches", "sample_tokens", "decay_from", "max_restarts"):
            _at_least(f"recipe.{key}", getattr(self, key), 0)
        for key in ("check_every", "repeat_every", "profile"):
            _at_least(f"recipe.{key}", getattr(self, key), 0)
        for key in ("learning_rate", "weight_decay", "clip", "eps", "init_std"):
            _at_least(f"recipe.{key}", getattr(self, key), 0.0)
        for key in ("balance_loss", "balance_speed", "capacity", "grace"):
            _at_least(f"recipe.{key}", getattr(self, key), 0.0)
        for key in ("beta1", "beta2", "dropout", "label_smoothing"):
            _within(f"recipe.{key}", getattr(self, key), 1.0, closed=False)
        for key in ("min_learning_rate", "decay_from_rate"):
            _within(f"recipe.{key}", getattr(self, key), 1.0, closed=True)
        if 0 < self.decay_from < self.warmup:
            raise UsageError(
                f"recipe.decay_from={self.decay_from} lies within recipe.warmup={self.warmup}; "
                f"it can be {self.warmup} or more, or 0 for the end of the warm-up"
            )
        if self.optimizer == "sgd" and (self.master_weights, self.moments) != ("fp32", "fp32"):
            raise UsageError(
                f"recipe.master_weights={self.master_weights} recipe.moments={self.moments} are "
                "those of adamw; use recipe.optimizer=adamw, or fp32 for both"
            )
        if self.clip_norm not in (2.0, math.inf):
            raise UsageError(f"recipe.clip_norm is {self.clip_norm}; it can be 2 or inf")

    def _require_kinds(self) -> None:
        """Reject what is no whole number, or none of the words, where Python lets it pass."""
        for key in ("seq", "batch", "steps"):
            require_whole(f"recipe.{key}", getattr(self, key))
        for key, words in _RECIPE_WORDS.items():
            if getattr(self, key) not in words:
                options = ", ".join(words)
                raise UsageError(f"recipe.{key} is {getattr(self, key)!r}; it can be {options}")

    @property
    def last_step(self) -> int:
        """The step after which training stops."""
        return min(self.stop_at or self.steps, self.steps)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one global batch."""
        return self.batch * self.seq

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due once `step` steps are done."""
        return any(
            every and step % every == 0 for every in (self.checkpoint_every, self.keep_every)
        )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0.

        Linear from lr/warmup to lr over the warm-up, then down to `min_learning_rate` times lr
        at the last step along a half cosine or a line; a decay of one step stays where it begins.
        It begins after the warm-up, or at `decay_from` with `decay_from_rate` times lr.
        Source: Loshchilov and Hutter 2016 (arXiv:1608.03983), equation 5, without restarts.
        """
        peak = self.learning_rate
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        if step < self.decay_from:
            return peak
        begin = self.decay_from or self.warmup
        start = peak * self.decay_from_rate if self.decay_from else peak
        floor = min(peak * self.min_learning_rate, start)
        done = min((step - begin) / max(self.steps - 1 - begin, 1), 1.0)
        match self.decay:
            case "constant":
                return start
            case "linear":
                return start + (floor - start) * done
            case "cosine":
                return floor + (start - floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the tokens come from.

    Attributes:
        path: a text file, a folder of text files, a token file (.npy, .bin, .ds), or a folder
            that `phalanx data tokenize` wrote; empty means the sources of the installed Python
            standard library.
        token_dtype: of a .bin file: uint8, uint16, uint32, int32 or int64. `auto` takes what its
            header or the index beside it says (llm.c, Megatron-LM, datatrove); a file of bare ids
            says nothing, and must be told.
        offset: bytes before the first token of a .bin file; those of a known header are skipped
            by themselves.
        trust: read a file also where its content does not look like what it is said to be:
            binary for text, ids of another width, text for a model with a tokenizer.
        separator: the id that ends a document in a token file; -1 when there is none. In a text
            it is the zero byte.
        document_mask: tokens attend only within their own document, and positions restart.
        validation: share of the corpus held out, taken from its end.
        offload_folder: where `offload=nvme` keeps its files, on a fast disk; empty means the
            system's folder for temporary files. They have no name and are never left behind.
    """

    path: str = ""
    token_dtype: TokenDtype = "auto"
    offset: int = 0
    trust: bool = False
    separator: int = -1
    document_mask: bool = False
    validation: float = 0.01
    offload_folder: str = ""

    def __post_init__(self) -> None:
        """Reject values outside their domain."""
        _at_least("data.separator", self.separator, -1)
        _at_least("data.offset", self.offset, 0)
        _within("data.validation", self.validation, 1.0, closed=False)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run file, every value resolved.

    Example:
        >>> run = Run.from_tables({"layout": "dp=2 mb=4", "recipe": {"batch": 16}})
        >>> run.micro_batches
        2
        >>> Run.from_tables({"recipe": {"stesp": 3}})
        Traceback (most recent call last):
        phalanx.core.errors.UsageError: unknown key in [recipe] 'stesp'; did you mean steps ...

    Attributes:
        model, layout, recipe, data: the tables of the file.
        cluster: the name in its table `[cluster]`.
        weights: the folder that training starts from, `weights` in `[model]`; empty means from
            values that the seed decides.
    """

    model: ModelShape = field(default_factory=ModelShape)
    layout: Layout = field(default_factory=Layout)
    recipe: Recipe = field(default_factory=Recipe)
    data: Data = field(default_factory=Data)
    cluster: str = ""
    weights: str = ""

    @property
    def micro_batches(self) -> int:
        """m, micro-batches per rank and step."""
        return self.layout.micro_batches(self.recipe.batch)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> "Run":
        """Build a run from the tables of a TOML file (catalog names already resolved).

        Raises:
            UsageError: an unknown table or key, or a value of the wrong kind.
        """
        known = [f.name for f in fields(cls) if f.name != "weights"]
        for name in tables:
            if name not in known:
                raise unknown_table(name, known)
        layout, model = tables.get("layout", {}), tables.get("model", {})
        weights = ""
        if isinstance(model, Mapping) and "weights" in model:
            weights = _convert("model.weights", str, model["weights"])
            model = {key: value for key, value in model.items() if key != "weights"}
        return cls(
            model=_build(ModelShape, "model", model),
            layout=Layout.parse(layout) if isinstance(layout, str) else Layout.from_mapping(layout),
            recipe=_build(Recipe, "recipe", tables.get("recipe", {})),
            data=_build(Data, "data", tables.get("data", {})),
            cluster=_cluster(tables.get("cluster", "")),
            weights=weights,
        )

    def to_toml(self) -> str:
        """The run file that `from_tables` reads back to the same values."""
        sections: dict[str, ModelShape | Recipe | Data] = {
            "model": self.model,
            "recipe": self.recipe,
            "data": self.data,
        }
        lines = [f"# layout: {self.layout}", "[layout]"]
        lines += [f"{key} = {_toml(value)}" for key, value in self.layout.settings().items()]
        if self.cluster:
            lines += ["", "[cluster]", f"name = {_toml(self.cluster)}"]
        for name, value in sections.items():
            lines += ["", f"[{name}]"]
            lines += [f"{f.name} = {_toml(getattr(value, f.name))}" for f in fields(value)]
            if value is self.model and self.weights:
                lines.append(f"weights = {_toml(self.weights)}")
        return "\n".join(lines) + "\n"


def _cluster(value: Any) -> str:
    name = value.get("name", "") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        raise UsageError(f"cluster is {name!r}; it is a name such as h100x64")
    return name


def _build(cls: type[T], table: str, values: Any) -> T:
    if not isinstance(values, Mapping):
        raise UsageError(f"[{table}] is {values!r}; it is a table of keys")
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise unknown_key(table, key, _keys())
    return cls(**{k: _convert(f"{table}.{k}", hints[k], v) for k, v in values.items()})


def _keys() -> dict[str, list[str]]:
    """Every table of a run file with its keys."""
    types = {"model": ModelShape, "layout": Layout, "recipe": Recipe, "data": Data}
    keys = {table: [f.name for f in fields(cls)] for table, cls in types.items()}
    keys["model"].append("weights")
    return keys


def _convert(key: str, kind: Any, value: Any) -> Any:
    """Check one value against the annotation of its field; whole numbers may stand for floats."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            options = ", ".join(str(a) for a in get_args(kind))
            raise UsageError(f"{key} is {value!r}; it can be {options}")
        return value
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(a for a in get_args(kind) if a is not type(None))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, float) and math.isnan(value):
        raise UsageError(f"{key} is nan; it is a number")
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{key} is {value!r}; it is {_WORDS[kind]}")
    return value


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _at_least(key: str, value: float, least: float) -> None:
    if not value >= least or math.isinf(value):
        raise UsageError(f"{key} is {value}; it must be a finite number, at least {least}")


def _within(key: str, value: float, most: float, *, closed: bool) -> None:
    if not 0 <= value <= most or (value == most and not closed):
        bracket = "]" if closed else ")"
        raise UsageError(f"{key} is {value}; it must lie in [0, {most:g}{bracket}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else str(value)
