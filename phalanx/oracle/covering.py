"""Which cases together let every feature meet every size: a covering set, drawn and then chosen.

A fault often needs two things at once: a feature, and an axis of some size. Code that treats two
ranks right may be wrong for three, so sizes of 1, 2, 3 and more count apart. Out of many drawn
cases those are chosen, one after the other, that let most pairs meet for the first time, for what
they cost (the greedy cover of Chvatal 1979, Mathematics of Operations Research 4).
"""

from collections.abc import Sequence
from itertools import combinations, product
from random import Random

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.precision import PLAIN, SCALED
from phalanx.oracle.cases import ROUTED, CaseSpec, draw
from phalanx.oracle.verify import refuse_unprovable
from phalanx.schedules.layouts import chunks

Pair = tuple[str, str]

MOST = 4  # sizes of so many and more are one class

# How numbers are rounded meets only the axes that cut the tensors that are rounded together.
ROUNDINGS = frozenset({*PLAIN, *SCALED, "stochastic", "bf16-moments"})
CUT_TENSORS = ("dp", "tp", "cp")

# Features that meet somewhere in the code: a fault may need both.
MEETINGS: frozenset[Pair] = frozenset(
    (first, second)
    for first, others in {
        "odd": "tied gpt dropout smoothing documents zero=3 shard latent mqa ulysses ring gather",
        "gpt": "zero=3 sp=off qk-norm shard documents tied",
        "qk-norm": "sp=off mqa",
        "mqa": "sp=off zero=3",
        "latent": "sp=off zero=3 documents",
        "dropout": "sp=off latent experts deepseek",
        "smoothing": "sp=off logits",
        "max-norm": "shard zero=3 sp=off",
        "tied": "zero=3 shard stages copies dualpipe zb-v dualpipev",
        "documents": "ring gather ulysses dualpipe",
        "recompute all": "zero=3 tied gpt qk-norm mqa latent dropout documents experts deepseek",
        "recompute segments": "zero=3 tied dropout documents",
        "recompute core": "qk-norm latent ring gather ulysses zb-h1",
        "recompute mlp": "experts deepseek gpt sp sp=off",
        "recompute norms": "gpt qk-norm sp sp=off",
        "logits": "tied sp sp=off zero=3 zb-h1",
        "short last chunk": "sp sp=off smoothing tied ring",
        "experts": "sp sp=off ring gather ulysses zero=3 shard copies documents zb-h1 dualpipe",
        "deepseek": "sp sp=off ring gather ulysses zero=3 shard copies latent zb-h1 dualpipe",
        "experts in 16 bits": "sp ring zero=3",
        "offload activations": "tied zb-h1 dualpipe",
        "optimistic": "tied zero=3 max-norm",
    }.items()
    for second in others.split(" ")
)


def features_of(spec: CaseSpec) -> set[str]:
    """Everything that a case has or does, by name."""
    layout, run = Layout.parse(spec.layout), spec.case().run
    precision, seq = run.layout.precision, run.recipe.seq
    tokens = run.layout.padded_seq(seq) // layout.cp * layout.mb
    routed = any(run.model.routes(layer) for layer in range(run.model.layers))
    found = {*spec.features, layout.schedule, precision.recipe or precision.rest}
    found -= set() if routed else set(ROUTED)
    found |= {f"recompute {part}" for part in layout.recompute.parts}
    found |= {f"zero={layout.zero}"} if layout.sharers > 1 else set()
    found |= {layout.context} if layout.cp > 1 else set()
    conditions = {
        "shard": 1 < layout.shards < layout.dp,
        "copies": layout.shards == 1 < layout.dp,
        "mb": layout.mb > 1,
        "sp": layout.tp > 1 and layout.sequence_parallel,
        "sp=off": layout.tp > 1 and not layout.sequence_parallel,
        "stages": bool(layout.stages),
        "documents": spec.documents,
        "recompute all": layout.recompute.segment == 1,
        "recompute segments": layout.recompute.segment > 1,
        "logits": layout.logits > 0,
        "short last chunk": 0 < layout.logits < tokens and tokens % layout.logits > 0,
        "offload activations": layout.offload.activations,
        "offload optimizer": layout.offload.optimizer,
        "offload nvme": layout.offload.nvme,
        "reshard=off": layout.zero == 3 and not layout.reshard,
        "optimistic": layout.optimistic,
        "experts in 16 bits": routed and precision.rest in ("bf16", "fp16"),
        "copies of experts": _has_copies_of_experts(spec, layout),
        "several padded": run.layout.padded_seq(seq) - seq > 1,
        "mqa": run.model.kv_heads == 1,
        "replicated kv heads": run.model.kv_heads < layout.tp,
    }
    return found | {name for name, holds in conditions.items() if holds}


