"""The question and the answer of `phalanx estimate` as values: what is read, what is written."""

import math
from argparse import Namespace
from typing import Any

from phalanx.catalog import load
from phalanx.cli.estimate_screen import walk
from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.estimate import Estimate, PricedMessage, RankBytes, Term
from phalanx.core.layout import Layout
from phalanx.core.units import parse_count, show_seconds, show_share
from phalanx.cost.collectives import bytes_sent
from phalanx.cost.framework import FRAMEWORKS
from phalanx.planner.explain import nearest_mesh
from phalanx.planner.parse import sequences_per_step
from phalanx.planner.sweep import Request

SCHEMA = 1


def read_question(args: Namespace) -> tuple[Request, Layout]:
    """The question as values.

    Raises:
        UsageError: a name that nobody knows, or a number that cannot be.
        RefusedError: a layout for another number of devices.
    """
    if args.seq < 1:
        raise UsageError(f"--seq is {args.seq}; a sequence has at least 1 token")
    if args.batch is not None and args.batch < 1:
        raise UsageError(f"--batch is {args.batch}; a step has at least 1 sequence")
    shape, cluster = load.model(args.model), load.cluster(args.cluster)
    layout = read_layout(args.layout, cluster)
    if args.batch is not None:
        batch = args.batch
    else:
        tokens = parse_count(args.tokens, "--tokens")
        batch = sequences_per_step(tokens, args.seq, layout.dp * layout.mb)
    framework = FRAMEWORKS[args.program]
    request = Request(shape=shape, cluster=cluster, seq=args.seq, batch=batch, framework=framework)
    return request, layout


def read_layout(line: str, cluster: Cluster) -> Layout:
    """A layout line; without dp it takes what the other axes leave of the devices.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
        RefusedError: the degrees do not multiply to the number of devices.
    """
    words = line.replace(",", " ").split()
    layout = Layout.parse(" ".join(word for word in words if not word.startswith("shard=")))
    rest = layout.ranks // layout.dp
    if not any(word.startswith("dp=") for word in words) and cluster.count % rest == 0:
        return Layout.parse(f"{line} dp={cluster.count // rest}")
    if layout.ranks != cluster.count:
        nearest = nearest_mesh(layout, cluster.count)
        raise RefusedError(
            f"{line!r} is {layout.ranks:,} ranks, and {cluster.name} has {cluster.count:,} "
            f"devices; the nearest that fits is {nearest}"
        )
    return Layout.parse(line)


def document(found: Estimate) -> dict[str, Any]:
    """What `--json` prints; see the interface page for the fields that scripts rely on."""
    low, high = found.between()
    return {
        "schema": SCHEMA,
        "layout": str(found.layout),
        "step_seconds": found.step_seconds,
        "step_seconds_80": [low, high],
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "convention": found.convention,
        "bubble": found.bubble,
        "micro_batches": found.micro_batches,
        "terms": _tree(found.step),
        "memory": {
            "peak_bytes": found.peak_bytes,
            "capacity_bytes": found.capacity,
            "fits": found.fits,
            "stage": found.worst_rank.stage,
            "by_class": dict(found.worst_rank.by_class),
            "stages": [_stage(rank) for rank in found.ranks],
        },
        "traffic": [_traffic(message) for message in found.messages],
        "notes": list(found.notes),
    }


def _tree(term: Term) -> dict[str, Any]:
    return {
        "name": term.name,
        "seconds": term.seconds,
        "worth": None if math.isnan(term.worth) else term.worth,
        "reason": term.reason,
        "children": [_tree(child) for child in term.children],
    }


def _stage(rank: RankBytes) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "peak_bytes": rank.total,
        "moment": rank.moment,
        "in_flight": rank.in_flight,
        "by_class": dict(rank.by_class),
    }


def _traffic(message: PricedMessage) -> dict[str, Any]:
    return {
        "axis": message.axis,
        "collective": message.collective,
        "purpose": message.purpose,
        "bytes": message.bytes,
        "bytes_per_rank": sent_by_one_rank(message),
        "times": message.times,
        "ranks": message.ranks,
        "seconds": message.seconds,
        "exposed_seconds": message.exposed,
    }


def sent_by_one_rank(message: PricedMessage) -> float:
    """Bytes that one rank sends for one message."""
    if message.collective == "send":
        return message.bytes
    return float(bytes_sent(message.collective, message.bytes, message.ranks))


def rows(step: Term) -> list[tuple[str, str, str, str]]:
    """The tree as rows, children below their parents."""
    return [
        (
            "  " * depth + term.name,
            show_seconds(term.seconds),
            show_share(term.seconds / step.seconds),
            "" if math.isnan(term.worth) else show_seconds(term.worth),
        )
        for depth, term in walk(step)
    ]
