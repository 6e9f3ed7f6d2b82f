"""What goes together: every pair of features, either a case for the oracle or a refusal.

Nothing here decides anything. Each pair is put into one run, and the rooms that own the features
say whether they can do it. `docs/composition.md` is what they say, as a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.verify import refuse_unprovable
from phalanx.schedules.registry import SPECS

DEGREES = ("dp", "pp", "tp", "cp", "ep")

# PipeDream is another update: there is no question about it that the oracle could answer.
SCHEDULES = {
    spec.title: (f"pp=2{'' if spec.chunks.fixed else ' v=2'} schedule={spec.name}", ())
    for spec in SPECS
    if not spec.asynchronous
}

# What a layout says, and what the model or the recipe needs with it (names in `FEATURES`).
LAYOUTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ZeRO-0": ("dp=2 zero=0", ()),
    "ZeRO-2": ("dp=2 zero=2", ()),
    "ZeRO-3": ("dp=2 zero=3", ()),
    "HSDP": ("dp=4 shard=2 zero=3", ()),
    "tp": ("tp=2", ()),
    "tp, sp off": ("tp=2 sp=off", ()),
    "cp, ring": ("cp=2 context=ring", ()),
    "cp, gather": ("cp=2 context=gather", ()),
    "cp, Ulysses": ("cp=2 context=ulysses", ()),
    "ep": ("dp=2 ep=2", ("experts",)),
    **SCHEDULES,
    "optimistic": ("optimistic=on", ()),
    "recompute core": ("recompute=selective", ()),
    "recompute all": ("recompute=full", ()),
    "recompute segments": ("recompute=full:2", ()),
    "recompute parts": ("recompute=norms+mlp", ()),
    "logits in chunks": ("logits=24", ()),
    "reshard off": ("dp=2 zero=3 reshard=off", ()),
    "offload activations": ("offload=activations", ()),
    "offload optimizer": ("offload=optimizer", ()),
    "offload nvme": ("offload=nvme", ()),
    "compile": ("compile=on", ()),
    "bf16": ("precision=bf16", ()),
    "fp16": ("precision=fp16", ()),
    "FP8": ("precision=fp8+fp64", ()),
    "FP8 current": ("precision=fp8-current+fp64", ()),
    "FP8 blocks": ("precision=fp8-block+fp64", ("wide",)),
    "MXFP8": ("precision=mxfp8+fp64", ("wide",)),
    "NVFP4": ("precision=nvfp4+fp64", ("wide",)),
    "bf16 alone": ("precision=bf16", ("stochastic",)),
}
MODELS: Mapping[str, tuple[str, ...]] = {
    "experts": ("experts",),
    "latent attention": ("latent",),
    "qk-norm": ("qk-norm",),
    "tied": ("tied",),
    "GPT": ("gpt",),
    "dropout": ("dropout",),
}


@dataclass(frozen=True)
class Pair:
    """Two features together.

    Attributes:
        names: of both.
        spec: that has both.
        refusal: why it cannot be run; None where it can.
        same: they are two values of one key, so that there is nothing to compare.
    """

    names: tuple[str, str]
    spec: CaseSpec
    refusal: str | None = None
    same: bool = False


def pairs() -> Iterator[Pair]:
    """Every pair of features."""
    for first, second in combinations([*LAYOUTS, *MODELS], 2):
        yield _pair(first, second)


def together(max_ranks: int) -> list[CaseSpec]:
    """The cases of all pairs that are not refused, each layout and model once."""
    possible = [p.spec for p in pairs() if not (p.same or p.refusal)]
    fits = [q for q in possible if Layout.parse(q.layout).ranks <= max_ranks]
    return list({(q.layout, q.features): q for q in fits}.values())


def _pair(first: str, second: str) -> Pair:
    lines = [LAYOUTS[name][0] for name in (first, second) if name in LAYOUTS]
    features = [*_features(first), *_features(second)]
    words = [dict(word.split("=") for word in line.split()) for line in lines]
    spec = CaseSpec(_joined(words), tuple(dict.fromkeys(features)))
    if len(words) == 2 and _clash(*words):
        return Pair((first, second), spec, same=True)
    try:
        run = spec.case().run
        refuse_unprovable(run)
        return Pair((first, second), spec)
    except PhalanxError as refusal:
        return Pair((first, second), spec, refusal=str(refusal))


def _features(name: str) -> Sequence[str]:
    return LAYOUTS[name][1] if name in LAYOUTS else MODELS[name]


def _clash(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Whether both give one key different values; degrees may, the larger counts."""
    shared = (first.keys() & second.keys()) - set(DEGREES)
    return any(first[key] != second[key] for key in shared)


def _joined(words: Sequence[Mapping[str, str]]) -> str:
    """One layout with the keys of all, and the larger of two degrees."""
    joined: dict[str, str] = {}
    for key, value in (item for one in words for item in one.items()):
        joined[key] = max(joined.get(key, value), value) if key in DEGREES else value
    return str(Layout.from_mapping(dict(joined)))


def to_markdown() -> str:
    """The table of all pairs, and the reason of each refusal."""
    names = [*LAYOUTS, *MODELS]
    found = {pair.names: pair for pair in pairs()}
    reasons = list(dict.fromkeys(p.refusal for p in found.values() if p.refusal))
    lines = [
        "# What goes together",
        "",
        "Written by `tools/composition.py`. A dot: both are trained together, and `phalanx verify",
        "--pairs` compares them with one device. A number: refused, for the reason below. Empty:",
        "two values of one key. PipeDream is trained too, and claims another update: not here.",
        "",
        "| | " + " | ".join(names[:-1]) + " |",
        "|---" * len(names) + "|",
    ]
    for row, name in enumerate(names[1:], 1):
        marks = [_mark(found[other, name], reasons) for other in names[:row]]
        lines.append(f"| **{name}** | " + " | ".join(marks) + " |")
    lines += ["", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _mark(pair: Pair, reasons: Sequence[str]) -> str:
    if pair.same:
        return ""
    return str(reasons.index(pair.refusal) + 1) if pair.refusal else "·"
