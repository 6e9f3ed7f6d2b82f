"""The command `phalanx`: finds the subcommand, runs it, and turns every error into one line.

A command is a module of this package with two functions, imported only when it is asked for:

    arguments(parser)   declares what it takes; the help text is the documentation
    run(args) -> int    does it, and returns the exit code
"""

import errno
import importlib
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from phalanx import __version__
from phalanx.cli.stream import LossyStream, lose, open_closed_streams, report_error
from phalanx.core.errors import PhalanxError, UsageError, unknown

COMMANDS = {
    "train": "train a model, cut any way over data, tensor and pipeline",
    "data": "make token shards of text, and show what a corpus holds",
    "verify": "prove that a layout takes the same steps as one device",
    "report": "explain a run: where its time went, beside what was planned",
    "doctor": "say what to change, on this machine or in a run that was done",
    "checkpoints": "list, verify, open and compare the checkpoints of a run",
    "drill": "injure a run, and compare it with the undisturbed one",
    "convert": "write a trained model as Hugging Face Transformers reads it",
    "generate": "let a trained model continue texts",
    "eval": "measure how well a trained model foretells a text",
    "plan": "find the fastest layout for a model on a cluster, and say why",
    "estimate": "price one layout: its seconds, its bytes, its messages",
    "dryrun": "take a step as any rank of a job of any size, and compare with the plan",
    "calibrate": "measure this machine: a cluster for every planning command",
    "schedule": "draw and check a pipeline schedule",
    "explore": "open the page on which every number can be dragged",
    "published": "predict a table of published runs, and compare",
    "models": "list the models of the catalog, or show one",
    "clusters": "list the accelerators and clusters of the catalog, or show one",
    "help": "explain a key of a layout or a run file, a quantity or a word",
}

ALSO_CALLED = {"export": "convert"}

EXIT_CODES = """\
exit codes:
  0  done          2  wrong usage                          4  verification found a difference
  1  failed        3  refused: does not fit or split so   75  interrupted, but can be resumed"""

RAN_OUT = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
TRAINING_PACKAGES = ("torch", "safetensors")
INTERRUPTED_BY_USER = 130  # what a shell expects of Ctrl-C, where there is nothing to resume


class _Parser(ArgumentParser):
    """Reports a mistake as an exception, so that it is printed as one line like any other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        _require_text(words)
        code = _dispatch(words)
        LossyStream(sys.stdout).flush()  # the exit code is that of the command, also unread
        return code
    except BrokenPipeError:  # whoever read our output has seen enough
        lose(sys.stdout)
        return 0
    except (PhalanxError, KeyboardInterrupt, ImportError, OSError, MemoryError) as error:
        told = _explain(error)
        if told is None:
            raise
        return report_error(*told, as_json)


def _explain(error: BaseException) -> tuple[str, int] | None:
    """One line and an exit code for what a user can mend; None for a mistake of ours."""
    match error:
        case PhalanxError():
            return str(error), error.exit_code
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED_BY_USER
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in TRAINING_PACKAGES:
            return f"this needs {name}: pip install 'phalanx[train]'", 1
        case MemoryError() | ImportError() if _lacks_memory(error):
            return "memory ran out; see what ulimit -v and free say", 1
        case OSError(strerror=str(reason)) if error.filename is not None or error.errno in RAN_OUT:
            missing = isinstance(error, FileNotFoundError)
            return f"{error.filename or 'the system'}: {reason}", 2 if missing else 1
    return None


def _lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, for values or for the code of a library."""
    return isinstance(error, MemoryError) or "failed to map segment" in str(error)


def _require_text(words: list[str]) -> None:
    """Files of ours are written in UTF-8, and could not name what is not."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{word!r} is not text in UTF-8; rename the file, or name the folder it is in"
            ) from None


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"phalanx {__version__}")
        return 0
    name, *rest = words
    name = ALSO_CALLED.get(name, name)
    if name not in COMMANDS:
        if name.startswith("-"):
            raise unknown("option", name, ("--help", "--version"))
        raise unknown("command", name, COMMANDS)
    module = importlib.import_module(f"phalanx.cli.{name}")
    code: int = module.run(_parse(name, module, rest))
    return code


def _parse(name: str, module: ModuleType, words: list[str]) -> Namespace:
    parser = _Parser(
        prog=f"phalanx {name}",
        description=module.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.arguments(parser)
    args, rest = parser.parse_known_args(words)
    if rest:
        options = [option for action in parser._actions for option in action.option_strings]
        if rest[0].startswith("-"):
            raise unknown(f"option of phalanx {name}", rest[0].partition("=")[0], options)
        raise UsageError(f"phalanx {name} cannot use {rest[0]!r}; see phalanx {name} --help")
    return args


def overview() -> str:
    """What `phalanx --help` prints: the commands and the exit codes."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: phalanx COMMAND [OPTIONS]      phalanx COMMAND --help",
            "",
            "Trains a language model on many devices, and proves that it took the update of one.",
            "",
            "commands:",
            *lines,
            "",
            EXIT_CODES,
        ]
    )
