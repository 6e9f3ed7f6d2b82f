"""Turns what people write for a model, a cluster, a layout or a run into the values themselves.

A model is a catalog name, a `.toml` file, a table of sizes or a `ModelShape`; a cluster is
`h100x64`, a catalog name, a file or a `Cluster`; a layout is a line, a table of keys or a `Layout`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError, require_type, unknown
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.core.units import parse_count
from phalanx.cost.framework import FRAMEWORKS, Framework
from phalanx.schedules.registry import find_schedule

ModelLike = str | Mapping[str, object] | ModelShape
ClusterLike = str | Mapping[str, object] | Cluster
LayoutLike = str | Mapping[str, object] | Layout
RunLike = str | Path | Mapping[str, object] | Run


def model_of(model: ModelLike) -> ModelShape:
    """The sizes of a model.

    Args:
        model: a catalog name, the path of a `.toml` file, a table of sizes, with a catalog name
            under "name" or without, or the value itself.

    Raises:
        UsageError: nobody knows the name or a key, or a size is impossible.

    Example:
        >>> model_of({"name": "llama-3.1-8b", "layers": 16}).layers
        16
    """
    from phalanx.catalog import load

    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str):
        return load.model(model)
    kinds = "a catalog name, a .toml file, a table or a ModelShape"
    require_type("model", model, Mapping, kinds)
    name = str(model.get("name", "custom"))
    if name == "custom":
        return Run.from_tables({"model": model}).model
    sizes = {key: value for key, value in model.items() if key != "name"}
    known = load.model(name)
    checked = Run.from_tables({"model": {**_given(known), **sizes}}).model
    return replace(checked, name=known.name)


def sizes_of(model: ModelLike) -> Mapping[str, object]:
    """What is said about a model, as keys of the table [model].

    Args:
        model: as `model_of` takes it; of a table, its keys.

    Raises:
        UsageError: nobody knows the name.

    Example:
        >>> sizes_of({"layers": 2})
        {'layers': 2}
    """
    return model if isinstance(model, Mapping) else _given(model_of(model))


def _given(shape: ModelShape) -> dict[str, object]:
    """The sizes of a shape as keys of a run file."""
    return {key: getattr(shape, key) for key in shape.__dataclass_fields__}


def is_of_catalog(shape: ModelShape) -> bool:
    """Whether the catalog has this model under its name."""
    from phalanx.catalog import load

    return any(entry.shape == shape for entry in load.models())


def cluster_of(cluster: ClusterLike) -> Cluster:
    """The devices.

    Args:
        cluster: `h100x64`, `tpu-v5p:16x16x16`, a catalog name, the path of a `.toml` file, a
            table with one of these under "name", or the value itself.

    Raises:
        UsageError: nobody knows the name, or the count cannot be.

    Example:
        >>> cluster_of("h100x64").count
        64
    """
    from phalanx.catalog import load

    if isinstance(cluster, Cluster):
        return cluster
    name = cluster.get("name") if isinstance(cluster, Mapping) else cluster
    require_type("cluster", name, str, "a name such as h100x64, a .toml file or a Cluster")
    return load.cluster(str(name))


def layout_of(layout: LayoutLike) -> Layout:
    """How a step is cut.

    Args:
        layout: a line such as "dp=2 tp=4", a table of its keys, or the value itself.

    Raises:
        UsageError: an unknown key or schedule, or a value of the wrong kind.

    Example:
        >>> layout_of({"dp": 2, "tp": 4}).ranks
        8
    """
    if isinstance(layout, Layout):
        return layout
    _require_layout(layout)
    read = Layout.parse(layout) if isinstance(layout, str) else Layout.from_mapping(dict(layout))
    find_schedule(read.schedule)
    return read


def _require_layout(layout: object) -> None:
    words = 'a line such as "dp=2 tp=4", a table or a Layout'
    require_type("layout", layout, (str, Mapping, Layout), words)


def layout_on(layout: LayoutLike, cluster: Cluster) -> Layout:
    """A layout for all devices of a cluster: without dp, it takes what the others leave.

    Args:
        layout: as `layout_of` takes it.
        cluster: the devices.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
        RefusedError: the degrees do not multiply to the number of devices.

    Example:
        >>> layout_on("tp=8 pp=2", cluster_of("h100x64")).dp
        4
    """
    from phalanx.planner.explain import nearest_mesh

    _require_layout(layout)
    words = _words(layout)
    rest = layout_of({key: value for key, value in words.items() if key not in ("dp", "shard")})
    if "dp" not in words and cluster.count % rest.ranks == 0:
        return layout_of({**words, "dp": cluster.count // rest.ranks})
    found = layout_of({key: value for key, value in words.items() if key != "shard"})
    if found.ranks != cluster.count:
        raise RefusedError(
            f"{str(layout)!r} is {found.ranks:,} ranks, and {cluster.name} has {cluster.count:,} "
            f"devices; the nearest that fits is {nearest_mesh(found, cluster.count)}"
        )
    return layout_of(words)


def _words(layout: LayoutLike) -> dict[str, object]:
    """The keys that were given."""
    if isinstance(layout, Layout):
        return {**layout.settings(), "dp": layout.dp}
    if isinstance(layout, str):
        Layout.parse(" ".join(w for w in layout.replace(",", " ").split() if "shard=" not in w))
        given = (word.partition("=") for word in layout.replace(",", " ").split())
        return {key: value for key, _, value in given}
    return dict(layout)


def tokens_of(tokens: str | float, option: str = "--tokens") -> float:
    """A number of tokens.

    Args:
        tokens: a number, or a text such as 16M, 4Mi or 4e6.
        option: what it is called where it cannot be read.

    Raises:
        UsageError: it cannot be read.

    Example:
        >>> tokens_of("4Mi")
        4194304.0
    """
    require_type(option, tokens, (str, int, float), "a number, or a text such as 16M")
    return parse_count(tokens, option) if isinstance(tokens, str) else float(tokens)


def run_of(run: RunLike) -> Run:
    """A run with every value resolved; without a layout, this machine's ranks are cut for it.

    Args:
        run: the path of a run file, its tables, or the value itself. A table may stand for its
            name: `{"model": "gpt2", "layout": "dp=2"}`.

    Raises:
        UsageError: no such file, an unknown key, or a value of the wrong kind.

    Example:
        >>> run_of({"layout": "dp=2", "recipe": {"steps": 5}}).recipe.steps
        5
    """
    from phalanx.api.runfile import load_run, resolve_run
    from phalanx.trainer.run.launch import count_gpus

    if isinstance(run, Run):
        return run
    if isinstance(run, str | Path):
        return load_run(Path(run), gpus=count_gpus)
    require_type("run", run, Mapping, "a run file, its tables or a Run")
    tables: dict[str, object] = dict(run)
    if isinstance(tables.get("model"), str):
        tables["model"] = {"name": tables["model"]}
    return resolve_run(tables, gpus=count_gpus)


def framework_of(name: str) -> Framework:
    """The framework profile of a name.

    Raises:
        UsageError: nobody knows it.
    """
    require_type("framework", name, str, "a name")
    if name not in FRAMEWORKS:
        raise unknown("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]
