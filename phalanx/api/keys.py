"""What every key of a layout and a run file means, read from the classes that hold them.

The meaning is the text under "Attributes" in the docstring of the class; kind and default are
those of its field; names that may be given come from the registry that knows them.
"""

import inspect
import re
import shlex
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from phalanx.core.errors import UsageError, unknown
from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.model import ModelShape
from phalanx.core.offload import Offload
from phalanx.core.precision import Precision
from phalanx.core.recompute import Recompute
from phalanx.core.run import Data, Recipe
from phalanx.core.synonyms import KEYS
from phalanx.core.track import Track
from phalanx.schedules.registry import SPECS

SCHEMA = 1
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Recompute: "none, selective, full, full:k, or parts joined by +",
    Offload: "none, or activations, optimizer, nvme joined by +",
    Precision: "bf16, fp16, fp32, fp64, or fp8 and its like",
}
# Examples where the default, or its neighbour, would say nothing.
EXAMPLES: Mapping[str, object] = {
    **{f"layout.{key}": 2 for key in ("dp", "pp", "tp", "cp", "ep", "mb")},
    **{"layout.zero": 3, "layout.shard": 8, "layout.v": 2},
    "layout.schedule": next(spec.name for spec in SPECS if not spec.chunks.fixed),
    **{"layout.stages": "7+8+8+7", "layout.recompute": "selective", "layout.logits": 1024},
    **{"layout.offload": "optimizer+activations", "layout.precision": "bf16"},
    **{"layout.context": "ulysses", "layout.sp": False},
    **{"model.name": "llama-3.1-8b", "model.layers": 12, "model.kv_heads": 2},
    **{"model.experts": 8, "model.top_k": 2, "model.vocab": 32768},
    "model.rope_scaling": "linear factor=4",
    **{"model.weights": "llama-3.2-1b", "cluster.name": "h100x64"},
    **{"recipe.steps": 500, "recipe.learning_rate": 3e-4, "recipe.clip": 0.5, "recipe.batch": 64},
    **{"recipe.checkpoint_every": 100, "recipe.evaluate_every": 50, "recipe.dropout": 0.1},
    **{"recipe.clip_norm": float("inf"), "recipe.stop_at": 50},
    **{
        "data.offload_folder": "/scratch",
        "data.path": "book.txt",
        "track.to": "tensorboard",
        "track.project": "mine",
        "data.separator": 0,
        "data.validation": 0.05,
    },
}


@dataclass(frozen=True)
class Topic:
    """Something that `phalanx help` knows.

    Attributes:
        name: as it is asked for: `recipe.clip`, `layout.zero`, `bubble`.
        kind: layout key, run file key, command, quantity, word or letter.
        meaning: in one sentence.
        default: what stands where nobody gives it; empty for what is no key.
        values: what it can be; empty for what is no key.
        example: as it is written.

    Example:
        >>> from phalanx.api.keys import topic
        >>> topic("recipe.clip").default
        '1.0'
    """

    name: str
    kind: str
    meaning: str
    default: str = ""
    values: str = ""
    example: str = ""

    def to_dict(self) -> dict[str, str]:
        """The topic as `phalanx help --json` lists it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "meaning": self.meaning,
            "default": self.default,
            "values": self.values,
            "example": self.example,
        }


def topic(name: str) -> Topic:
    """The one topic of a full name.

    Args:
        name: `recipe.clip`, `layout.zero`; see `find` for shorter ones.

    Raises:
        UsageError: nobody knows it; the message has the nearest that exist.
    """
    found = {known.name: known for known in topics()}
    if name not in found:
        raise unknown("key", name, found)
    return found[name]


def find(name: str) -> tuple[Topic, ...]:
    """Everything that a word may mean: `zero` is `layout.zero`, and a word of the glossary.

    What other programs call a key leads to it: `max_grad_norm` is `recipe.clip`. A value leads to
    the key that it is one of: `zb-v` is a `layout.schedule`.

    Args:
        name: a key with or without its table, a quantity, a word or a letter.

    Raises:
        UsageError: nobody knows it; the message has the nearest that exist.
    """
    wanted = name.strip().strip("[]")
    meant = KEYS.get(wanted.lower().replace("-", "_"), wanted)
    exact = [t for t in topics() if t.name == meant or t.name.partition(".")[2] == wanted]
    folded = [t for t in topics() if t.name.lower() == wanted.lower()]
    of_table = [t for t in topics() if t.name.startswith(f"{wanted}.")]
    keys = (t for t in topics() if t.kind.endswith("key"))
    values = [t for t in keys if wanted in t.values.split(", ")]
    found = tuple(dict.fromkeys([*exact, *folded, *of_table])) or tuple(values)
    if not found:
        raise _nobody_knows(wanted)
    return found


def _nobody_knows(name: str) -> UsageError:
    """The nearest names, whether a table stands before them or not."""
    full = {known.name: known.name for known in topics()}
    short = {known.partition(".")[2] or known: known for known in full}
    near = get_close_matches(name, [*short, *full], n=2, cutoff=0.6)
    if not near:
        return UsageError(f"unknown topic {name!r}; phalanx help lists all of them")
    names = list(dict.fromkeys(short.get(match, match) for match in near))
    return UsageError(f"unknown topic {name!r}; did you mean {' or '.join(names)}?")


@lru_cache(maxsize=1)
def topics() -> tuple[Topic, ...]:
    """Every topic, in the order of a run file, then words."""
    return tuple(_all_topics())


def _all_topics() -> Iterator[Topic]:
    from phalanx.core.glossary import GLOSSARY
    from phalanx.core.quantities import QUANTITIES
    from phalanx.core.symbols import LEGEND

    yield from _layout_keys()
    tables = {"model": ModelShape, "recipe": Recipe, "data": Data, "track": Track}
    for table, cls in tables.items():
        yield from _run_keys(table, cls)
        if table == "model":
            yield _weights()
            yield _cluster()
    yield _framework()
    for quantity in QUANTITIES:
        yield Topic(quantity.name, "quantity", quantity.meaning, values=quantity.unit)
    for entry in GLOSSARY:
        yield Topic(entry.word, "word", entry.meaning)
    for symbol in LEGEND:
        yield Topic(symbol.letter, "letter", symbol.meaning, values=symbol.name)


def _layout_keys() -> Iterator[Topic]:
    meanings = attribute_texts(Layout)
    for field in fields(Layout):
        name = f"layout.{field.name}"
        value = EXAMPLES.get(name, field.default is False)
        default, shown = _layout_word(field, field.default), _layout_word(field, value)
        values = _values(name, get_type_hints(Layout)[field.name]).replace(
            "true or false", "on or off"
        )
        example = f'phalanx train --layout "{field.name}={shown}"'
        yield Topic(name, "layout key", meanings[field.name], default, values, example)


def _layout_word(field: Field[Any], value: object) -> str:
    """A value as a layout line has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    unset = {"sp": "on where tp > 1", "shard": "dp", "v": "least", "stages": "even"}
    return unset[field.name] if field.name in unset and not value else str(value)


