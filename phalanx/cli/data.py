"""Make token shards of text, and show what a corpus holds.

phalanx data tokenize books/ -o tokens                          bytes, one id each
phalanx data tokenize web.jsonl.zst --tokenizer llama/ -o tokens
phalanx data tokenize chats.jsonl --tokenizer llama/ -o chats   prompts are read, answers learned
phalanx data show tokens --verify
phalanx train --data tokens

A source is text, JSON lines, Parquet, any of them compressed (.gz, .bz2, .xz, .zst), a dataset that
`datasets` saved, or a folder of these. Interrupted, the same command goes on.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.stream import report_error
from phalanx.cli.table import format_argument, print_facts
from phalanx.core.units import show_bytes, show_count, show_rate

if TYPE_CHECKING:
    from phalanx.api.tokens import CorpusContents, TokenizeProgress

DIFFERENT = 4
INTERRUPTED = 75


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    commands = parser.add_subparsers(dest="action", metavar="tokenize|show", required=True)
    make = commands.add_parser("tokenize", help="make token shards of text", allow_abbrev=False)
    add = make.add_argument
    add("source", type=Path, metavar="SOURCE", help="a file or a folder")
    add(
        "--tokenizer",
        default="bytes",
        metavar="DIR|FILE|bytes",
        help="tokenizer.json, a tiktoken file, a sentencepiece model, or the folder of one",
    )
    add("-o", "--out", type=Path, required=True, metavar="OUT", help="folder to make")
    add("--column", default="text", help="of the text in records (default text)")
    add("--end", default="", metavar="TOKEN|ID|none", help="what ends a document")
    add("--begin", action="store_true", help="documents begin with the tokenizer's first token")
    add("--template", default="", metavar="FILE.jinja", help="renders chats")
    add("--vocab", type=int, default=0, metavar="N", help="of the model: refuse a larger tokenizer")
    add("--workers", type=int, default=0, metavar="N", help="processes (default: one per core)")
    add("--quiet", action="store_true", help="no progress")
    add("--json", action="store_true", help="print one JSON document")
    show = commands.add_parser("show", help="show what a corpus holds", allow_abbrev=False)
    add = show.add_argument
    add("path", type=Path, metavar="PATH", help="whatever data.path can be")
    add("--verify", action="store_true", help="read and hash every shard")
    add("--count", type=int, default=64, metavar="N", help="of the first tokens to show")
    add("--token-dtype", default="auto", help="of bare ids in a .bin file")
    add("--offset", type=int, default=0, help="bytes before them")
    format_argument(show)


def run(args: Namespace) -> int:
    """Make or show; 75 if it was interrupted and goes on, 4 if shards are damaged."""
    return _tokenize(args) if args.action == "tokenize" else _show(args)


def _tokenize(args: Namespace) -> int:
    from phalanx.api.tokens import Wanted, tokenize

    wanted = Wanted(
        source=args.source.expanduser(),
        tokenizer=args.tokenizer,
        out=args.out.expanduser(),
        column=args.column,
        end=args.end,
        begin=args.begin,
        template=args.template,
        vocab=args.vocab,
    )
    workers = args.workers or len(os.sched_getaffinity(0))
    lines = ProgressLines(quiet=args.quiet)
    try:
        index = tokenize(wanted, max(workers, 1), lines.tell)
    except KeyboardInterrupt:
        message = f"interrupted; the same command goes on with {args.out}"
        return report_error(message, INTERRUPTED, args.json)
    finally:
        lines.end()
    if args.json:
        print(json.dumps(index.to_dict()))
        return 0
    each = index.text_bytes / max(index.tokens, 1)
    print(
        f"{args.out}: {index.tokens:,} tokens ({index.dtype}) in {index.num_documents:,} "
        f"documents, {each:.2f} bytes per token, {len(index.shards)} shards\n"
        f"train on it: phalanx train --data {args.out}"
    )
    return 0


class ProgressLines:
    """One line that says how far it is: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._live = quiet, sys.stderr.isatty()
        self._told, self._before = -1, 0

    def tell(self, progress: "TokenizeProgress") -> None:
        """Show it, if it is time."""
        if self._quiet or not progress.parts:
            return
        if self._told < 0:
            self._before = progress.bytes
        tenth = 10 * progress.done // progress.parts
        if not self._live and tenth == self._told:
            return
        self._told = tenth
        line = self._line(progress)
        print(
            f"\r{line}\033[K" if self._live else line,
            end="" if self._live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def _line(self, progress: "TokenizeProgress") -> str:
        line = f"{progress.done}/{progress.parts} parts  {show_count(progress.tokens)} tokens"
        made = progress.bytes - self._before
        if not made or progress.seconds <= 0:
            return line
        left = progress.seconds * (progress.parts - progress.done) / max(progress.done, 1)
        rate = show_rate(made / progress.seconds, "B")
        return f"{line}  {rate}  left {int(left) // 60}:{int(left) % 60:02d}"

    def end(self) -> None:
        """Leave the terminal on a line of its own."""
        if self._live and self._told >= 0:
            print(file=sys.stderr)


def _show(args: Namespace) -> int:
    from phalanx.api.tokens import show_corpus

    keys = {"token_dtype": args.token_dtype, "offset": args.offset}
    found = show_corpus(args.path.expanduser(), verify=args.verify, count=args.count, keys=keys)
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        _print(found, args.format)
    return DIFFERENT if found.damaged else 0


def _print(found: "CorpusContents", form: str) -> None:
    each = found.bytes_per_token
    width = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4}.get(found.token_dtype, 8)
    learned = found.learned
    print_facts(
        (
            ("corpus", found.name),
            ("tokens", f"{found.tokens:,} ({found.token_dtype})"),
            ("size", show_bytes(found.tokens * width, binary=True)),
            ("documents", "" if found.num_documents is None else f"{found.num_documents:,}"),
            ("ends with", "" if found.separator is None else f"id {found.separator}"),
            ("bytes per token", "" if each is None else f"{each:.2f}"),
            ("learned", "" if learned is None else f"{learned:,} tokens"),
            ("tokenizer", f"{found.tokenizer}, {found.vocab:,} ids" if found.vocab else ""),
            ("hash", found.hash),
            ("intact", {None: "", True: "yes", False: ""}[_intact(found)]),
            ("damaged", ", ".join(found.damaged or [])),
            ("first ids", " ".join(map(str, found.first_ids[:16]))),
            ("first text", repr(found.first_text) if found.first_text is not None else ""),
        ),
        form,
    )


def _intact(found: "CorpusContents") -> bool | None:
    return None if found.damaged is None else not found.damaged
