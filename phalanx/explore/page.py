"""Writes the page: prose with places for records, scrubbers and pictures, filled for one state.

The first document holds all numbers and pictures, so it reads without a script. A place has the id of what it
shows; the script only puts newer text or drawing there.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import NamedTuple

from phalanx import __version__
from phalanx.catalog import load
from phalanx.explore.draw import head_cell, table
from phalanx.explore.inputs import BY_KEY, INPUTS, Input, Value, show_plain
from phalanx.explore.presets import STATES
from phalanx.explore.records import Picture, Record, show
from phalanx.explore.state import State

PLACE = re.compile(r"\{(r|v|w|i|c|p|t|x|try|set):([^{}|]*)(?:\|([^{}]*))?\}")
SLOT = re.compile(r"\[\[([A-Z]+)\]\]")
NO_FORM = "<p>Without a server and a script, the numbers are those of one state.</p>"
ICONS = {"good": "✓", "bad": "✕", "note": "→", "": ""}
LOADS = {"n.models": "model", "n.chips_table": "chip", "fab.chips": "chip"}
HEADERS = {
    "n.models": ("model", "D", "F", "L", "E", "k", "heads", "parameters", ""),
    "fab.chips": ("chip", "domain", "W", "egress", "ridge inside", "ridge outside", "floor", ""),
    "n.chips_table": ("chip", "C", "W_ici", "W_dcn", "HBM", "domain", "C / W", ""),
}


class PagePart(NamedTuple):
    """A part of the page: its panel, its number in the contents, and its heading."""

    name: str
    title: str
    chapter: str = ""


PARTS = (
    PagePart("notation", "Notation, hardware, models", "The chapter"),
    PagePart("schemes", "Schemes"),
    PagePart("clocks", "Two clocks and the roofline"),
    PagePart("data", "Data parallelism"),
    PagePart("fsdp", "FSDP and memory"),
    PagePart("tensor", "Tensor parallelism"),
    PagePart("mixed", "FSDP and TP together"),
    PagePart("experts", "Expert parallelism"),
    PagePart("pipeline", "Pipelining"),
    PagePart("fabric", "The GPU network"),
    PagePart("problems", "Problems to work"),
    PagePart("systems", "State, activations, failures", "The other two documents"),
    PagePart("plan", "Plan it", "Ours"),
    PagePart("runs", "Runs"),
)


class Shown(NamedTuple):
    """Everything that a state shows, by id."""

    state: State
    records: Mapping[str, Record]
    pictures: Mapping[str, Picture]


@lru_cache(maxsize=64)
def text_of(name: str) -> str:
    """The prose of a part, with its places.

    Args:
        name: of the part.
    """
    return (files("phalanx.explore") / "text" / f"{name}.html").read_text(encoding="utf-8")


def places(name: str) -> set[str]:
    """The ids of the records and pictures that a part has places for.

    Args:
        name: of the part.
    """
    return {match[2] for match in PLACE.finditer(text_of(name)) if match[1] in "rvwptx"}


def fill(name: str, shown: Shown) -> str:
    """The prose of a part with everything in its place.

    Args:
        name: of the part.
        shown: what the state shows.
    """
    makers: dict[str, Callable[[str, str], str]] = {
        "r": lambda id, _: record_html(shown.records[id]),
        "v": lambda id, _: verdict_html(shown.records[id]),
        "w": lambda id, _: (
            f'<span class="why" data-w="{id}">{escape(shown.records[id].reason)}</span>'
        ),
        "i": lambda key, _: scrubber(BY_KEY[key], shown.state[key]),
        "c": lambda key, _: choices(BY_KEY[key], str(shown.state[key])),
        "p": lambda id, _: picture_html(shown.pictures[id]),
        "x": lambda id, _: f'<div data-p="{id}">{shown.pictures[id].svg}</div>',
        "t": lambda id, _: f'<div data-p="{id}">{rows_html(shown.pictures[id])}</div>',
        "try": lambda what, label: (
            f'<button type="button" class="try" data-try="{escape(what)}">{escape(label)}</button>'
        ),
        "set": lambda what, label: (
            f'<a class="set" data-set="{escape(what)}" href="?{escape(what)}">{escape(label)}</a>'
        ),
    }
    return PLACE.sub(lambda match: makers[match[1]](match[2], match[3] or ""), text_of(name))


def record_html(record: Record) -> str:
    """A number in the text; a click says where it comes from.

    Args:
        record: what it is.
    """
    return f'<button type="button" class="r" data-r="{escape(record.id)}">{escape(record.text)}</button>'


def verdict_html(record: Record) -> str:
    """A word with its icon and colour.

    Args:
        record: what is judged.
    """
    return (
        f'<button type="button" class="v {record.verdict}" data-r="{escape(record.id)}" data-v>'
        f'<span class="icon" aria-hidden="true">{ICONS[record.verdict]}</span>'
        f"<span>{escape(record.text)}</span></button>"
    )


def shown_value(item: Input, value: Value) -> str:
    """The value of an input as the text has it.

    Args:
        item: the input.
        value: of it.
    """
    if isinstance(value, str):
        return value
    return show(value, {"B": "bytes"}.get(item.unit, item.unit) if item.unit else "")


def scrubber(item: Input, value: Value) -> str:
    """A number that can be dragged.

    Args:
        item: the input.
        value: of it.
    """
    if isinstance(value, str):
        return choices(item, value)
    text = shown_value(item, value)
    return (
        f'<span class="scrub" role="spinbutton" tabindex="0" data-k="{item.key}" data-scale="{item.scale}" '
        f'aria-label="{escape(item.label)}: {escape(item.help)}" aria-valuemin="{show_plain(item.low)}" '
        f'aria-valuemax="{show_plain(item.high)}" aria-valuenow="{show_plain(value)}" '
        f'aria-valuetext="{escape(text)}" title="{escape(item.help)}">{escape(text)}</span>'
    )


def choices(item: Input, value: str) -> str:
    """One of several words, or a text.

    Args:
        item: the input.
        value: of it.
    """
    label = f'aria-label="{escape(item.label)}: {escape(item.help)}"'
    if item.kind == "text":
        return f'<input class="pick" data-k="{item.key}" {label} value="{escape(value)}" spellcheck="false">'
    options = "".join(
        f'<option value="{escape(word)}"{" selected" if word == value else ""}>{escape(_long(item, word))}</option>'
        for word in item.choices
    )
    return f'<select class="pick" data-k="{item.key}" {label}>{options}</select>'


def _long(item: Input, word: str) -> str:
    if item.key == "recipe":
        return f"{float(STATES[word].bytes.total):g} bytes, {STATES[word].text}"
    titles = {
        "dp": "data parallelism", "fsdp": "FSDP", "tp": "tensor", "mixed": "FSDP + tensor",
        "pp": "pipeline", "ep": "expert",
    }  # fmt: skip
    return titles.get(word, word) if item.key == "scheme" else word


def picture_html(picture: Picture) -> str:
    """A figure, with the table that says the same.

    Args:
        picture: what is drawn.
    """
    id = escape(picture.id)
    return (
        f'<figure class="picture" aria-label="{escape(picture.label)}"><div data-p="{id}">{picture.svg}</div>'
        f'<details class="behind" data-t="{id}"><summary>As a table</summary>'
        f'<div class="scroll" data-tt="{id}" tabindex="0" role="region" aria-label="Table: {escape(picture.label)}">'
        f"{table_html(picture)}</div></details></figure>"
    )


def table_html(picture: Picture) -> str:
    """The table behind a picture.

    Args:
        picture: what it says.
    """
    return table(picture.headers, picture.rows, picture.label)


def rows_html(picture: Picture) -> str:
    """A table whose rows can be loaded.

    Args:
        picture: rows; the first cell is the name, the last whether it is loaded.
    """
    key = LOADS[picture.id]
    head = "".join(head_cell(text) for text in HEADERS[picture.id])
    body = ""
    for name, *cells, loaded in picture.rows:
        mark = ' class="loaded"' if loaded else ""
        link = f'<a class="set" data-set="{key}={escape(name)}" href="?{key}={escape(name)}">{escape(name)}</a>'
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr{mark}><th scope="row">{link}</th>{rest}<td>{escape(loaded)}</td></tr>'
    return (
        f'<table class="load"><caption>{escape(picture.label)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def machine_bar(state: State) -> str:
    """The line on top: model, chip, batch and degrees, always at hand.

    Args:
        state: of the page.
    """
    keys = ("B", "seq", "dp", "tp", "pp", "ep")
    degrees = "".join(
        f'<label class="field {key}"><span>{escape(BY_KEY[key].label)}</span>{scrubber(BY_KEY[key], state[key])}</label>'
        .replace("<label", "<span").replace("</label>", "</span>")
        for key in keys
    )  # fmt: skip
    picks = "".join(choices(BY_KEY[key], str(state[key])) for key in ("model", "chip"))
    return f'<div class="machine" role="group" aria-label="Model, chip and layout">{picks}{degrees}</div>'


class Dress(NamedTuple):
    """What differs between a page with a server and one without.

    Attributes:
        head: more of the head of the document.
        offline: what stands there while nobody answers.
        stated: when and of what it was made.
        has_form: whether a browser without a script can ask for other numbers.
    """

    head: str = ""
    offline: str = (
        '<div id="offline" class="notice bad" hidden>The server behind this page has ended. Numbers are as they were; '
        "start <code>phalanx explore</code> again to go on.</div>"
    )
    stated: str = ""
    has_form: bool = True


SERVED = Dress()


def document(shown: Shown, problems: list[str], dress: Dress = SERVED) -> str:
    """The whole page for one state.

    Args:
        shown: records and pictures of all parts.
        problems: what could not be read of the address.
        dress: of a page with a server, or without one.
    """
    body = "".join(
        f'<section class="part" id="{part.name}" aria-labelledby="h-{part.name}">'
        f'<h2 id="h-{part.name}"><a href="#{part.name}">{escape(part.title)}</a></h2>{fill(part.name, shown)}</section>'
        for part in PARTS
    )
    filled = {
        "HEAD": dress.head,
        "OFFLINE": dress.offline,
        "STATED": dress.stated,
        "VERSION": escape(__version__),
        "CONTENTS": contents(),
        "MACHINE": machine_bar(shown.state),
        "NOTICE": notice(shown.state, problems),
        "FORM": plain_form(shown.state) if dress.has_form else NO_FORM,
        "QUERY": escape(shown.state.query()),
        "SOURCES": sources(),
        "BODY": body,
    }
    return SLOT.sub(lambda match: filled[match[1]], text_of("shell"))


@lru_cache(maxsize=1)
def sources() -> str:
    """Where the catalog has each model and each chip from, as a table."""
    rows = [(entry.shape.name, "sizes", entry.source) for entry in load.models()]
    rows += [
        (device.name, what, source)
        for device in load.accelerators()
        for what, source in device.sources
    ]
    return table(("", "of", "source"), rows, "facts of the catalog")


def contents() -> str:
    """The list of parts."""
    found = ""
    for part in PARTS:
        head = f'<li class="chapter">{escape(part.chapter)}</li>' if part.chapter else ""
        found += f'{head}<li><a href="#{part.name}">{escape(part.title)}</a></li>'
    return f"<ol>{found}</ol>"


def notice(state: State, problems: list[str]) -> str:
    """What could not be read, and keys that nobody knows.

    Args:
        state: of the page.
        problems: in words.
    """
    lines = [*problems]
    if state.unknown:
        names = ", ".join(key for key, _ in state.unknown)
        lines.append(f"this page knows nothing about {names[:200]}; it is kept in the link")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def plain_form(state: State) -> str:
    """All numbers as a form, for a browser without a script.

    Args:
        state: of the page.
    """
    fields = "".join(
        f'<label>{escape(item.label)} <input name="{item.key}" value="{escape(show_plain(state[item.key]))}"></label> '
        for item in INPUTS
        if item.key in state.chosen or item.group in ("step", "layout", "model", "hardware")
    )
    return f'<form method="get" action="/">{fields}<button>Show</button></form>'
