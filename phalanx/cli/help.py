"""Explain a key of a layout or a run file, a quantity of the JSON documents, or a word.

phalanx help                     all that can be asked for
phalanx help recipe.clip         meaning, default, values, example
phalanx help zero                whatever the word means, in every table
phalanx help recipe              the keys of a table
phalanx help step_seconds        unit and meaning of a quantity
"""

import json
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.api.keys import Topic

WIDTH = 100
FEW = 6  # topics that are explained in full
KINDS = {
    "layout key": "keys of a layout",
    "run file key": "keys of a run file",
    "option": "options of several commands",
    "quantity": "quantities in JSON documents",
    "word": "words",
    "letter": "letters in formulas",
}


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "topic", nargs="*", metavar="KEY", help="a key, a table, a quantity, a word or a letter"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Say what it means, or list what can be asked for."""
    from phalanx.api.keys import SCHEMA, find, topics

    wanted = " ".join(args.topic)
    found = find(wanted) if wanted else topics()
    if args.json:
        document = {"schema": SCHEMA, "topics": [topic.to_dict() for topic in found]}
        print(json.dumps(document, indent=2))
    elif wanted:
        print(brief(found) if len(found) > FEW else "\n\n".join(map(explain, found)))
    else:
        from phalanx.cli.main import overview

        print(f"{overview()}\n\n{listing(found)}")
    return 0


def explain(topic: "Topic") -> str:
    """One topic as lines: its meaning, and what it can be."""
    lines = [f"{topic.name}  ({topic.kind})", *_folded(topic.meaning, "  ")]
    facts = {"default": topic.default, "values": topic.values, "example": topic.example}
    if topic.kind == "quantity":
        facts = {"unit": topic.values}
    elif topic.kind == "letter":
        facts = {"name": topic.values}
    for name, text in facts.items():
        if text:
            first, *rest = _folded(text, " " * 11)
            lines += [f"  {name:9}{first.lstrip()}", *rest]
    return "\n".join(lines)


def brief(topics: "Sequence[Topic]") -> str:
    """Many topics, one to a line."""
    width = max(len(topic.name) for topic in topics)
    default = max(len(topic.default) for topic in topics)
    return "\n".join(
        f"{topic.name:{width}}  {topic.default:{default}}  {topic.meaning}" for topic in topics
    )


def listing(topics: "Sequence[Topic]") -> str:
    """The names of all topics, by kind."""
    parts = []
    for kind, group in groupby(topics, key=lambda topic: topic.kind):
        names = ", ".join(topic.name for topic in group)
        parts.append("\n".join([f"{KINDS[kind]}:", *_folded(names, "  ")]))
    return "phalanx help KEY explains any of these.\n\n" + "\n\n".join(parts)


def _folded(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