def _has_copies_of_experts(spec: CaseSpec, layout: Layout) -> bool:
    """Whether expert shards have copies, each of which sees targets: holes leave half without."""
    sharded = layout.zero > 0 and 1 < layout.shards < layout.dp
    return layout.ep > 1 and sharded and spec.masked != "holes"


def sizes_of(spec: CaseSpec) -> set[str]:
    """The class of every axis: for example `cp=3`, or `pp=4` for four and more."""
    layout = Layout.parse(spec.layout)
    counts = {axis: getattr(layout, axis) for axis in ("dp", "pp", "tp", "cp", "ep")}
    counts["v"] = chunks(layout)
    return {f"{axis}={min(count, MOST)}" for axis, count in counts.items()}


def pairs_of(spec: CaseSpec) -> set[Pair]:
    """Which pairs meet: of a feature and a size, of two sizes, of two features that should."""
    features, sizes = features_of(spec), sizes_of(spec)
    together = {pair for pair in MEETINGS if pair[0] in features and pair[1] in features}
    cut = {size for size in sizes if size.split("=")[0] in CUT_TENSORS}
    return {
        *product(features - ROUNDINGS, sizes),
        *product(features & ROUNDINGS, cut),
        *combinations(sorted(sizes), 2),
        *together,
    }


def candidates(count: int, seed: int, max_ranks: int = 8) -> list[CaseSpec]:
    """Drawn cases that can be run: small, and with many features at once.

    Args:
        count: how many.
        seed: of the draw.
        max_ranks: of a layout.
    """
    random, found = Random(seed), list[CaseSpec]()
    while len(found) < count:
        spec = draw(random, max_ranks, rate=0.45, small=True)
        try:
            refuse_unprovable(spec.case().run)
            found.append(spec)
        except PhalanxError:
            continue
    return found


def choose(candidates: Sequence[CaseSpec], first: Sequence[CaseSpec] = ()) -> list[CaseSpec]:
    """The cases of a covering set, in the order in which they are chosen.

    Args:
        candidates: to choose from.
        first: what the set has in any case; it is not among the chosen.
    """
    met = set[Pair]().union(*(pairs_of(spec) for spec in first))
    missing = {i: pairs_of(spec) - met for i, spec in enumerate(candidates)}
    costs = [cost(spec) for spec in candidates]
    chosen = []
    while missing:
        best = max(missing, key=lambda i: (len(missing[i]) / costs[i], -i))
        met = missing.pop(best)
        chosen.append(candidates[best])
        missing = {i: pairs - met for i, pairs in missing.items() if pairs - met}
    return chosen


def cost(spec: CaseSpec) -> float:
    """About how many seconds of a core it takes: the reference, and the steps of all ranks.

    Fitted to what cases of a former set took; messages take what grows with the ranks squared.
    """
    run = spec.case().run
    layout, model = run.layout, run.model
    draws = 1 if layout.precision.rest == "fp64" else 4
    reference = draws * model.layers * (0.09 if model.hidden > 100 else 0.025)
    routed = sum(model.routes(layer) for layer in range(model.layers)) / model.layers
    block = 0.015 * (1 + (layout.tp > 1) + 2 * bool(layout.precision.recipe)) + 0.03 * routed
    blocks = layout.ranks * run.micro_batches * model.layers / layout.pp
    return 0.02 + reference + 0.0125 * layout.ranks**2 + blocks * block
