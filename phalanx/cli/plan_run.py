"""Answers `phalanx plan`: reads the question, searches, says why, writes the run file."""

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, gcd
from pathlib import Path

from phalanx.catalog import load
from phalanx.cli import plan_screen as screen
from phalanx.cli.plan_record import HEADERS, Plan, document, table_row
from phalanx.cli.table import print_table
from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, UsageError, divisors
from phalanx.core.estimate import Estimate
from phalanx.core.layout import Layout
from phalanx.core.precision import Precision
from phalanx.core.run import Recipe, Run
from phalanx.core.units import parse_bytes, parse_count, show_count
from phalanx.cost.framework import FRAMEWORKS
from phalanx.cost.refusals import refuse
from phalanx.planner.diagnosis import diagnose, nothing_fits
from phalanx.planner.goodput import Campaign, Conditions, campaign
from phalanx.planner.heuristic import procedure
from phalanx.planner.parse import better_batch, both, read_limits, sequences_per_step
from phalanx.planner.rerank import Ranked
from phalanx.planner.search import Found, search
from phalanx.planner.space import Limits
from phalanx.planner.sweep import Request

LARGEST = {"--memory": 1e15, "--train-tokens": 1e20, "--price": 1e6, "--seq": 1e9, "--top": 1000}


def run(args: Namespace) -> int:
    """Read the question, search, say why, write the answer."""
    started = time.perf_counter()
    request, notes = _request(args)
    binary = "i" in (args.memory or "")
    found = search(request)
    if not found.ranked:
        raise RefusedError(nothing_fits(request, binary=binary))
    if args.trainable:
        found = _only_trainable(args, found)
    best = found.ranked[0].estimate
    plan = Plan(
        found=found,
        seconds=time.perf_counter() - started,
        book=_by_the_book(request),
        why=diagnose(found, args.why, binary=binary) if args.why else None,
        campaign=_campaign(args, request, best),
        notes=notes,
        binary=binary,
    )
    run_file = _run_file(args, found) if args.out else None
    if args.json:
        print(json.dumps(document(plan), indent=2))
    elif args.format == "table":
        screen.show(plan)
    else:
        rows = [table_row(ranked, best) for ranked in found.ranked]
        print_table(HEADERS, rows, args.format)
    if run_file is not None:
        _write(args.out, run_file, found)
    return 0


def _request(args: Namespace) -> tuple[Request, tuple[str, ...]]:
    """The question as values, and what had to be filled in."""
    for name, value in (("--seq", args.seq), ("--top", args.top), ("--max-tp", args.max_tp)):
        if value is not None and not 1 <= value <= LARGEST.get(name, math.inf):
            most = LARGEST.get(name)
            raise UsageError(
                f"{name} is {value}; it is at least 1" + (f", at most {most:.0f}" if most else "")
            )
    shape, cluster = load.model(args.model), _cluster(args)
    limits = read_limits(args.fixed)
    if args.max_tp is not None:
        limits = both(limits, {"tp": frozenset(range(1, min(args.max_tp, cluster.count) + 1))})
    precisions = [str(name) for name in limits.get("precision", ("bf16",))]
    if len(precisions) != 1:
        raise UsageError(f"one plan has one precision, not {' and '.join(sorted(precisions))}")
    tokens = parse_count(args.tokens, "--tokens")
    batch = sequences_per_step(tokens, args.seq, cluster.count)
    request = Request(
        shape=shape,
        cluster=cluster,
        seq=args.seq,
        batch=batch,
        limits={key: values for key, values in limits.items() if key != "precision"},
        precision=Precision.parse(precisions[0]).on("bf16"),
        framework=FRAMEWORKS[args.program],
        top=args.top,
    )
    if args.trainable:
        request = replace(request, limits=both(request.limits, _trainable(request)))
    return request, tuple(_notes(args, request, tokens))


def _notes(args: Namespace, request: Request, tokens: float) -> Iterator[str]:
    """How the tokens became a batch, and whether the devices can share it."""
    batch, devices = request.batch, request.cluster.count
    if request.tokens != tokens:
        yield (
            f"{args.tokens} tokens are {tokens / args.seq:,.4g} sequences of {args.seq:,}; "
            f"planned for {batch:,} sequences, {show_count(request.tokens)} tokens"
        )
    better = better_batch(batch, devices)
    if better != batch:
        yield (
            f"{batch:,} sequences share no divisor above {gcd(batch, devices):,} with "
            f"{devices:,} devices; {better:,} sequences are --tokens {better * args.seq}"
        )


