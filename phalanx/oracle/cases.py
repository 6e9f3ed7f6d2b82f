"""The cases that the oracle takes: a fixed covering set, and a random sample."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from phalanx.core.errors import PhalanxError, RefusedError
from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.precision import SCALED
from phalanx.data.synthetic import Masked
from phalanx.oracle.verify import Case, Tables, default_case, refuse_unprovable
from phalanx.schedules.layouts import enough_micro_batches, num_stages
from phalanx.schedules.registry import SPECS

Table = dict[str, dict[str, Any]]

LATENT = {"kv_heads": 4, "kv_lora_rank": 20, "qk_nope": 12, "qk_rope": 6, "v_head": 14}
FEATURES: Mapping[str, Tables] = {
    "tied": {"model": {"tied": True}},
    "mha": {"model": {"kv_heads": 4}},
    "mqa": {"model": {"kv_heads": 1}},
    "odd": {"model": {"vocab": 97, "ffn": 130}, "recipe": {"seq": 33}},
    "gpt": {
        "model": {
            "norm": "layernorm",
            "activation": "gelu",
            "positions": "learned",
            "max_positions": 40,
            "bias": True,
        }
    },
    "qk-norm": {"model": {"qk_norm": True}},
    "qkv-bias": {"model": {"qkv_bias": True}},
    "gemma": {
        "model": {
            **{"norms": "both", "activation": "geglu", "qk_norm": True, "tied": True},
            **{"window": 9, "full_every": 2, "local_theta": 100.0, "embedding_scale": 8.0},
            **{"attention_cap": 5.0, "logit_cap": 3.0, "attention_scale": 0.3},
        }
    },
    "sinks": {"model": {"sinks": True, "window": 7, "full_every": 2}},
    "olmo": {"model": {"norms": "after", "qk_norm": True, "norm_all_heads": True}},
    "neox": {
        "model": {
            **{"norm": "layernorm", "activation": "gelu-erf", "bias": True},
            **{"parallel_branches": True, "rotary_share": 0.5},
        }
    },
    "llama3-rope": {"model": {"rope_scaling": "llama3 factor=4 low=1 high=4 original=16"}},
    "yarn": {"model": {"rope_scaling": "yarn factor=4 original=16 fast=4"}},
    "dynamic-rope": {"model": {"rope_scaling": "dynamic factor=2 original=8"}},
    "linear-rope": {"model": {"rope_scaling": "linear factor=4"}},
    "latent": {"model": {**LATENT, "q_lora_rank": 24}},
    "direct-query": {"model": LATENT},
    "wide": {"model": {"hidden": 256, "kv_heads": 4, "ffn": 256}, "recipe": {"seq": 16}},
    "dropout": {"recipe": {"dropout": 0.1}},
    "smoothing": {"recipe": {"label_smoothing": 0.1}},
    "experts": {
        "model": {"experts": 6, "top_k": 2, "moe_ffn": 40, "dense_layers": 1},
        "recipe": {"balance_loss": 0.02, "capacity": 1.25},
    },
    "deepseek": {
        "model": {
            "experts": 12,
            "top_k": 4,
            "moe_ffn": 48,
            "shared_experts": 2,
            "dense_layers": 1,
            "routing": "sigmoid",
            "expert_groups": 3,
            "groups_kept": 2,
            "routed_scale": 1.5,
        },
        "recipe": {"balance_loss": 0.01, "balance_speed": 0.02},
    },
    "stochastic": {"recipe": {"master_weights": "stochastic"}},
    "sgd": {"recipe": {"optimizer": "sgd", "learning_rate": 0.1}},
    "max-norm": {"recipe": {"clip_norm": float("inf"), "clip": 0.1}},
    "bf16-moments": {"recipe": {"moments": "bf16"}},
    "no-clip": {"recipe": {"clip": 0.0}},
}
ROUTED = ("experts", "deepseek")

# What other families do differently: they undo each other, so they are met in cases of their own.
VARIANTS = ("gemma", "sinks", "olmo", "neox", "llama3-rope", "yarn", "dynamic-rope", "linear-rope")
VARIANT_CASES = (
    "dp=1 pp=2 tp=2 zero=1 | gemma | uneven |",
    "dp=1 pp=1 tp=2 cp=2 zero=2 context=ulysses recompute=full | sinks mha documents | uneven |",
    "dp=2 pp=2 tp=1 zero=3 recompute=selective | olmo | holes |",
    "dp=1 pp=1 tp=2 cp=2 zero=1 recompute=norms | neox documents | uneven |",
    "dp=1 pp=2 tp=1 cp=2 zero=1 context=gather | gemma documents yarn | uneven |",
    "dp=1 pp=1 tp=2 zero=2 | llama3-rope | uneven |",
    "dp=1 pp=1 tp=1 cp=2 zero=1 | dynamic-rope tied | uneven |",
    "dp=2 pp=1 tp=1 zero=3 | linear-rope latent | uneven |",
)
DRAWN = tuple(name for name in FEATURES if name not in VARIANTS)  # what a sample draws from
# Of these at most one is drawn: the last would undo the others.
EXCLUSIVE = (("mha", "mqa"), ("latent", "direct-query"), ROUTED, ("max-norm", "no-clip"))


@dataclass(frozen=True)
class CaseSpec:
    """A case in words.

    Attributes:
        layout: how the steps are cut, in one line.
        features: names in `FEATURES`: what differs from the usual model and recipe.
        masked: which targets count.
        documents: several documents are packed into each sequence.
        tables: keys that differ besides, as in a run file.
    """

    layout: str
    features: tuple[str, ...] = ()
    masked: Masked = "uneven"
    documents: bool = False
    tables: Tables = field(default_factory=dict)

    @property
    def unusual(self) -> str:
        """What differs beside the layout, in a few words."""
        words = [*self.features]
        words += ["documents"] if self.documents else []
        words += [f"masked={self.masked}"] if self.masked != "uneven" else []
        return " ".join(words)

    def changes(self) -> Table:
        """Every key that differs from the usual case, but for the layout's."""
        return merged([*(FEATURES[name] for name in self.features), self.tables])

    def case(self, steps: int = 3) -> Case:
        """The case itself.

        Raises:
            UsageError: a key or a value that no run file could have.
        """
        changes = self.changes()
        words = dict(word.split("=", 1) for word in str(Layout.parse(self.layout)).split())
        layout = Layout.from_mapping({**words, **changes.pop("layout", {})})
        return default_case(
            layout, changes, steps=steps, masked=self.masked, documents=self.documents
        )


