"""Take one step as one rank of a job of any size, without the others, and compare with the plan.

phalanx dryrun run.toml                          its first rank
phalanx dryrun run.toml --rank 5000
phalanx dryrun llama-3.1-405b h100x16384 --layout "tp=8 pp=16 v=2" --tokens 16Mi --rank 5000
phalanx dryrun run.toml --all                    one rank of every kind

The trainer itself runs, on tensors that have shapes and no values. Every message must be the
planned one to the byte, and the worst moment of memory within 2 % of the plan.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from phalanx.core.errors import UsageError
from phalanx.core.units import show_bytes

if TYPE_CHECKING:
    from phalanx.core.run import Run
    from phalanx.dryrun.compare import RankCase

DIFFERENT = 4


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("what", metavar="RUN.toml|MODEL", help="a run file, or a model")
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER", help="beside a model: h100x16384")
    parser.add_argument("--layout", metavar="KEYS", help="beside a model: how the step is cut")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--batch", type=int, help="sequences in one step, all devices together")
    step.add_argument("--tokens", help="tokens in one step, all devices together: 16M, 4Mi, 4e6")
    parser.add_argument("--seq", type=int, default=8192, help="tokens per sequence (default 8192)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0, help="which rank (default 0)")
    which.add_argument("--all", action="store_true", help="one rank of every kind")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Rehearse the ranks and say what differs from the plan; 4 if anything does."""
    from phalanx.trainer.run.launch import require_torch

    require_torch()
    from phalanx.api.dryruns import rehearse_ranks

    asked = _run_of(args)
    screen = sys.stderr if args.json else sys.stdout
    print(f"{asked.layout} of {asked.layout.ranks:,} ranks, on {asked.model.name}", file=screen)

    def show(number: int, count: int, case: "RankCase") -> None:
        print(f"{number}/{count}  {line_of(case)}", file=screen, flush=True)

    found = rehearse_ranks(asked, "kinds" if args.all else args.rank, show)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    return 0 if found.passed else DIFFERENT


def _run_of(args: Namespace) -> "Run":
    from phalanx.api.dryruns import run_of_job
    from phalanx.api.names import run_of

    if args.cluster is None:
        if args.layout or args.batch or args.tokens:
            raise UsageError(
                "a run file says its layout and batch itself; --layout, --batch and --tokens go "
                "with MODEL CLUSTER"
            )
        return run_of(args.what)
    if args.layout is None or not (args.batch or args.tokens):
        raise UsageError("MODEL CLUSTER needs a --layout, and a step: --batch or --tokens")
    return run_of_job(args.what, args.cluster, args.layout, (args.tokens, args.batch), args.seq)


def line_of(case: "RankCase") -> str:
    """One rank in a line, and what does not agree below it.

    Args:
        case: the rank, rehearsed and planned.
    """
    at = " ".join(f"{axis} {place}" for axis, place in case.at._asdict().items())
    held, planned = (
        show_bytes(size, binary=True)
        for size in (case.rehearsed.peak_bytes, case.planned_peak_bytes)
    )
    sent = sum(message.times for message in case.rehearsed.messages)
    verdict = "as planned" if case.passed else "NOT AS PLANNED"
    head = (
        f"rank {case.rank:,} ({at}): {verdict}; {sent:,} messages, peak {held}, planned {planned} "
        f"({case.peak_error:+.1%}), {case.rehearsed.seconds:.1f} s"
    )
    return "\n".join([head, *(f"    {difference}" for difference in case.differences)])