def _cluster(args: Namespace) -> Cluster:
    """The cluster, with as much memory as may be used."""
    cluster = load.cluster(args.cluster)
    if args.memory is None:
        return cluster
    memory = parse_bytes(args.memory, "--memory")
    _at_most("--memory", args.memory, memory)
    return replace(cluster, accelerator=replace(cluster.accelerator, memory=memory))


def _at_most(name: str, text: str, value: float) -> None:
    if not value <= LARGEST[name]:
        raise UsageError(f"{name} is {text}; it can be at most {LARGEST[name]:.0e}")


def _by_the_book(request: Request) -> Estimate | str:
    try:
        return procedure(request)
    except RefusedError as refusal:
        return str(refusal)


def _campaign(args: Namespace, request: Request, best: Estimate) -> Campaign | None:
    conditions = Conditions(
        device_hours=args.device_hours,
        restart=args.restart,
        storage=parse_bytes(args.storage, "--storage") if args.storage else 0.0,
        price=args.price,
    )
    _at_most("--price", f"{args.price:g}", args.price)
    if args.train_tokens is None:
        return None
    tokens = parse_count(args.train_tokens, "--train-tokens")
    _at_most("--train-tokens", args.train_tokens, tokens)
    return campaign(request.shape, best, tokens, conditions)


def _run_file(args: Namespace, found: Found) -> Run:
    """The fastest layout that `phalanx train` runs, as a run.

    Raises:
        RefusedError: the trainer runs no layout of this model.
    """
    request = found.request
    best = _first_trainable(args, found)
    if best is None:
        narrower = replace(request, limits=both(request.limits, _trainable(request)), top=1)
        best = _first_trainable(args, search(narrower))
    if best is None:
        raise RefusedError(
            f"--out {args.out}: {_reason(args, found)}; leave out --out to plan only"
        )
    return best


def _trainable(request: Request) -> Limits:
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


def _only_trainable(args: Namespace, found: Found) -> Found:
    """Without the layouts that only together with the model are more than the trainer does.

    Raises:
        RefusedError: none is left; with the reason that refuses the fastest.
    """
    ranked = tuple(r for r in found.ranked if _trained(args, found, r) is not None)
    if not ranked:
        raise RefusedError(f"{_reason(args, found)}; leave out --trainable to plan only")
    return replace(found, ranked=ranked)


def _first_trainable(args: Namespace, found: Found) -> Run | None:
    runs = (_trained(args, found, ranked) for ranked in found.ranked)
    return next((run for run in runs if run is not None), None)


def _trained(args: Namespace, found: Found, ranked: Ranked) -> Run | None:
    """The layout as a run, if `phalanx train` runs it."""
    candidate = _run_of(args, found.request, ranked.estimate.layout)
    try:
        refuse(candidate)
    except RefusedError:
        return None
    return candidate


def _reason(args: Namespace, found: Found) -> str:
    """Why the trainer does not run the model at all, or the best layout."""
    simple = Layout(precision=found.request.precision)
    for layout in (simple, found.ranked[0].estimate.layout):
        try:
            refuse(_run_of(args, found.request, layout))
        except RefusedError as refusal:
            return str(refusal)
    return "the trainer runs no layout that fits"


def _run_of(args: Namespace, request: Request, layout: Layout) -> Run:
    shape = request.shape
    if args.model.endswith(".toml"):
        shape = replace(shape, name="custom")
    recipe = Recipe(seq=request.seq, batch=request.batch)
    if args.train_tokens is not None:
        tokens = parse_count(args.train_tokens, "--train-tokens")
        recipe = replace(recipe, steps=ceil(tokens / request.tokens))
    return Run(model=shape, layout=layout, recipe=recipe, cluster=args.cluster)


def _write(path: Path, run_file: Run, found: Found) -> None:
    path.write_text(run_file.to_toml(), encoding="utf-8")
    best = str(found.ranked[0].estimate.layout)
    apart = "" if best == str(run_file.layout) else ", the fastest that phalanx train runs"
    print(f"wrote {path}: {screen.short(run_file.layout)}{apart}", file=sys.stderr)