def merged(tables: Iterable[Tables]) -> Table:
    """Tables laid over each other, the last on top."""
    result: Table = {}
    for table in tables:
        for section, values in table.items():
            result.setdefault(section, {}).update(values)
    return result


def read_case(line: str) -> CaseSpec:
    """Read `layout | features | mask | section.key=number ...`, all but the first optional."""
    layout, words, mask, sets = (*(part.strip() for part in line.split("|")), "", "", "")[:4]
    names = words.split()
    tables: Table = {}
    for word in sets.split():
        key, value = word.split("=")
        section, name = key.split(".")
        tables.setdefault(section, {})[name] = int(value)
    return CaseSpec(
        layout=layout,
        features=tuple(name for name in names if name != "documents"),
        masked=mask or "uneven",  # type: ignore[arg-type]  # `write_case` writes no other
        documents="documents" in names,
        tables=tables,
    )


def write_case(spec: CaseSpec) -> str:
    """The line that `read_case` reads."""
    names = [*spec.features, *(["documents"] if spec.documents else [])]
    sets = [f"{s}.{k}={v}" for s, values in spec.tables.items() for k, v in values.items()]
    parts = (spec.layout, " ".join(names), spec.masked, " ".join(sets))
    return " | ".join(parts).rstrip(" |")


RECOMPUTES = (
    *("none", "none", "selective", "full", "full:2", "full:3"),
    *("norms", "mlp", "activation+core", "operators", "norms+mlp+core"),
)


_DRAWN_INSTEAD = 12  # cases, where not all of the covering set fit


