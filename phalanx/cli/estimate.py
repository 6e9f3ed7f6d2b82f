"""Price one layout: seconds as a waterfall, bytes by rank, messages by axis.

phalanx estimate llama-3.1-405b h100x8192 --layout "tp=8 pp=16" --seq 8192 --tokens 16Mi
phalanx estimate gpt-3-175b a100x1024 --layout "dp=16 pp=8 tp=8 recompute=full" --tokens 3.1M
phalanx estimate mine.toml h100x8 --layout zero=3 --batch 64 --framework fsdp --json
phalanx estimate mine.toml h100x8 --layout zero=3 --batch 64 --train-tokens 1T --measured runs/a
                                how long a training takes, with that run's restarts and saves
"""

import json
import sys
from argparse import ArgumentParser, Namespace

from phalanx.cli.table import format_argument
from phalanx.cli.whole_training import conditions, require_training, training_arguments
from phalanx.core.errors import UsageError

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
    parser.add_argument("--seq", type=int, default=8192, help="tokens per sequence (default 8192)")
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch", type=int, help="sequences in one step, all devices together")
    batch.add_argument("--tokens", help="tokens in one step, all devices together: 16M, 4Mi, 4e6")
    framework_argument(parser)
    training_arguments(parser)
    format_argument(parser)


def framework_argument(parser: ArgumentParser) -> None:
    """Declare `--framework`, which every command that prices takes."""
    parser.add_argument(
        "--framework",
        metavar="NAME",
        default="phalanx",
        help="the program that is priced: how it fuses, overlaps and recomputes; phalanx help "
        "framework names them (default phalanx)",
    )


def run(args: Namespace) -> int:
    """Price the layout, show it, and say what would make it fit.

    Raises:
        UsageError: an unknown name or word, or a number that is less than 1.
        RefusedError: the model, the batch or the devices cannot be cut so.
    """
    # imported here, so that --help comes at once
    from phalanx.api.planning import estimate_request, suggestion
    from phalanx.api.whole_training import training_record, whole_training
    from phalanx.cli import estimate_screen as screen
    from phalanx.cli.table import print_table
    from phalanx.planner.estimate import estimate
    from phalanx.planner.explain import shortage

    require_training(args)
    for name in ("seq", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            unit = {"seq": "token", "batch": "sequence"}[name]
            raise UsageError(f"--{name} is {getattr(args, name)}; it is at least 1 {unit}")
    request, layout = estimate_request(
        args.model, args.cluster, args.layout, (args.tokens, args.batch), args.seq, args.framework
    )
    found = estimate(
        request.shape, request.cluster, layout, request.seq, request.batch, request.framework
    )
    whole = None
    if args.train_tokens is not None:
        whole = whole_training(request.shape, found, args.train_tokens, conditions(args))
    remedy = suggestion(request, found)
    if args.json:
        training = {} if whole is None else {"training": training_record(whole)}
        print(json.dumps(found.to_dict() | training, indent=2))
    elif args.format == "table":
        screen.show(request, found, whole)
    else:
        print_table(("part", "seconds", "share", "worth"), screen.rows(found.step), args.format)
    if found.fits:
        return 0
    sys.stdout.flush()
    print(f"does not fit: {shortage(found)}; {remedy}", file=sys.stderr)
    return DOES_NOT_FIT
