"""Price one layout: seconds as a waterfall, bytes by rank, messages by axis.

phalanx estimate llama-3.1-405b h100x8192 --layout "tp=8 pp=16" --seq 8192 --tokens 16Mi
phalanx estimate gpt-3-175b a100x1024 --layout "dp=16 pp=8 tp=8 recompute=full" --tokens 3.1M
phalanx estimate mine.toml h100x8 --layout zero=3 --batch 64 --program fsdp --json
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from phalanx.catalog import load
from phalanx.cli import estimate_screen as screen
from phalanx.cli.table import format_argument, print_table
from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.estimate import Estimate, Message, RankBytes, Term
from phalanx.core.layout import Layout
from phalanx.core.units import parse_count, show_seconds, show_share
from phalanx.cost.collectives import bytes_sent
from phalanx.cost.practice import PRACTICES, Practice
from phalanx.plan.asked import sequences_per_step
from phalanx.plan.estimate import estimate
from phalanx.plan.explain import mend, nearest_mesh, shortage
from phalanx.plan.sweep import Request

SCHEMA = 1
DOES_NOT_FIT = 3


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("model", help="a catalog name (phalanx models) or a .toml file")
    parser.add_argument("cluster", help="h100x16384, tpu-v5p:16x16x16, a catalog name or a file")
    parser.add_argument(
        "--layout",
        required=True,
        metavar="KEYS",
        help='as in "pp=16 tp=8 zero=1 schedule=interleaved v=2 mb=1"; dp is what is left of the '
        "devices unless it is given",
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens per sequence (default 4096)")
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch", type=int, help="sequences in one step, all devices together")
    batch.add_argument("--tokens", help="tokens in one step, all devices together: 16M, 4Mi, 4e6")
    parser.add_argument(
        "--program",
        choices=tuple(PRACTICES),
        default="phalanx",
        help="whose habits to price: how it fuses, overlaps and recomputes (default phalanx)",
    )
    format_argument(parser)


def run(args: Namespace) -> int:
    """Read the question, price it, show it."""
    request, layout = read_question(args)
    shape, cluster, seq, batch = request.shape, request.cluster, request.seq, request.batch
    found = estimate(shape, cluster, layout, seq, batch, request.practice)
    remedy = None if found.fits else mend(request, layout)
    if args.json:
        print(json.dumps(document(found), indent=2))
    elif args.format == "table":
        screen.show(request, found)
    else:
        print_table(("part", "seconds", "share", "worth"), rows(found.step), args.format)
    if found.fits:
        return 0
    cure = f"it fits with {remedy.changes}" if remedy else "no small change makes it fit"
    sys.stdout.flush()
    print(f"does not fit: {shortage(found)}; {cure}", file=sys.stderr)
    return DOES_NOT_FIT


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
    practice: Practice = PRACTICES[args.program]
    request = Request(shape=shape, cluster=cluster, seq=args.seq, batch=batch, practice=practice)
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
        "step_seconds_80_percent": [low, high],
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


def _traffic(message: Message) -> dict[str, Any]:
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


def sent_by_one_rank(message: Message) -> float:
    """Bytes that one rank sends for one message."""
    if message.collective == "send":
        return message.bytes
    return bytes_sent(message.collective, message.bytes, message.ranks)


def rows(step: Term) -> list[tuple[str, str, str, str]]:
    """The tree as rows, children below their parents."""
    return [
        (
            "  " * depth + term.name,
            show_seconds(term.seconds),
            show_share(term.seconds / step.seconds),
            "" if math.isnan(term.worth) else show_seconds(term.worth),
        )
        for depth, term in screen.walk(step)
    ]