@cache
def _covering_set() -> tuple[CaseSpec, ...]:
    text = (files("phalanx.oracle") / "covering_set.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(map(read_case, (*lines, *VARIANT_CASES)))


def covering_set(max_ranks: int = 8) -> list[CaseSpec]:
    """The cases that together let every feature meet every size (`covering.py`).

    Most of them need many ranks, so where fewer are allowed some are drawn in their place, always
    the same ones.

    Args:
        max_ranks: larger ones are left out.
    """
    fits = [spec for spec in _covering_set() if Layout.parse(spec.layout).ranks <= max_ranks]
    return (
        fits if len(fits) == len(_covering_set()) else fits + sample(_DRAWN_INSTEAD, max_ranks, 0)
    )


def sample(count: int, max_ranks: int, seed: int, changes: Tables | None = None) -> list[CaseSpec]:
    """Draw cases that can be run; the same ones for the same arguments.

    Fused blocks are not drawn, since compiling takes longer than the rest of a case ten times
    over; `changes` may have layout.compile=on, and pairs of features have it.

    Args:
        count: how many.
        max_ranks: of a layout.
        seed: of the draw.
        changes: keys that every case has, whatever was drawn.

    Raises:
        RefusedError: hardly anything that is drawn goes together with `changes`.
    """
    random = Random(f"{seed}/{max_ranks}")
    drawn: list[CaseSpec] = []
    refused = 0
    while len(drawn) < count:
        spec = draw(random, max_ranks)
        spec = replace(spec, tables=merged([spec.tables, changes or {}]))
        try:
            refuse_unprovable(spec.case().run)
            drawn.append(spec)
        except PhalanxError as refusal:
            refused += 1
            if refused > 100 * (len(drawn) + 1):
                raise RefusedError(f"hardly any layout goes with what is set: {refusal}") from None
    return drawn


def draw(random: Random, max_ranks: int, rate: float = 0.25, *, small: bool = False) -> CaseSpec:
    """One case, perhaps an impossible one.

    Args:
        random: what to draw from.
        max_ranks: of its layout.
        rate: how likely each feature is.
        small: it has few layers, tokens and micro-batches.
    """
    layout = _layout(random, max_ranks)
    tables, stages = _sizes(random, layout, small=small)
    masked: Masked = random.choices(("uneven", "holes", "none"), (3, 2, 1))[0]
    names = _features(random, Layout.parse(layout), rate)
    spec = CaseSpec(layout, tuple(names), masked, random.random() < rate, tables)
    return _suited(spec, stages, small=small)


def altered(random: Random, spec: CaseSpec, max_ranks: int) -> CaseSpec:
    """A small case that differs from another in a few things, perhaps an impossible one.

    Args:
        random: what to draw from.
        spec: what it is like.
        max_ranks: of layouts from which words are taken.
    """
    fresh = draw(random, max_ranks, small=True)
    words, others = (dict(w.split("=", 1) for w in one.layout.split()) for one in (spec, fresh))
    keys = sorted({*words, *others})
    for key in random.sample(keys, random.choice((0, 0, 1, 1, 2, 3))):
        words.pop(key, None)
        words |= {key: others[key]} if key in others else {}
    words.pop("stages", None)
    layout = str(Layout.from_mapping(dict(words)))
    names = {*spec.features} ^ {*random.sample(DRAWN, random.choice((0, 1, 1, 2)))}
    features = _agreeing(random, sorted(names, key=DRAWN.index), Layout.parse(layout))
    tables, stages = _sizes(random, layout, small=True)
    masked = random.choice((spec.masked, fresh.masked))
    documents = random.choice((spec.documents, fresh.documents))
    return _suited(CaseSpec(layout, tuple(features), masked, documents, tables), stages, small=True)


def _suited(spec: CaseSpec, stages: tuple[int, ...], *, small: bool) -> CaseSpec:
    """The case with uneven stages, if any, and as many tokens as its features leave open."""
    tables = spec.tables
    if stages:
        spec = replace(spec, layout=f"{spec.layout} stages={'+'.join(map(str, stages))}")
    if small and "odd" not in spec.features:
        tables = merged([tables, {"recipe": {"seq": 16}}])
    if "wide" in spec.features:  # which says how wide itself
        tables = {**tables, "model": {"layers": tables["model"]["layers"]}}
    return replace(spec, tables=tables)


def _features(random: Random, layout: Layout, rate: float) -> list[str]:
    """Names in `FEATURES`, that do not undo each other and suit the layout, mostly."""
    return _agreeing(random, [name for name in DRAWN if random.random() < rate], layout)


def _agreeing(random: Random, names: list[str], layout: Layout) -> list[str]:
    """Those that do not undo each other and suit the layout, mostly."""
    if layout.ep > 1 and not set(names) & set(ROUTED):
        names = [*names, random.choice(ROUTED)]
    for group in EXCLUSIVE:
        both = [name for name in names if name in group]
        stays = random.choice(both or [""])
        names = [name for name in names if name not in both or name == stays]
    blocks = layout.precision.recipe in ("fp8-block", "mxfp8", "nvfp4")
    needs = {"stochastic": layout.precision.rest == "bf16", "wide": blocks}
    return [name for name in names if needs.get(name, True)]


def _layout(random: Random, max_ranks: int) -> str:
    dp, pp, tp, cp = _degrees(random, max_ranks)
    words = {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "zero": random.randrange(4)}
    words["mb"] = random.choice((1, 1, 2, 3))
    shards = [n for n in range(1, dp + 1) if dp % n == 0]
    words["shard"] = random.choice(shards + shards[1:] + shards[1:-1])
    chosen: dict[str, object] = dict(words)
    chosen["recompute"] = random.choice(RECOMPUTES)
    chosen["logits"] = random.choice((0, 7, 32, 1024))
    chosen["offload"] = random.choice(("none", "none", "activations", "optimizer", "nvme"))
    if words["zero"] == 3 and random.random() < 0.3:
        chosen["reshard"] = "off"
    schedule = random.choice(SPECS)
    chosen["schedule"] = schedule.name
    if pp > 1 and not schedule.chunks.fixed:
        chosen["v"] = random.choice((1, 2, 2, 3, 4) if pp <= 2 else (1, 2, 2, 3))
    chance = random.random()
    if chance < 0.3:
        chosen["precision"] = f"{random.choice(SCALED)}+fp64"
    elif chance < 0.45:
        chosen["precision"] = random.choice(("fp32", "bf16", "fp16"))
    if tp > 1 and random.random() < 0.3:
        chosen["sp"] = "off"
    if random.random() < 0.2:
        chosen["optimistic"] = "on"
    if random.random() < 0.4:
        sharers = words["shard"] * cp
        chosen["ep"] = random.choice([n for n in range(1, sharers + 1) if sharers % n == 0])
    if cp > 1:
        chosen["context"] = random.choice(CONTEXTS)
    return str(Layout.from_mapping(chosen))


def _degrees(random: Random, max_ranks: int) -> tuple[int, int, int, int]:
    """dp, pp, tp and cp; the more axes, the likelier, since there more features meet."""
    options = [
        (dp, pp, tp, cp)
        for dp in (1, 2, 3, 4, 8)
        for pp in (1, 2, 3, 4, 8)
        for tp in (1, 2, 3, 4)
        for cp in (1, 2, 3, 4)
        if dp * pp * tp * cp <= max_ranks
    ]
    axes = [sum(n > 1 for n in degrees) for degrees in options]
    return random.choices(options, [1 + 3 * a * a for a in axes])[0]


def _sizes(random: Random, layout: str, *, small: bool) -> tuple[Table, tuple[int, ...]]:
    """Layers, heads and batch that suit the layout, mostly; and how uneven its stages are."""
    cut = Layout.parse(layout)
    layers = max(num_stages(cut), 2 if small else random.randint(2, 4)) + random.choice((0, 0, 1))
    stages: tuple[int, ...] = ()
    if num_stages(cut) > 1 and random.random() < 0.3:
        borders = sorted(random.sample(range(1, layers), num_stages(cut) - 1))
        stages = tuple(b - a for a, b in zip([0, *borders], [*borders, layers], strict=True))
    heads, kv_heads = random.choice(((4, 4), (4, 2), (4, 1), (6, 3), (2, 2)))
    least = enough_micro_batches(cut, 1)
    most = 2 if small else max(1, 8 // (cut.mb * least))
    m = enough_micro_batches(cut, least * random.randint(1, most))
    batch = cut.dp * cut.mb * m
    model = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": 12 * heads}
    recipe = {"batch": batch, "seed": random.randrange(1000)}
    return {"model": model, "recipe": recipe}, stages
