"""Find the fastest layout for a model on a cluster, and say why.

Every layout that divides the devices and the batch is looked at: what does not fit is counted by
reason, the rest is priced, and the best layout of each mesh is shown.

phalanx plan llama-3.1-405b h100x16384 --tokens 16M --seq 8192
phalanx plan llama-3.1-70b h100x512 --tokens 4Mi --fixed "pp=4" --why "dp=16 pp=4 tp=8"
phalanx plan llama-3.1-8b h100x64 --tokens 1Mi --train-tokens 15T --price 2.5 --out run.toml
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.estimate import framework_argument
from phalanx.cli.table import format_argument
from phalanx.cli.whole_training import conditions, require_training, training_arguments
from phalanx.core.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from phalanx.api.plans import Plan
    from phalanx.api.requests import Options
    from phalanx.core.run import Run


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("model", help="a catalog name (phalanx models) or a .toml file")
    parser.add_argument("cluster", help="h100x16384, tpu-v5p:16x16x16, a catalog name or a file")
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--batch", type=int, help="sequences in one step, all devices together")
    step.add_argument("--tokens", help="tokens in one step, all devices together: 16M, 4Mi, 4e6")
    parser.add_argument("--seq", type=int, default=8192, help="tokens per sequence (default 8192)")
    parser.add_argument("--max-tp", type=int, metavar="N", help="no more tensor parallelism than N")
    parser.add_argument(
        "--fixed",
        default="",
        metavar="KEYS",
        help='what is settled, as in a layout line: "pp=16 schedule=1f1b|interleaved"',
    )
    parser.add_argument("--memory", help="memory of a device that may be used: 76GiB, 80GB")
    parser.add_argument(
        "--why",
        metavar="LAYOUT",
        help='why not this one: "dp=64 pp=16 tp=16", or "tp=4" for the fastest with tp=4',
    )
    framework_argument(parser)
    parser.add_argument("--trainable", action="store_true", help="only what phalanx train can run")
    parser.add_argument("--top", type=int, default=10, help="how many meshes to show (default 10)")
    training_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="RUN.toml", help="write a run file for train")
    format_argument(parser)


def run(args: Namespace) -> int:
    """Search, say why, show it, write the run file."""
    # imported here, so that --help comes at once
    from phalanx.cli import plan_screen as screen
    from phalanx.cli.table import print_table

    _require_sense(args)
    found = _plan(args)
    run_file = _run_file(args, found) if args.out else None
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    elif args.format == "table":
        screen.show(found)
    else:
        rows = [screen.table_row(found, ranked) for ranked in found.found.ranked]
        print_table(screen.HEADERS, rows, args.format)
    if run_file is not None:
        args.out.write_text(run_file.to_toml(), encoding="utf-8")
        best = str(found.best.layout)
        apart = "" if best == str(run_file.layout) else ", the fastest that phalanx train runs"
        print(f"wrote {args.out}: {screen.short(run_file.layout)}{apart}", file=sys.stderr)
    return 0


def _require_sense(args: Namespace) -> None:
    """Refuse before the search what would only show after it.

    Raises:
        UsageError: conditions of a training that is not asked for, or no place for the run file.
    """
    require_training(args)
    if args.out and (args.out.is_dir() or not args.out.absolute().parent.is_dir()):
        raise UsageError(f"--out {args.out}: it is a file to write, in a folder that is there")


def _plan(args: Namespace) -> "Plan":
    """The plan, with all that was asked about it."""
    from phalanx.api.plans import plan

    options: Options = {
        "fixed": args.fixed,
        "framework": args.framework,
        "trainable": args.trainable,
        "top": args.top,
    }
    if args.max_tp is not None:
        options["max_tp"] = args.max_tp
    if args.memory is not None:
        options["memory"] = args.memory
    assumed = conditions(args)  # refused before the search
    found = plan(
        args.model, args.cluster, tokens=args.tokens, batch=args.batch, seq=args.seq, **options
    )
    if args.why:
        found = found.asking(args.why)
    if args.train_tokens is not None:
        found = found.for_training(args.train_tokens, assumed)
    return found


def _run_file(args: Namespace, found: "Plan") -> "Run":
    """The fastest layout that `phalanx train` runs, as a run."""
    try:
        return found.to_run()
    except RefusedError as refusal:
        raise RefusedError(f"--out {args.out}: {refusal}; leave out --out to plan only") from None