def _run_keys(table: str, cls: type[ModelShape | Recipe | Data]) -> Iterator[Topic]:
    meanings, hints = attribute_texts(cls), get_type_hints(cls)
    for field in fields(cls):
        name = f"{table}.{field.name}"
        default = "" if field.default is MISSING else field.default
        value = EXAMPLES.get(name, _other(hints[field.name], default))
        example = f"phalanx train --set {shlex.quote(f'{name}={_bare(value)}')}"
        yield Topic(
            name,
            "run file key",
            meanings[field.name],
            toml_word(default),
            _values(name, hints[field.name]),
            example,
        )


def _weights() -> Topic:
    meaning = (
        "the folder of Hugging Face Transformers that training starts from; it says the sizes too"
    )
    example = "phalanx train --set model.weights=llama-3.2-1b"
    return Topic("model.weights", "run file key", meaning, '""', "a folder", example)


def _cluster() -> Topic:
    return Topic(
        "cluster.name",
        "run file key",
        "what the run was planned for; training does not need it",
        '""',
        f"accelerator, x, count: {', '.join(_accelerators())}; or a cluster of the catalog",
        "phalanx train --set cluster.name=h100x64",
    )


def _framework() -> Topic:
    from phalanx.cost.framework import FRAMEWORKS

    return Topic(
        "framework",
        "option",
        "the program that is priced: how it fuses, overlaps and recomputes",
        "phalanx",
        ", ".join(FRAMEWORKS),
        "phalanx plan llama-3.1-8b h100x64 --tokens 4Mi --framework megatron",
    )


def attribute_texts(cls: type) -> dict[str, str]:
    """The text of each attribute under "Attributes" in a docstring, by name.

    Args:
        cls: a class with a Google docstring; `a, b: text` gives both the same text.
    """
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    current: tuple[str, ...] = ()
    for line in section.splitlines():
        head = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if head:
            current = tuple(head[1].split(", "))
            texts.update(dict.fromkeys(current, head[2]))
        elif line.startswith(" " * 8):
            texts.update({name: f"{texts[name]} {line.strip()}" for name in current})
        elif line.strip():
            break
    return {name: text.rstrip(".") for name, text in texts.items()}


def _values(name: str, hint: Any) -> str:
    """What a key can be, in words; a registry knows the names that it takes."""
    registry: Mapping[str, Callable[[], str]] = {
        "layout.schedule": lambda: (
            f"{', '.join(_schedules())}, a .csv file of rows, or module:attribute of a ScheduleSpec"
        ),
        "layout.context": lambda: ", ".join(CONTEXTS),
        "layout.zero": lambda: "0, 1, 2, 3",
        "layout.stages": lambda: "whole numbers joined by +",
        "model.name": lambda: f"custom, or {', '.join(_models())}",
        "recipe.clip_norm": lambda: "2 or inf",
    }
    if name in registry:
        return registry[name]()
    if get_origin(hint) is Literal:
        return ", ".join(str(value) for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    return KINDS.get(hint, str(hint))


def _other(hint: Any, default: object) -> object:
    """A value that is not the default, where one is easily found."""
    if get_origin(hint) is Literal:
        return next(value for value in reversed(get_args(hint)))
    return not default if isinstance(default, bool) else default


def toml_word(value: object) -> str:
    """A value as a run file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _bare(value: object) -> str:
    """A value as `--set` takes it; an empty text needs its own quotes."""
    return str(value) if isinstance(value, str) and value else toml_word(value)


def _schedules() -> tuple[str, ...]:
    from phalanx.schedules.registry import NAMES

    return NAMES


def _models() -> list[str]:
    from phalanx.catalog import load

    return [entry.shape.name for entry in load.models()]


def _accelerators() -> list[str]:
    from phalanx.catalog import load

    return [device.name for device in load.accelerators()]
