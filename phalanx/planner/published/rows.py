"""Reads published training runs: what a row says about model, devices, layout and result.

The columns are those of the files in `benchmarks/published/`. What a row leaves open is filled
in by one rule for all rows, and the rule is noted with the row.
"""

import csv
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from phalanx.catalog import load
from phalanx.core.cluster import Accelerator, Cluster
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.flops import flops_per_token, recompute_flops_per_token
from phalanx.cost.framework import Framework
from phalanx.planner.published.cells import Row, UnusableError, needed, number, whole
from phalanx.planner.published.programs import framework_of_row
from phalanx.planner.published.row_layout import read_layouts
from phalanx.planner.workload import formula_mode

GPT_VOCABULARY = 51200  # of GPT-2, padded as Megatron-LM pads it, where a row names none
GIB = 2**30
DEFAULT_SEQ = {"maxtext": 2048}  # of its base.yml
OPEN_MICRO_BATCHES = 4  # per pipeline rank, of a row that says only how fast it was
ONE_LAYER = re.compile(r"one layer", re.IGNORECASE)
COUNTS_RECOMPUTE = re.compile(r"counts? recompute", re.IGNORECASE)
_SIZE = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?) ?[bB](?![A-Za-z\d])")
NETWORK = re.compile(r"inter-node (\d+) ?\(?Gb/s", re.IGNORECASE)


@dataclass(frozen=True)
class PublishedRun:
    """A row as values.

    Attributes:
        id: of the row; only ever printed.
        shape: the model.
        cluster: the devices.
        layouts: the layouts that the row leaves open; one, if it says everything.
        seq: tokens per sequence.
        batch: sequences per step.
        framework: what its program did.
        one_layer: forward and backward of one block were measured, not a step.
        step_seconds: as published; None if it was not.
        peak_bytes: as published; None if it was not.
        allocated: the published peak is what the program asked for; else what was reserved, or the
            row does not say, and it is compared with what the device must have.
        complete: the row names its layout completely.
        assumptions: what the row left open, and how it was filled in.
    """

    id: str
    shape: ModelShape
    cluster: Cluster
    layouts: tuple[Layout, ...]
    seq: int
    batch: int
    framework: Framework
    one_layer: bool
    step_seconds: float | None
    peak_bytes: float | None
    allocated: bool
    complete: bool
    assumptions: tuple[str, ...]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        UsageError: there is no such file, it is no text, or lacks a column that every file has.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[Row] = list(csv.DictReader(file, restval=""))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no CSV file of published runs: {error}") from None
    for column in ("id", "layers", "hidden", "seq_len", "gpu", "n_gpus", "dtype"):
        if rows and column not in rows[0]:
            raise UsageError(f"{path.name} has no column {column!r}")
    return rows


def read_run(row: Row) -> PublishedRun:
    """One row as values.

    Raises:
        UnusableError: it says too little to be predicted.
    """
    assumptions: list[str] = []
    shape = read_shape(row, assumptions)
    cluster = _cluster(row, assumptions)
    framework = framework_of_row(row)
    seq = _seq(row, assumptions)
    layouts, batch = read_layouts(row, shape, _batch(row, seq, assumptions), assumptions)
    seconds = published_seconds(row, shape, layouts[0], seq, batch)
    peak = number(row, "peak_mem_GB")
    notes = row.get("notes", "")
    return PublishedRun(
        id=row["id"],
        shape=shape,
        cluster=cluster,
        layouts=layouts,
        seq=seq,
        batch=batch,
        framework=framework,
        one_layer=bool(ONE_LAYER.search(row.get("model", ""))),
        step_seconds=seconds,
        peak_bytes=None if peak is None else peak * GIB,
        allocated="ALLOCATED" in notes,
        complete=row.get("layout_complete", "yes") == "yes",
        assumptions=tuple(assumptions),
    )


def read_shape(row: Row, assumptions: list[str]) -> ModelShape:
    """The model: sizes from the row, the rest from the catalog or from the parameter count.

    Args:
        row: cells by column.
        assumptions: gets a line for everything that the row leaves open.

    Raises:
        UnusableError: neither the row nor the catalog knows layers and hidden size, or a model that
            the catalog does not know has no sequence length.
    """
    known = _catalog_model(row.get("model", ""))
    layers, hidden = whole(row, "layers"), whole(row, "hidden")
    if known is not None and layers is None and hidden is None:
        assumptions.append(f"sizes of {known.name} from the catalog")
        return known
    if layers is None or hidden is None:
        raise UnusableError("no layers or hidden size, and the catalog does not know the model")
    if further := whole(row, "mtp_layers"):
        layers += further
        assumptions.append(f"{further} layers more, which predict later tokens (MTP)")
    if known is not None and known.hidden == hidden:
        return _of_catalog(row, known, layers)
    return _inferred(row, layers, hidden, assumptions)


