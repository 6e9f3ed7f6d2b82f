"""Turns what is asked of a search, in words or values, into the request that it answers."""

import math
from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import TypedDict

from phalanx.api.names import ClusterLike, ModelLike, cluster_of, framework_of, model_of, tokens_of
from phalanx.core.cluster import Cluster
from phalanx.core.errors import (
    RefusedError,
    UsageError,
    divisors,
    require_type,
    require_whole,
    shorten,
    unknown,
)
from phalanx.core.layout import Layout
from phalanx.core.precision import Precision
from phalanx.core.run import Recipe, Run
from phalanx.core.units import parse_bytes, show_count
from phalanx.cost.refusals import refuse
from phalanx.planner.parse import better_batch, both, read_limits, sequences_per_step
from phalanx.planner.space import Limits
from phalanx.planner.sweep import Request

LARGEST = {
    **{"seq": 1e9, "batch": 1e9, "top": 1000.0, "memory": 1e15},
    **{"train_tokens": 1e20, "price": 1e6},
}


class Options(TypedDict, total=False):
    """What can be said about a search besides its model, cluster, batch and sequences.

    Attributes:
        fixed: what is settled, as in a layout line: "pp=16 schedule=1f1b|interleaved".
        max_tp: no more tensor parallelism than this.
        memory: of a device that may be used: bytes, or a text such as 76GiB.
        framework: the program whose ways are priced; "phalanx" where nothing is said.
        trainable: only what `phalanx train` can run.
        top: how many meshes are wanted; 10 where nothing is said.
    """

    fixed: str
    max_tp: int
    memory: str | float
    framework: str
    trainable: bool
    top: int


def request_of(
    model: ModelLike,
    cluster: ClusterLike,
    tokens: str | float | None,
    batch: int | None,
    seq: int,
    options: Options,
) -> tuple[Request, tuple[str, ...]]:
    """A search as values, and what had to be filled in.

    Args:
        model: as `model_of` takes it.
        cluster: as `cluster_of` takes it.
        tokens: in one step, all devices together; this or `batch`.
        batch: sequences in one step, all devices together.
        seq: tokens per sequence.
        options: whatever else is said.

    Raises:
        UsageError: a name or an option that nobody knows, or a number that cannot be.
        RefusedError: what is settled leaves nothing.
    """
    for name in options:
        if name not in Options.__annotations__:
            raise unknown("option", name, Options.__annotations__)
    if (tokens is None) == (batch is None):
        raise UsageError("a step has tokens or a batch of sequences; give one of them")
    top, max_tp = options.get("top", 10), options.get("max_tp")
    for name, value in (("seq", seq), ("batch", batch), ("top", top), ("max_tp", max_tp)):
        _require_sensible(name, value)
    devices = _with_memory(cluster_of(cluster), options.get("memory"))
    if batch is None:
        wanted = tokens_of(tokens or 0)
        batch = sequences_per_step(wanted, seq, devices.count)
    else:
        wanted = float(batch * seq)
    require_type("fixed", options.get("fixed", ""), str, 'a text such as "pp=4 tp=4|8"')
    limits = fixed = read_limits(options.get("fixed", ""))
    if max_tp is not None:
        limits = both(limits, {"tp": frozenset(range(1, min(max_tp, devices.count) + 1))})
    request = Request(
        shape=model_of(model),
        cluster=devices,
        seq=seq,
        batch=batch,
        limits={key: values for key, values in limits.items() if key != "precision"},
        precision=_precision(limits),
        framework=framework_of(options.get("framework", "phalanx")),
        top=top,
    )
    if options.get("trainable", False):
        request = replace(request, limits=both(request.limits, trainable_limits(request)))
    return request, (*_notes(request, wanted), *_left_out(request, fixed))


def _require_sensible(name: str, value: float | None) -> None:
    if value is not None:
        require_whole(name, value)
    most = LARGEST.get(name, math.inf)
    if value is not None and not 1 <= value <= most:
        upper = f", at most {most:.0f}" if math.isfinite(most) else ""
        raise UsageError(f"{name} is {value}; it is at least 1{upper}")


def _precision(limits: Limits) -> Precision:
    words = [str(name) for name in limits.get("precision", ("bf16",))]
    if len(words) != 1:
        raise UsageError(f"one plan has one precision, not {' and '.join(sorted(words))}")
    return Precision.parse(words[0]).on("bf16")


def _with_memory(cluster: Cluster, memory: str | float | None) -> Cluster:
    """The cluster, with as much memory as may be used."""
    if memory is None:
        return cluster
    if isinstance(memory, str) and memory.strip().isdecimal() and int(memory):
        raise UsageError(
            f"memory is {memory}: {memory} what? write it as {memory}GB or {memory}GiB"
        )
    require_type("memory", memory, (str, int, float), "bytes, or a text such as 76GiB")
    size = parse_bytes(memory, "memory") if isinstance(memory, str) else float(memory)
    if not 0 < size <= LARGEST["memory"]:
        raise UsageError(f"memory is {memory}; it can be at most {LARGEST['memory']:.0e}")
    return replace(cluster, accelerator=replace(cluster.accelerator, memory=size))


def _left_out(request: Request, fixed: Limits) -> Iterator[str]:
    """Degrees that were allowed beside others, and divide nothing."""
    devices = dict.fromkeys(("dp", "pp", "tp", "cp"), request.cluster.count)
    for key, whole in {**devices, "mb": request.batch}.items():
        asked = sorted(int(str(value)) for value in fixed.get(key, ()))
        if left := [value for value in asked if whole % value]:
            what = "the batch" if key == "mb" else "the devices"
            yield f"{key}={shorten(left)} does not divide {what}, {whole:,}, and is left out"


def _notes(request: Request, wanted: float) -> Iterator[str]:
    """How the tokens became a batch, and whether the devices can share it."""
    batch, seq, devices = request.batch, request.seq, request.cluster.count
    if request.tokens != wanted:
        yield (
            f"{show_count(wanted)} tokens are {wanted / seq:,.4g} sequences of {seq:,}; "
            f"planned for {batch:,} sequences, {show_count(request.tokens)} tokens"
        )
    better = better_batch(batch, devices)
    if better != batch:
        yield (
            f"{batch:,} sequences share no divisor above {gcd(batch, devices):,} with "
            f"{devices:,} devices; {better:,} sequences are --tokens {better * seq}"
        )


def trainable_limits(request: Request) -> Limits:
    """What the trainer runs: what no rule refuses, key by key."""
    simple = Layout(precision=request.precision)
    recipe = Recipe(seq=request.seq, batch=1)

    def runs(tp: int) -> bool:
        layout = replace(simple, tp=tp)
        try:
            refuse(Run(model=request.shape, layout=layout, recipe=recipe))
        except RefusedError:
            return False
        return True

    tps = frozenset(tp for tp in divisors(request.shape.heads) if runs(tp))
    return {"tp": tps} if tps else {}
