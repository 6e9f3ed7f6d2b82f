"""Price one layout: seconds as a waterfall, bytes by rank, messages by axis.

phalanx estimate llama-3.1-405b h100x8192 --layout "tp=8 pp=16" --seq 8192 --tokens 16Mi
phalanx estimate gpt-3-175b a100x1024 --layout "dp=16 pp=8 tp=8 recompute=full" --tokens 3.1M
phalanx estimate mine.toml h100x8 --layout zero=3 --batch 64 --program fsdp --json
"""

import sys
from argparse import ArgumentParser, Namespace

from phalanx.cli.table import format_argument
from phalanx.cost.framework import FRAMEWORKS

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
        choices=tuple(FRAMEWORKS),
        default="phalanx",
        help="whose habits to price: how it fuses, overlaps and recomputes (default phalanx)",
    )
    format_argument(parser)


def run(args: Namespace) -> int:
    """Read the question, price it, show it."""
    # imported here, so that --help comes at once
    import json

    from phalanx.cli import estimate_screen as screen
    from phalanx.cli.estimate_record import document, read_question, rows
    from phalanx.cli.table import print_table
    from phalanx.planner.estimate import estimate
    from phalanx.planner.explain import shortage, suggest_fix

    request, layout = read_question(args)
    shape, cluster, seq, batch = request.shape, request.cluster, request.seq, request.batch
    found = estimate(shape, cluster, layout, seq, batch, request.framework)
    remedy = None if found.fits else suggest_fix(request, layout)
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
