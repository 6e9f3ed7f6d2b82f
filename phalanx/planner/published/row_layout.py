"""Reads the layout of a published run; what a row leaves open is filled in by the same rules."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import Precision
from phalanx.core.recompute import FULL, MODES, Recompute
from phalanx.planner.published.cells import Row, degree, from_recipe, needed, whole

SCHEDULES = {
    "": "",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved 1f1b": "interleaved",
    "1f1b-i": "interleaved",
    "interleaved": "interleaved",
    "zb-1p": "zb-h1",
    "zb-h1": "zb-h1",
    "zb-2p": "zb-h2",
    "zb-h2": "zb-h2",
    "zb-v": "zb-v",
    "zbv": "zb-v",
    "dualpipe": "dualpipe",
    "dualpipev": "dualpipev",
}
# Made to overlap messages of experts with products: DeepSeek-V3 (arXiv:2412.19437), section 3.2.1.
OVERLAPS_EXPERTS = "dualpipe"
PARTS = {
    "core_attn": "core",
    "layernorm": "norms",
    "mlp": "mlp",
    "moe_act": "activation",
    "moe": "experts",
    "mla_up_proj": "latent",
}
MOST_BUBBLE = 0.5  # of the work, beyond which nobody leaves a pipeline uninterleaved
MOST_CHUNKS = 8
FORMATS = re.compile(r"bf16|fp16|mxfp8|nvfp4|fp8|fp32|fp64")
FP8_RECIPES = {"mxfp8": "mxfp8", "block": "fp8-block", "current": "fp8-current"}
FP8_RECIPES |= {"row": "fp8-current", "tensor": "fp8-current"}
ROUNDED = 0.1  # share by which a batch may be changed so that it divides


def read_layouts(
    row: Row, shape: ModelShape, batch: int, assumptions: list[str]
) -> tuple[tuple[Layout, ...], int]:
    """The layout of a row, several where it leaves something open, and the batch that they divide.

    Args:
        row: the cells.
        shape: the model.
        batch: sequences per step, as the row has it.
        assumptions: what is filled in is added here.

    Raises:
        UnusableError: no number of devices, or a schedule that nobody knows.
    """
    layouts = tuple(_layouts(row, shape, batch, assumptions))
    first = layouts[0]
    group = first.pp if first.schedule == "interleaved" else 1
    for unit in (first.dp * first.mb * group, first.dp * first.mb):
        near = max(round(batch / unit), 1) * unit
        if abs(near / batch - 1) <= ROUNDED:
            if near != batch:
                assumptions.append(f"{near} sequences instead of {batch}, which do not divide")
            return layouts, near
    return layouts, batch


def precision_of(row: Row) -> str:
    """The number format of products; bf16 where the row names none that is known.

    Of fp8 the column `fp8_recipe` says how it is scaled; where it is empty, with a history.
    """
    found = FORMATS.search(row.get("dtype", "").lower())
    if found is None:
        return "bf16"
    recipe = row.get("fp8_recipe", "").lower()
    if found[0] != "fp8":
        return found[0]
    return next((name for word, name in FP8_RECIPES.items() if word in recipe), "fp8")


def _layouts(row: Row, shape: ModelShape, batch: int, assumptions: list[str]) -> Iterator[Layout]:
    """The layouts that differ in micro-batch and recomputation, where a row leaves them open."""
    tp, cp, pp = (degree(row, key) or 1 for key in ("tp", "cp", "pp"))
    dp = _replicas(row, tp * cp * pp, assumptions)
    schedule, v, stages = _schedule(row, shape, pp, assumptions)
    if schedule == "interleaved" or v == 1:
        stages = _stated_stages(row, shape, pp * v) or stages
    if pp > 1 and not row.get("schedule", "").strip() and v == 1:
        schedule, v = _unstated_schedule(row, shape, pp, batch / dp, assumptions)
    recompute, precision = _recompute(row, assumptions), precision_of(row)
    base = Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        cp=cp,
        ep=degree(row, "ep") or 1,
        zero=_zero(row),
        v=v,
        schedule=schedule,
        stages=stages,
        precision=Precision.parse(precision),
        compile="compiled" in row.get("program", ""),
        sp=_sp(row, precision),
    )
    sizes = _micro_batches(row, dp, batch, assumptions)
    for mb, mode in product(sizes, recompute):
        yield replace(base, mb=mb, recompute=mode)


def _sp(row: Row, precision: str) -> bool:
    """Whether the sequence is cut between products; programs of 2021 could not yet."""
    said = row.get("sequence_parallel", "").lower() or from_recipe(row, "sp_recipe")
    if said.startswith("no"):
        return False
    return said.startswith("yes") or precision != "fp16"


def _replicas(row: Row, others: int, assumptions: list[str]) -> int:
    """dp; what the other axes leave of the devices, where the row has none or one that is wrong."""
    ranks, dp = needed(row, "n_gpus"), degree(row, "dp")
    left = ranks // others
    if dp is None or (dp * others != ranks and left * others == ranks):
        if dp is not None:
            assumptions.append(f"dp={left}: the dp={dp} of the row gives other than {ranks} ranks")
        return max(left, 1)
    return dp


def _unstated_schedule(
    row: Row, shape: ModelShape, pp: int, sequences: float, assumptions: list[str]
) -> tuple[str, int]:
    """1F1B, unless it would idle for more than half of the work: then interleaved, if it can be."""
    m = sequences / (whole(row, "micro_batch") or 1)
    chunks = [v for v in range(2, MOST_CHUNKS + 1) if v * pp <= shape.layers and m % pp == 0]
    if (pp - 1) / max(m, 1) <= MOST_BUBBLE or not chunks:
        assumptions.append("1F1B")
        return "1f1b", 1
    assumptions.append(f"interleaved in {chunks[-1]} chunks, since 1F1B would idle too long")
    return "interleaved", chunks[-1]


def _micro_batches(row: Row, dp: int, batch: int, assumptions: list[str]) -> list[int]:
    mb = whole(row, "micro_batch")
    if mb is not None:
        return [mb]
    assumptions.append("best micro-batch of 1, 2, 4, 8")
    return [size for size in (1, 2, 4, 8) if batch % (dp * size) == 0] or [1]


def _recompute(row: Row, assumptions: list[str]) -> list[Recompute]:
    """The recompute modes that a row leaves open; parts are named as in Megatron Core."""
    text = row.get("recompute", "").lower().strip() or from_recipe(row, "recompute_recipe")
    if not text:
        assumptions.append("least recomputation that fits")
        return [*MODES]
    if text in ("none", "full", "selective"):
        return [Recompute.parse(text)]
    if text.startswith("full"):
        return [FULL]
    if "per-op" in text:
        return [Recompute.parse("operators")]
    named = re.split(r"[+,]", text.partition(":")[2] or text)
    parts = [PARTS[name.strip()] for name in named if name.strip() in PARTS]
    if not parts:
        assumptions.append(f"recompute {text!r} taken as selective")
    return [Recompute.parse("+".join(parts) or "selective")]


def _zero(row: Row) -> int:
    """ZeRO stage; a row that names none shards the optimizer unless its program could not yet."""
    text = row.get("zero_stage_or_fsdp", "").lower()
    digit = re.search(r"zero-?(\d)", text)
    if digit:
        return int(digit[1])
    if "fsdp" in text or "hsdp" in text:
        return 3
    return 0 if precision_of(row) == "fp16" or text == "none" else 1


def _schedule_named(text: str, assumptions: list[str]) -> str:
    """The schedule of this name, or of the name that it begins with; 1F1B if nobody knows it."""
    plain = re.sub(r"\s*\(.*?\)", "", text).strip()
    if plain in SCHEDULES:
        return SCHEDULES[plain]
    begins = [name for name in SCHEDULES if name and plain.startswith(name)]
    found = SCHEDULES[max(begins, key=len)] if begins else "1f1b"
    assumptions.append(f"schedule {text!r} taken as {found}")
    return found


def _schedule(
    row: Row, shape: ModelShape, pp: int, assumptions: list[str]
) -> tuple[str, int, tuple[int, ...]]:
    """Name, stages per rank, and layers of each stage where they are not as even as can be."""
    text, chunks = row.get("schedule", "").lower().strip(), row.get("vpp", "")
    name = _schedule_named(text, assumptions)
    v = max(min(whole(row, "vpp") or 1, shape.layers // pp), 1)
    if pp == 1:
        return "1f1b", 1, ()
    if chunks.startswith("max"):
        v = -(-shape.layers // pp)
        bare = v * pp - shape.layers  # embedding and head stand alone
        return "interleaved", v, (0, *(1,) * (v * pp - 2), 2 - bare) if bare else ()
    if name in ("zb-v", "dualpipev") or v > 1:
        return (name, 2, ()) if name in ("zb-v", "dualpipev") else ("interleaved", v, ())
    if name == "interleaved":
        return _one_or_open_chunks(chunks, shape, pp, assumptions)
    return name or "1f1b", 1, ()


_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|(.)\*(\d+)")


def _stated_stages(row: Row, shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Layers of each stage, if the row has them: E embedding, t layer, m MTP, L loss, | between.

    `Et*4|(t*4|)*14tmL` is one with 4 and an embedding, 14 with 4, and one with 1, MTP and loss.
    """
    text, before = row.get("pp_layout", "").strip(), ""
    while text != before:  # inner repetitions first
        before = text
        text = _REPEATED.sub(lambda m: (m[1] or m[3]) * int(m[2] or m[4]), text)
    counts = tuple(sum(letter in "tm" for letter in chunk) for chunk in text.split("|"))
    fits = len(counts) == stages and sum(counts) == shape.layers and stages > 1
    return counts if fits else ()


def _one_or_open_chunks(
    stated: str, shape: ModelShape, pp: int, assumptions: list[str]
) -> tuple[str, int, tuple[int, ...]]:
    """An interleaved schedule of one chunk is 1F1B; of open ones each has two layers or more."""
    if stated == "1":
        assumptions.append("1F1B, since interleaved in one chunk is that")
        return "1f1b", 1, ()
    even = [v for v in range(2, MOST_CHUNKS + 1) if shape.layers % (v * pp) == 0]
    fitting = [v for v in even if shape.layers >= 2 * v * pp] or even
    if not fitting:
        assumptions.append("1F1B, since the layers do not divide into chunks")
        return "1f1b", 1, ()
    assumptions.append(f"interleaved in {fitting[-1]} chunks")
    return "interleaved", fitting[-1], ()
