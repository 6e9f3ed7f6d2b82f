"""The cases that the oracle takes: a fixed covering set, and a random sample."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
            "dense_layers": 2,
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

# What a sample draws from; rounding by chance needs bf16, where the oracle is not sharp.
DRAWN = tuple(name for name in FEATURES if name != "stochastic")


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


def _parsed(line: str) -> CaseSpec:
    """Read `layout | features | mask`, the last two optional."""
    layout, words, mask = (*(part.strip() for part in line.split("|")), "", "")[:3]
    names = words.split()
    return CaseSpec(
        layout=layout,
        features=tuple(name for name in names if name != "documents"),
        masked=mask or "uneven",  # type: ignore[arg-type]  # the lines below write no other
        documents="documents" in names,
    )


RECOMPUTES = (
    *("none", "none", "selective", "full", "full:2", "full:3"),
    *("norms", "mlp", "activation+core", "operators", "norms+mlp+core"),
)

# Every pair of features that meet somewhere in the code, at least once.
COVERING_SET = tuple(
    _parsed(line)
    for line in """
    dp=1 mb=2 recompute=full logits=24 offload=activations+nvme | tied dropout smoothing
    tp=2 mb=2 precision=fp16 | gpt odd max-norm
    dp=2 tp=2 zero=1 mb=2 | bf16-moments tied
    dp=2 pp=2 zero=3 precision=bf16 | stochastic tied bf16-moments
    tp=2 zero=0 mb=2 precision=bf16 | stochastic gpt
    dp=2 precision=fp8 | mha
    dp=2 zero=3 precision=fp8+fp64 | odd dropout tied
    dp=2 pp=2 tp=2 mb=2 recompute=full precision=fp8+fp64 | gpt documents | holes
    tp=2 mb=2 schedule=zb-h1 precision=fp8-current+fp64 | latent
    pp=2 tp=2 sp=off zero=2 recompute=full precision=fp8-current+fp64 | qk-norm max-norm
    dp=2 tp=2 mb=4 zero=2 precision=fp8-block+fp64 | wide
    pp=2 mb=4 precision=mxfp8+fp64 | gpt
    tp=2 mb=4 precision=mxfp8+fp64 | wide
    tp=2 precision=nvfp4+fp64 | smoothing
    cp=2 tp=2 mb=2 precision=fp8+fp64 | tied
    pp=2 schedule=dualpipe precision=fp8+fp64 |
    cp=2 pp=2 context=ulysses precision=fp8-current+fp64 | documents
    dp=2 ep=2 tp=2 precision=fp8-current+fp64 | deepseek
    dp=2 pp=2 zero=2 precision=fp16 | tied dropout | holes
    dp=2 zero=0 mb=2 | gpt sgd
    dp=2 zero=1 recompute=selective | odd tied dropout documents
    dp=2 zero=2 precision=fp32 | smoothing qk-norm qkv-bias
    dp=2 zero=3 mb=2 recompute=full:3 offload=nvme reshard=off | tied max-norm | holes
    tp=2 mb=4 recompute=operators logits=50 | odd gpt dropout smoothing documents
    tp=2 sp=off mb=4 recompute=full logits=24 | odd tied dropout qk-norm | holes
    tp=2 mb=4 recompute=selective precision=bf16 | mha qk-norm
    pp=2 schedule=gpipe | tied max-norm dropout | holes
    pp=2 stages=1+4 recompute=full | gpt tied smoothing documents
    pp=2 schedule=interleaved v=2 mb=2 | tied sgd | none
    dp=4 shard=2 zero=1 offload=optimizer | gpt dropout | holes
    dp=4 shard=2 zero=3 mb=2 recompute=full | odd tied documents
    dp=2 tp=2 shard=1 zero=3 recompute=full mb=2 offload=nvme | tied
    dp=2 tp=2 zero=0 sp=off mb=2 offload=optimizer+activations | gpt smoothing max-norm
    dp=2 tp=2 zero=2 mb=2 recompute=operators+core | odd dropout documents qk-norm | holes
    dp=2 tp=2 zero=3 mb=2 precision=fp32 recompute=norms+mlp | tied qkv-bias
    dp=2 pp=2 zero=1 schedule=gpipe | tied odd no-clip
    dp=2 pp=2 zero=2 schedule=interleaved v=2 offload=optimizer | tied dropout smoothing
    dp=2 pp=2 zero=3 recompute=mlp logits=7 offload=activations | gpt documents | holes
    pp=2 tp=2 schedule=interleaved v=2 mb=2 recompute=selective | odd tied gpt qk-norm
    pp=2 tp=2 sp=off stages=2+3 mb=2 | smoothing dropout max-norm | holes
    pp=4 stages=2+1+3+1 mb=2 | tied documents
    pp=2 schedule=zb-h1 recompute=full:2 logits=20 | gpt tied
    dp=2 pp=2 zero=2 schedule=zb-h1 recompute=full | odd tied documents
    pp=4 tp=2 schedule=zb-h2 mb=2 recompute=norms+activation optimistic=on | gpt odd dropout | holes
    dp=2 pp=2 tp=2 zero=3 schedule=zb-h2 recompute=selective | tied smoothing
    pp=4 schedule=zb-v stages=1+2+1+1+1+1+2+1 mb=2 | tied gpt | holes
    dp=2 pp=2 zero=3 schedule=zb-v recompute=full:2 logits=40 | odd tied dropout documents
    pp=2 tp=2 schedule=dualpipev mb=2 recompute=selective | odd smoothing
    dp=2 pp=2 zero=2 schedule=dualpipev | tied max-norm documents
    pp=4 schedule=dualpipe mb=2 recompute=operators logits=9 | gpt odd sgd
    dp=2 pp=2 tp=2 zero=1 schedule=dualpipe recompute=full | tied dropout
    dp=4 shard=2 pp=2 zero=3 schedule=dualpipe | odd tied | holes
    tp=4 mb=4 recompute=full | mha odd smoothing
    tp=4 mb=4 | tied qk-norm dropout
    tp=2 sp=off mb=4 recompute=full | mqa gpt documents
    dp=2 tp=2 zero=3 mb=2 | mqa qkv-bias qk-norm | holes
    dp=2 pp=2 tp=2 zero=2 schedule=zb-h1 recompute=selective | mqa odd
    dp=1 precision=bf16 | odd latent
    tp=2 mb=4 | odd direct-query dropout
    tp=2 sp=off mb=4 recompute=selective | latent documents
    dp=2 tp=2 zero=3 mb=2 recompute=full | latent deepseek smoothing
    pp=2 tp=2 zero=1 recompute=full | tied direct-query dropout documents | holes
    pp=2 tp=2 schedule=zb-h1 mb=2 | latent tied
    dp=2 pp=2 schedule=gpipe zero=2 precision=fp32 | latent gpt
    cp=2 mb=2 recompute=norms+mlp+core logits=10 | odd tied dropout documents
    cp=2 mb=4 context=gather recompute=selective | gpt max-norm | holes
    cp=2 mb=4 context=ulysses recompute=full | smoothing documents direct-query
    cp=4 zero=3 | mha odd tied
    cp=2 tp=2 recompute=full | gpt odd dropout documents
    cp=2 tp=2 sp=off mb=2 context=gather precision=bf16 | mha qk-norm
    dp=2 cp=2 zero=0 mb=2 | gpt smoothing | holes
    dp=2 cp=2 shard=1 zero=2 mb=2 context=gather | odd tied documents
    pp=2 cp=2 schedule=interleaved v=2 mb=2 recompute=selective | tied dropout latent
    pp=2 cp=2 zero=2 schedule=zb-h1 recompute=full | gpt documents
    dp=2 cp=2 tp=2 zero=3 context=ulysses | mha tied odd qk-norm
    dp=2 pp=2 tp=2 zero=3 schedule=interleaved v=2 recompute=full:2 logits=30 | odd tied dropout
    dp=4 shard=2 tp=2 zero=2 | gpt odd max-norm | holes
    dp=1 mb=4 recompute=selective | experts tied documents smoothing
    dp=2 tp=2 zero=3 mb=2 recompute=full | deepseek odd dropout | holes
    pp=2 tp=2 sp=off mb=4 stages=3+1 | experts odd max-norm dropout
    dp=2 pp=2 zero=2 mb=2 schedule=interleaved v=2 recompute=full | deepseek documents
    dp=2 ep=2 zero=1 mb=2 | experts odd documents
    dp=4 ep=2 tp=2 zero=3 mb=2 recompute=full | deepseek dropout
    dp=4 shard=2 ep=2 zero=2 | experts smoothing max-norm | holes
    dp=2 ep=2 pp=2 tp=2 zero=1 schedule=zb-h1 mb=2 | deepseek latent tied
    dp=2 ep=2 pp=2 zero=2 schedule=dualpipe mb=1 | deepseek
    cp=2 ep=2 mb=2 recompute=norms+activation | experts odd documents
    dp=2 ep=2 tp=2 zero=3 recompute=operators+mlp logits=30 | deepseek smoothing
    dp=2 cp=2 ep=4 zero=3 mb=2 recompute=full | experts deepseek dropout
    cp=2 tp=2 pp=2 ep=2 zero=2 schedule=zb-h1 context=gather | experts smoothing | holes
    """.strip().splitlines()
)


def covering_set(max_ranks: int = 8) -> list[CaseSpec]:
    """The covering set, those of more than `max_ranks` ranks left out."""
    return [q for q in COVERING_SET if Layout.parse(q.layout).ranks <= max_ranks]


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
        spec = _draw(random, max_ranks)
        spec = replace(spec, tables=merged([spec.tables, changes or {}]))
        try:
            refuse_unprovable(spec.case().run)
            drawn.append(spec)
        except PhalanxError as refusal:
            refused += 1
            if refused > 100 * (len(drawn) + 1):
                raise RefusedError(f"hardly any layout goes with what is set: {refusal}") from None
    return drawn


def _draw(random: Random, max_ranks: int) -> CaseSpec:
    """One case, perhaps an impossible one."""
    layout = _layout(random, max_ranks)
    tables, stages = _sizes(random, layout)
    if stages:
        layout = f"{layout} stages={'+'.join(map(str, stages))}"
    names = [name for name in DRAWN if random.random() < 0.25]
    if Layout.parse(layout).ep > 1 and not set(names) & set(ROUTED):
        names.append(random.choice(ROUTED))
    masked: Masked = random.choices(("uneven", "holes", "none"), (3, 2, 1))[0]
    return CaseSpec(layout, tuple(names), masked, random.random() < 0.25, tables)


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
        chosen["v"] = random.choice((1, 2, 2, 3) if pp <= 2 else (1, 2, 2))
    if random.random() < 0.3:
        chosen["precision"] = f"{random.choice(SCALED)}+fp64"
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


def _sizes(random: Random, layout: str) -> tuple[Table, tuple[int, ...]]:
    """Layers, heads and batch that suit the layout, mostly; and how uneven its stages are."""
    cut = Layout.parse(layout)
    layers = max(num_stages(cut), random.randint(2, 4)) + random.choice((0, 0, 1))
    stages: tuple[int, ...] = ()
    if num_stages(cut) > 1 and random.random() < 0.3:
        borders = sorted(random.sample(range(1, layers), num_stages(cut) - 1))
        stages = tuple(b - a for a, b in zip([0, *borders], [*borders, layers], strict=True))
    heads, kv_heads = random.choice(((4, 4), (4, 2), (4, 1), (6, 3), (2, 2)))
    least = enough_micro_batches(cut, 1)
    m = enough_micro_batches(cut, least * random.randint(1, max(1, 8 // (cut.mb * least))))
    batch = cut.dp * cut.mb * m
    model = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": 12 * heads}
    return {"model": model, "recipe": {"batch": batch, "seed": random.randrange(1000)}}, stages
