"""Puts a run together: the run file, then --layout, --ranks, --data and every --set over it."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from math import gcd
from pathlib import Path
from typing import Any

from phalanx.catalog import load
from phalanx.core.errors import RefusedError, UsageError, unknown
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.data.shards import is_tokens, read_index
from phalanx.schedules.registry import find_schedule

CPU_RANKS = 4  # enough to cut along two axes, and no more than a laptop can bear

Tables = dict[str, Any]


def load_run(
    path: Path | None = None,
    layout: str | None = None,
    ranks: int | None = None,
    sets: Sequence[str] = (),
    data: str | None = None,
    gpus: Callable[[], int] = lambda: 0,
) -> Run:
    """Read and resolve a run.

    Args:
        path: a TOML file; without one every value has its default.
        layout: a whole layout line, instead of the file's: what it does not name has its default.
        ranks: how many; where nobody gives a layout, `default_layout` cuts them.
        sets: `section.key=value` each, over everything else; the value in TOML, or a bare word.
        data: a corpus, instead of the file's.
        gpus: how many this machine has; asked only where nobody gives a layout.

    Raises:
        UsageError: the file is missing or not TOML; an unknown key; a value of the wrong kind.
        RefusedError: the layout is for another number of ranks.
    """
    tables = read_tables(path) if path is not None else {}
    return resolve_run(tables, layout, ranks, sets, data, gpus)


def resolve_run(
    tables: Tables,
    layout: str | None = None,
    ranks: int | None = None,
    sets: Sequence[str] = (),
    data: str | None = None,
    gpus: Callable[[], int] = lambda: 0,
) -> Run:
    """Resolve the tables of a run file; see `load_run`.

    Args:
        tables: as TOML gives them; they are not changed.
        layout: a whole layout line, instead of that of the tables.
        ranks: how many; where nobody gives a layout, `default_layout` cuts them.
        sets: `section.key=value` each, over everything else.
        data: a corpus, instead of that of the tables.
        gpus: how many this machine has; asked only where nobody gives a layout.

    Raises:
        UsageError: an unknown key; a value of the wrong kind.
        RefusedError: the layout is for another number of ranks.
    """
    tables = {name: dict(t) if isinstance(t, Mapping) else t for name, t in tables.items()}
    if layout is not None:
        tables["layout"] = layout
    if data is not None:
        _table(tables, "data")["path"] = data
    cut = _layout_words(tables.pop("layout", {})) if "layout" in tables else None
    changes: Tables = {"layout": {}}
    for text in sets:
        section, key, value = assignment(text)
        _table(changes if section == "layout" else tables, section)[key] = value
    run = _without_layout(tables)
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks is {ranks}; it is at least 1")
    if cut is None:
        here = gpus()
        count = ranks or here or CPU_RANKS
        cut = default_layout(count, run, on_gpus=count <= here)
    run = replace(run, layout=_layout({**cut, **changes["layout"]}))
    _require_ranks(run.layout, ranks)
    return run


def default_layout(ranks: int, run: Run, on_gpus: bool) -> dict[str, Any]:
    """Cut the ranks of one machine when nobody said how.

    Data parallelism costs one reduction a step, so it takes what divides the batch, then tensor
    parallelism what divides the heads, then the pipeline the rest. Four ranks on a CPU are cut
    pp=2 tp=2 instead: little is lost there, and the machinery is seen at work.

    Args:
        ranks: how many.
        run: whose heads and batch are to be cut.
        on_gpus: whether each rank has a GPU.
    """
    heads = gcd(run.model.heads, run.model.kv_heads)
    if ranks == CPU_RANKS and not on_gpus and run.model.layers > 1 and heads % 2 == 0:
        return {"dp": 1, "pp": 2, "tp": 2}
    dp = gcd(ranks, run.recipe.batch)
    tp = gcd(ranks // dp, heads)
    return {"dp": dp, "pp": ranks // dp // tp, "tp": tp}


def read_tables(path: Path) -> Tables:
    """The tables of a TOML file.

    Raises:
        UsageError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors mark it, some of them
    except FileNotFoundError:
        nearby = [str(p) for p in path.parent.glob("*.toml") if p.name != "pyproject.toml"]
        if nearby:
            raise unknown("run file", str(path), nearby) from None
        raise UsageError(f"there is no run file {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read the run file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also numbers and nests beyond all reason
        raise UsageError(f"{path} is not a run file in TOML: {error}") from None


def _without_layout(tables: Tables) -> Run:
    """A run of one rank; what the model's table leaves to others resolved, paths made whole."""
    model = _with_vocabulary(_resolved(tables.get("model", {})), tables.get("data", {}))
    run = Run.from_tables({**tables, "model": model})
    folder = _whole(run.data.offload_folder)
    data = replace(run.data, path=_whole(run.data.path), offload_folder=folder)
    return replace(run, data=data, weights=_whole(run.weights))


def _layout(words: Tables) -> Layout:
    """A layout whose schedule exists; a file of one is found from anywhere."""
    layout = Layout.from_mapping(words)
    if not layout.schedule.endswith(".csv"):
        find_schedule(layout.schedule)
        return layout
    return replace(layout, schedule=_whole(layout.schedule))


def _whole(path: str) -> str:
    """The same path from anywhere, if something is there."""
    found = Path(path).expanduser()
    whole = str(found.resolve()) if path and found.exists() else path
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{whole!r} is not text in UTF-8; rename its folder") from None
    return whole


def _resolved(table: Any) -> Any:
    """Fill in the sizes of a model that the catalog knows, or that its folder of weights has.

    The table's own keys stand over the catalog's, and must agree with the folder's.
    """
    if not isinstance(table, Mapping):
        return table
    if table.get("weights"):
        return _of_weights(table)
    if table.get("name", "custom") == "custom":
        return table
    name = str(table["name"])
    shape = load.model(name)
    known = {field.name: getattr(shape, field.name) for field in fields(ModelShape)}
    return {**known, **table, "name": "custom" if name.endswith(".toml") else shape.name}


def _with_vocabulary(model: Any, data: Any) -> Any:
    """Where nobody says how many ids a model has, it has those of the tokens that it reads."""
    if not isinstance(model, Mapping) or not isinstance(data, Mapping) or "vocab" in model:
        return model
    folder = Path(str(data.get("path", ""))).expanduser()
    if not data.get("path") or not is_tokens(folder):
        return model
    return {**model, "vocab": read_index(folder).vocab}


def _of_weights(table: Mapping[str, Any]) -> Tables:
    from phalanx.trainer.model.init import shape_of_weights

    folder, name = table["weights"], table.get("name", "custom")
    if not isinstance(folder, str):
        raise UsageError(f"model.weights is {folder!r}; it is a folder that Transformers loads")
    if name != "custom":
        raise UsageError(f"model.weights says what the model is; leave out model.name = {name!r}")
    shape = shape_of_weights(str(Path(folder).expanduser()), table)
    return {**{f.name: getattr(shape, f.name) for f in fields(shape)}, **table}


def assignment(text: str) -> tuple[str, str, Any]:
    """Read `section.key=value`, with the value as TOML has it; what is no TOML is a text.

    Raises:
        UsageError: a part of it is missing.

    Example:
        >>> assignment("recipe.steps=100"), assignment("layout.schedule=zb-v")
        (('recipe', 'steps', 100), ('layout', 'schedule', 'zb-v'))
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key and value.strip()):
        raise UsageError(f"cannot read --set {text!r}; write section.key=value: recipe.steps=100")
    return section, key, _value(value.strip())


def _value(text: str) -> Any:
    """A value in TOML; whatever is not, is a text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = found["value"]
    usable = len(found) == 1 and isinstance(value, bool | int | float | str | list)
    return value if usable else text


def _layout_words(layout: Any) -> Tables:
    """A layout as keys and values, from its line or its table."""
    if isinstance(layout, Mapping):
        return dict(layout)
    if not isinstance(layout, str):
        raise UsageError(f"layout is {layout!r}; it is a table, or a line such as 'dp=2 tp=2'")
    Layout.parse(layout)
    return dict(word.split("=", 1) for word in layout.replace(",", " ").split())


def _table(tables: Tables, name: str) -> Tables:
    table = tables.setdefault(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"[{name}] is {table!r}; it is a table of keys")
    return table


def _require_ranks(layout: Layout, ranks: int | None) -> None:
    if ranks is not None and layout.ranks != ranks:
        product = f"{layout.dp} x {layout.pp} x {layout.cp} x {layout.tp}"
        raise RefusedError(
            f"the layout {layout} is for dp x pp x cp x tp = {product} = {layout.ranks} ranks, "
            f"not for {ranks}; give a --layout for {ranks}, such as dp={ranks}"
        )
