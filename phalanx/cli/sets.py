"""What `--set SECTION.KEY=VALUE` means, wherever a command takes it."""

from argparse import ArgumentParser


def declare_sets(parser: ArgumentParser, of: str = "any value of a run file") -> None:
    """Let a command take assignments, as `sets`.

    Args:
        parser: of the command.
        of: what may be assigned, for its help.
    """
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help=f"{of}, over everything else; may be repeated",
    )
