"""Find the fastest layout for a model on a cluster, and say why.

Every layout that divides the devices and the batch is looked at: what does not fit is counted by
reason, the rest is priced, and the best layout of each mesh is shown.

phalanx plan llama-3.1-405b h100x16384 --tokens 16M --seq 8192
phalanx plan llama-3.1-70b h100x512 --tokens 4Mi --fixed "pp=4" --why "dp=16 pp=4 tp=8"
phalanx plan llama-3.1-8b h100x64 --tokens 1Mi --train-tokens 15T --price 2.5 --out run.toml
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.cli.table import format_argument
from phalanx.cost.framework import FRAMEWORKS
from phalanx.planner.goodput import DEVICE_HOURS_PER_FAILURE, RESTART_SECONDS


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("model", help="a catalog name (phalanx models) or a .toml file")
    parser.add_argument("cluster", help="h100x16384, tpu-v5p:16x16x16, a catalog name or a file")
    parser.add_argument(
        "--tokens", required=True, help="tokens in one step, all devices together: 16M, 4Mi, 4e6"
    )
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
    parser.add_argument(
        "--program",
        choices=tuple(FRAMEWORKS),
        default="phalanx",
        help="whose habits to price: how it fuses, overlaps and recomputes (default phalanx)",
    )
    parser.add_argument("--trainable", action="store_true", help="only what phalanx train can run")
    parser.add_argument("--top", type=int, default=10, help="how many meshes to show (default 10)")
    _add_campaign(parser)
    parser.add_argument("--out", type=Path, metavar="RUN.toml", help="write a run file for train")
    format_argument(parser)


def _add_campaign(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the whole training")
    group.add_argument("--train-tokens", metavar="TOKENS", help="how many to train on: 15.6T")
    group.add_argument("--price", type=float, default=0.0, help="of one device for an hour")
    group.add_argument(
        "--device-hours",
        type=float,
        default=DEVICE_HOURS_PER_FAILURE,
        help="of work between two failures (default %(default).0f: Llama 3's 419 in 54 days)",
    )
    group.add_argument(
        "--restart",
        type=float,
        default=RESTART_SECONDS,
        metavar="SECONDS",
        help="from a failure to the first new step (default %(default).0f)",
    )
    group.add_argument(
        "--storage",
        metavar="RATE",
        help="bytes per second for checkpoints: 500GB (default 122MB per device, 2TB at the most)",
    )


def run(args: Namespace) -> int:
    """Read the question, search, say why, write the answer."""
    from phalanx.cli import plan_run  # brings numpy, which --help can do without

    return plan_run.run(args)
