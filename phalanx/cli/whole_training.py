"""The options of a whole training, as every command that prices one takes them."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.core.errors import UsageError
from phalanx.core.units import parse_bytes
from phalanx.planner.goodput import DEVICE_HOURS_PER_FAILURE, RESTART_SECONDS, Conditions


def training_arguments(parser: ArgumentParser) -> None:
    """Declare what is asked and assumed of a whole training."""
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
        "--measured",
        metavar="RUN",
        type=Path,
        help="take --restart and --storage from what a run has measured, in its summary.json",
    )
    group.add_argument(
        "--storage",
        metavar="RATE",
        help="bytes per second for checkpoints: 500GB (default 122MB per device, 2TB at the most)",
    )


def require_training(args: Namespace) -> None:
    """Refuse conditions of a training that is not asked for.

    Raises:
        UsageError: naming the first.
    """
    conditions = {
        "--price": args.price,
        "--storage": args.storage,
        "--device-hours": args.device_hours != DEVICE_HOURS_PER_FAILURE,
        "--restart": args.restart != RESTART_SECONDS,
        "--measured": args.measured is not None,
    }
    alone = [option for option, given in conditions.items() if given]
    if alone and args.train_tokens is None:
        raise UsageError(f"{alone[0]} is for a whole training; say how long it is: --train-tokens")


def conditions(args: Namespace) -> Conditions:
    """What is assumed about failures, storage and prices, with what a run has measured.

    Raises:
        UsageError: a number that cannot be, or a run that has measured nothing.
    """
    found = Conditions(
        device_hours=args.device_hours,
        restart=args.restart,
        storage=parse_bytes(args.storage, "--storage") if args.storage else 0.0,
        price=args.price,
    )
    if args.measured is not None:
        from phalanx.api.measured import measured_conditions

        found = measured_conditions(args.measured, found)
    return found
