"""Print the completion of commands and options for a shell.

phalanx completion bash > ~/.local/share/bash-completion/completions/phalanx
phalanx completion zsh > ~/.zfunc/_phalanx        with ~/.zfunc in fpath
phalanx completion tcsh > ~/.phalanx.csh          and source it
"""

import importlib
import json
from argparse import ArgumentParser, Namespace

from phalanx.core.errors import PhalanxError

SHELLS = ("bash", "zsh", "tcsh")
INSTALL = "pip install 'phalanx[completion]'"


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("shell", choices=SHELLS, help="whose completion")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Print it."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise PhalanxError(
            f"completion is written by shtab, which is not installed: {INSTALL}"
        ) from None
    text = shtab.complete(whole_parser(), shell=args.shell)
    print(json.dumps({"schema": 1, "shell": args.shell, "script": text}) if args.json else text)
    return 0


def whole_parser() -> ArgumentParser:
    """All commands with all that they take, in one parser: too slow to build for each of them."""
    from phalanx.cli.main import COMMANDS

    parser = ArgumentParser(prog="phalanx")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"phalanx.cli.{name}")
        module.arguments(commands.add_parser(name, help=text.replace("%", "%%")))
    return parser
