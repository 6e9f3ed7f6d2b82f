"""Reads the facts that ship with the package, and files of the same form that a user writes.

Models, accelerators and clusters are TOML, one file each; every number has its source beside it.
Units are in the keys: `gb` is 1e9 bytes, `tflops` 1e12 FLOP/s, rates are one way.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from phalanx.catalog import hardware
from phalanx.catalog.typed import typed
from phalanx.core.cluster import Accelerator, Cluster
from phalanx.core.errors import UsageError, unknown
from phalanx.core.model import ModelShape

ROOT = Path(__file__).parent
OF_A_CLUSTER = ("name", "count", "torus")
FACTS = frozenset({"params_b", "active_params_b", "source", "verified", "aliases", "notes"})


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model of the catalog: its shape, and what its makers say about it.

    Attributes:
        shape: the sizes.
        published_params: total parameters as published; 0 where nobody says.
        published_active: parameters per token as published; 0 for dense models.
        source: where the sizes come from.
        verified: the sizes were read in the source, not remembered.
        aliases: other names that mean the same model.
        notes: what a reader of the numbers should know.
    """

    shape: ModelShape
    published_params: float
    published_active: float
    source: str
    verified: bool
    aliases: tuple[str, ...] = ()
    notes: str = ""


def model(name: str) -> ModelShape:
    """The shape of a model: a catalog name, or the path of a `.toml` file.

    Raises:
        UsageError: nobody knows the name (the message has the nearest ones), or the file
            cannot be read.

    Example:
        >>> shape = model("llama-3.1-8b")
        >>> shape.layers, shape.hidden, f"{shape.params():,}"
        (32, 4096, '8,030,261,248')
    """
    return model_entry(name).shape


def model_entry(name: str) -> ModelEntry:
    """A model with its published counts and source.

    Args:
        name: in the catalog or an alias, or the path of a `.toml` file.

    Raises:
        UsageError: as of `model`; of a file also a key that is unknown, or a size that cannot be.
    """
    if name.endswith(".toml"):
        return _model_entry(Path(name).stem, read_toml(Path(name)), name)
    path = _find("model", "models", name)
    return _model_entry(path.stem, read_toml(path), path.name)


def models() -> tuple[ModelEntry, ...]:
    """Every model of the catalog, by name."""
    return tuple(model_entry(path.stem) for path in _files("models"))


def accelerator(name: str) -> Accelerator:
    """A device of the catalog, by name or alias, or the path of a `.toml` file.

    Raises:
        UsageError: nobody knows the name, or the file cannot be read.

    Example:
        >>> device = accelerator("h100-sxm")
        >>> device.peak("bf16"), device.memory, device.domain.size
        (989400000000000.0, 80000000000.0, 8)
    """
    stem, table, where = _accelerator_table(name)
    if name.endswith(".toml"):  # that of a whole cluster: its accelerator alone
        table = {key: value for key, value in table.items() if key not in OF_A_CLUSTER}
    return hardware.read_accelerator(stem, table, where)


def accelerators() -> tuple[Accelerator, ...]:
    """Every accelerator of the catalog, by name."""
    return tuple(accelerator(path.stem) for path in _files("accelerators"))


def accelerator_by_device(device_name: str) -> Accelerator | None:
    """The accelerator that `torch.cuda.get_device_name` calls so, or None if nobody knows it.

    The whole name must match: parts that share the beginning of a name differ in peak.
    """
    wanted = device_name.strip().lower()
    for device in accelerators():
        if wanted in (known.lower() for known in device.devices):
            return device
    return None