def _of_catalog(row: Row, known: ModelShape, layers: int) -> ModelShape:
    """A catalog model with the sizes that the row changes."""
    changed: dict[str, Any] = {
        key: value
        for key, column in (
            ("heads", "heads"),
            ("kv_heads", "kv_heads"),
            ("vocab", "vocab"),
            ("experts", "experts"),
        )
        if (value := whole(row, column)) and not (key == "kv_heads" and known.is_mla)
    }
    changed["dense_layers"] = _dense_layers(row, known, layers)
    return replace(known, layers=layers, **changed)


def _dense_layers(row: Row, known: ModelShape, layers: int) -> int:
    """Of a mixture, as it ran; a model cut to few layers keeps at least one with experts."""
    said = whole(row, "dense_layers")
    dense = known.dense_layers if said is None else said
    return min(dense, layers - 1) if known.is_moe else known.dense_layers


def _inferred(row: Row, layers: int, hidden: int, assumptions: list[str]) -> ModelShape:
    """The block, tying and vocabulary that come nearest to the row's parameter count."""
    heads = whole(row, "heads") or max(hidden // 128, 1)
    vocab = whole(row, "vocab")
    if vocab is None:
        vocab = GPT_VOCABULARY
        assumptions.append(f"vocabulary {GPT_VOCABULARY}")
    ffn = whole(row, "ffn") or 0
    experts = whole(row, "experts") or 0
    base = ModelShape(
        name=row.get("model", "custom"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole(row, "kv_heads") or heads,
        ffn=ffn,
        vocab=vocab,
        experts=experts,
        top_k=whole(row, "topk") or (1 if experts else 0),
        moe_ffn=whole(row, "moe_ffn") or 0,
        dense_layers=(whole(row, "dense_layers") or 0) if experts else 0,
        shared_experts=whole(row, "shared_experts") or 0,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        bias=True,
        max_positions=needed(row, "seq_len"),
    )
    llama = replace(
        base, norm="rmsnorm", activation="swiglu", positions="rope", bias=False, ffn=ffn
    )
    gated = experts > 0 or base.kv_heads != heads or bool(ffn and ffn != 4 * hidden)
    named = re.search(r"llama|qwen|mi[sx]tral|deepseek|gemma|swiglu", base.name, re.IGNORECASE)
    styles = [llama] if gated or named else [base, llama]
    candidates = [replace(style, tied=tied) for style, tied in product(styles, (True, False))]
    total = number(row, "params_B")
    if total is None or ONE_LAYER.search(base.name) or "cut to" in base.name:
        return candidates[0] if styles == [base] else replace(styles[0], tied=styles[0] is base)
    return min(candidates, key=lambda shape: abs(shape.params() / (total * 1e9) - 1))


def _catalog_model(name: str) -> ModelShape | None:
    """The catalog model of this name or alias, whatever stands behind it in the row.

    Only punctuation is looked over. A size that the row names must be in the catalog's name as
    well, if that names one: `GPT3-5B` is not `gpt3`.
    """
    if ONE_LAYER.search(name):
        return None
    wanted, size = _plain(name), _SIZE.search(name)
    found = [
        (len(plain), shape)
        for plain, shape in _models()
        if wanted.startswith(plain) and _same_size(size, shape.name, wanted[len(plain) :])
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _same_size(size: re.Match[str] | None, known: str, rest: str) -> bool:
    """Whether a size that a row names is that of a catalog model, as far as this names one."""
    if rest[:1].isdigit():  # the name goes on: llama-2-7b is not llama-2-70b
        return False
    of_known = _SIZE.search(known)
    if size is None or of_known is None:
        return True
    return float(size[1]) == float(of_known[1])


@lru_cache(maxsize=1)
def _models() -> tuple[tuple[str, ModelShape], ...]:
    """Every model of the catalog, by its plain names."""
    return tuple(
        (_plain(name), entry.shape)
        for entry in load.models()
        for name in (entry.shape.name, *entry.aliases)
    )


@lru_cache(maxsize=1)
def _devices() -> tuple[tuple[tuple[str, ...], Accelerator], ...]:
    """Every accelerator of the catalog, with its plain names."""
    return tuple((tuple(_plain(n) for n in _names(d)), d) for d in load.accelerators())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _cluster(row: Row, assumptions: list[str]) -> Cluster:
    device = _accelerator(row)
    stated = NETWORK.search(row.get("notes", ""))
    if stated:
        per_device = float(stated[1]) * 1e9 / 8 / device.per_host
        device = replace(device, network=replace(device.network, bandwidth=per_device))
        assumptions.append(f"network {stated[1]} Gb/s per host, as the row says")
    return Cluster(name=row["gpu"], accelerator=device, count=needed(row, "n_gpus"))


def _accelerator(row: Row) -> Accelerator:
    """The catalog accelerator of that name whose memory is nearest; of several, the first."""
    wanted, memory = _plain(row["gpu"]), number(row, "gpu_mem_GB")
    found = [
        (wanted not in names, device)
        for names, device in _devices()
        if any(name.startswith(wanted) or wanted.startswith(name) for name in names)
    ]
    if not found:
        raise UnusableError(f"the catalog has no accelerator {row['gpu']!r}")
    if memory is None:
        return min(found, key=lambda pair: pair[0])[1]
    return min(found, key=lambda pair: (abs(pair[1].memory / 1e9 - memory) > 10, pair[0]))[1]


def _names(device: Accelerator) -> tuple[str, ...]:
    table = load.read_toml(load.ROOT / "accelerators" / f"{device.name}.toml")
    return (device.name, *table.get("aliases", ()))


def _seq(row: Row, assumptions: list[str]) -> int:
    """Tokens of a sequence; what a program takes by itself where the row says nothing."""
    default = DEFAULT_SEQ.get(row.get("program", "").lower())
    if default and whole(row, "seq_len") is None:
        assumptions.append(f"{default} tokens per sequence, the program's default")
        return default
    return needed(row, "seq_len")


def _batch(row: Row, seq: int, assumptions: list[str]) -> int:
    """Sequences per step; a row that gives a rate and no time may leave them open."""
    batch, tokens = whole(row, "global_batch_seqs"), number(row, "tokens_per_batch")
    if batch is None and tokens is None:
        rates = (number(row, key) for key in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"))
        if number(row, "step_time_s") is not None or all(rate is None for rate in rates):
            raise UnusableError("no batch")
        others = math.prod(whole(row, key) or 1 for key in ("tp", "cp", "pp"))
        replicas = max(needed(row, "n_gpus") // others, 1)
        each = (whole(row, "micro_batch") or 1) * OPEN_MICRO_BATCHES * (whole(row, "pp") or 1)
        assumptions.append(f"{replicas * each} sequences per step, of which the row gives the rate")
        return replicas * each
    return batch if batch is not None else max(round((tokens or 0) / seq), 1)


def published_seconds(
    row: Row, shape: ModelShape, layout: Layout, seq: int, batch: int
) -> float | None:
    """The step time of a row: as given, or from tokens/s, or from FLOP/s by its convention.

    Args:
        row: cells by column.
        shape: the model, whose FLOP are counted where only FLOP/s or MFU are published.
        layout: of it the ranks, recomputation and precision.
        seq: tokens per sequence.
        batch: sequences per step.

    Returns:
        Seconds; None where the row says none of the three.
    """
    given = number(row, "step_time_s")
    if given is not None:
        return given
    tokens, ranks = seq * batch, layout.ranks
    rate = number(row, "tokens_per_s_per_gpu")
    if rate is not None:
        return tokens / (rate * ranks)
    flops = number(row, "tflops_per_gpu")
    mfu, peak = number(row, "mfu_pct"), number(row, "peak_tflops_dense")
    if flops is None and mfu is not None and peak is not None:
        flops = mfu / 100 * peak
    if flops is None:
        return None
    return tokens * _counted(row, shape, layout, seq) / (flops * 1e12 * ranks)


def _counted(row: Row, shape: ModelShape, layout: Layout, seq: int) -> float:
    """FLOP per token as the row counts them.

    As `flop_convention` says; else full attention, except in few bits, whose programs count the
    causal half. Recomputation only where the FLOP/s are those of the row's HFU.
    """
    stated = row.get("flop_convention", "").lower()
    causal = "causal attention half" in stated or (not stated and bool(layout.precision.recipe))
    needed = flops_per_token(shape, seq, causal)
    hardware = number(row, "hfu_pct") is not None and number(row, "mfu_pct") is None
    if hardware or COUNTS_RECOMPUTE.search(row.get("notes", "")):
        needed += recompute_flops_per_token(shape, seq, formula_mode(layout.recompute), causal)
    return needed