def cluster(name: str) -> Cluster:
    """A cluster: `h100x16384`, `h100-sxm x 512`, `tpu-v5p:16x16x16`, a catalog name, or a file.

    Raises:
        UsageError: an unknown accelerator or cluster, no count, or an impossible one.

    Example:
        >>> cluster("h100x16384").count, cluster("tpu-v5p:8x8x16").torus
        (16384, (8, 8, 16))
    """
    if name.endswith(".toml"):
        return _cluster_from_file(Path(name))
    asked = hardware.parse_cluster_name(name)
    if asked is not None:
        device = accelerator(asked.accelerator)
        return hardware.build_cluster(name, device, asked)
    known = {path.stem for path in _files("clusters")}
    wanted = _normalise(name)
    if wanted in known:
        return _cluster_from_file(ROOT / "clusters" / f"{wanted}.toml")
    if wanted in _index("accelerators"):
        raise UsageError(f"{name} is one accelerator; say how many, for example {wanted}x8")
    if device_name := _counted(wanted):
        raise UsageError(
            f"{name}: how many {device_name} is a whole number, 1 to "
            f"{hardware.MOST_ACCELERATORS:,}, for example {device_name}x8"
        )
    raise unknown("cluster", name, known | {f"{device}x8" for device in _index("accelerators")})


def _counted(name: str) -> str:
    """The accelerator whose count is all that is wrong with a name, if there is one."""
    known = [d for d in _index("accelerators") if name.startswith(d)]
    device = max(known, key=len, default="")
    return device if name.removeprefix(device).strip("- ")[:1] in ("x", ":") else ""


def clusters() -> tuple[Cluster, ...]:
    """Every cluster that the catalog knows by name."""
    return tuple(_cluster_from_file(path) for path in _files("clusters"))


def _cluster_from_file(path: Path) -> Cluster:
    table = read_toml(path)
    base: dict[str, Any] = {}
    if isinstance(table.get("accelerator"), str):
        _, base, _ = _accelerator_table(table["accelerator"], path.parent)
    return hardware.read_cluster(path.stem, table, base, str(path.name))


def _accelerator_table(name: str, folder: Path = Path()) -> tuple[str, dict[str, Any], str]:
    """The table of an accelerator; a file is looked for beside what names it."""
    path = folder / name if name.endswith(".toml") else _find("accelerator", "accelerators", name)
    return path.stem, read_toml(path), path.name


def _model_entry(name: str, table: Mapping[str, Any], where: str) -> ModelEntry:
    values = table.get("model", table)
    hints = get_type_hints(ModelShape)
    known = {field.name for field in fields(ModelShape)}
    sizes: dict[str, Any] = {"name": name}
    for key, value in values.items():
        if key in FACTS:
            continue
        if key not in known:
            raise unknown(f"key in {where}", key, known | FACTS)
        sizes[key] = typed(f"{where}: {key}", value, hints[key])
    return ModelEntry(
        shape=ModelShape(**sizes),
        published_params=1e9 * float(values.get("params_b", 0.0)),
        published_active=1e9 * float(values.get("active_params_b", 0.0)),
        source=str(values.get("source", "")),
        verified=bool(values.get("verified", False)),
        aliases=tuple(values.get("aliases", ())),
        notes=str(values.get("notes", "")),
    )


def _normalise(name: str) -> str:
    return "-".join(name.strip().lower().replace("_", " ").split())


def _files(kind: str) -> list[Path]:
    return sorted((ROOT / kind).glob("*.toml"), key=lambda path: path.stem)


def _find(what: str, kind: str, name: str) -> Path:
    wanted = _normalise(name)
    direct = ROOT / kind / f"{wanted}.toml"
    if "/" not in wanted and direct.is_file():
        return direct
    index = _index(kind)
    if wanted in index:
        return index[wanted]
    near = get_close_matches(wanted, sorted(index), n=3, cutoff=0.4)
    listing = "models" if kind == "models" else "clusters"
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"phalanx {listing} lists what is known"
    )
    raise UsageError(f"unknown {what} {name!r}; {hint}")


@lru_cache(maxsize=8)
def _index(kind: str) -> dict[str, Path]:
    """Every name and alias of one kind of file."""
    index: dict[str, Path] = {}
    for path in _files(kind):
        for name in (path.stem, *read_toml(path).get("aliases", ())):
            index[name] = path
    return index


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        UsageError: it cannot be read, or is not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also numbers and nests beyond all reason
        raise UsageError(f"{path} is not TOML: {error}") from error
