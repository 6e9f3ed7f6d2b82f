"""Turns the tables of accelerator and cluster files into values, with every unit resolved."""

import math
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from phalanx.core.cluster import Accelerator, Cluster, Domain, Link
from phalanx.core.errors import UsageError, divisors, unknown

GB = 1e9
TERA = 1e12
MOST_ACCELERATORS = 10**8

# What large collectives reach where nobody has published a figure for this part: an assumption,
# near the 80 to 90 % of the data sheet that NCCL shows on the parts that have been measured.
SUSTAINED_SHARE = {"domain": 0.8, "network": 0.85, "host": 0.8}
LATENCY_US = {"domain": 3.0, "network": 10.0, "host": 10.0}

_NAME = re.compile(r"^(?P<name>.*?[a-z0-9])(?:\s*[:x×]\s*|\s+)(?P<sizes>\d+(?:\s*x\s*\d+)*)$")

_LINK_KEYS = ("link", "gb_per_s", "sustained_gb_per_s", "latency_us")
_DOMAIN_KEYS = ("size", "topology", "axes", "reduces", *_LINK_KEYS)
_SECTIONS = ("peak_tflops", "domain", "network", "host", "sources")
_DEVICE_KEYS = ("vendor", "memory_gb", "hbm_gb_per_s", "per_host", "aliases", "devices", "notes")


class AskedCluster(NamedTuple):
    """A cluster as its name spells it: accelerator, and how many along each axis."""

    accelerator: str
    sizes: tuple[int, ...]


def parse_cluster_name(name: str) -> AskedCluster | None:
    """Split `h100x16384` or `tpu-v5p 16x16x16` into its parts; None if it has no count.

    Example:
        >>> parse_cluster_name("TPU-v5p 16x16x16")
        AskedCluster(accelerator='tpu-v5p', sizes=(16, 16, 16))
    """
    match = _NAME.match(name.strip().lower())
    if match is None:
        return None
    sizes = tuple(int(n) for n in re.split(r"\s*x\s*", match["sizes"]))
    return AskedCluster(match["name"], sizes)


def build_cluster(name: str, device: Accelerator, asked: AskedCluster) -> Cluster:
    """The cluster that was asked for by name.

    Args:
        name: as it was asked for.
        device: its accelerator.
        asked: how many, or the sizes of a torus.

    Raises:
        UsageError: none at all, absurdly many, or a torus of a part that has none.
    """
    count = math.prod(asked.sizes)
    if count > MOST_ACCELERATORS:
        raise UsageError(f"{name} is {count:.3g} accelerators; at most {MOST_ACCELERATORS:,}")
    torus = asked.sizes if len(asked.sizes) > 1 else ()
    if torus and not device.domain.axes:
        raise UsageError(f"{device.name} is not joined as a torus; write {device.name}x{count}")
    if torus and count > device.domain.size:
        raise UsageError(
            f"{name} is a torus of {count:,}, and at most {device.domain.size:,} {device.name} are "
            f"joined as one; write {device.name}x{count} for several"
        )
    if device.domain.axes and not torus and count > 1:
        slice_size = max(n for n in divisors(count) if n <= device.domain.size)
        torus = _most_even(slice_size, device.domain.axes)
    return Cluster(name=name, accelerator=device, count=count, torus=torus)


def read_cluster(
    stem: str, table: Mapping[str, Any], base: Mapping[str, Any], where: str
) -> Cluster:
    """A cluster file: an accelerator (by name or as a table), a count, and what differs.

    Args:
        stem: the name of the file, unless it gives another.
        table: the file.
        base: the file of the accelerator that it names; empty if it describes its own.
        where: for messages.

    Raises:
        UsageError: a key that is missing, unknown, or of the wrong kind; or an impossible count.
    """
    known = {"name", "accelerator", "count", "torus", *_SECTIONS, *_DEVICE_KEYS}
    for key in table:
        if key not in known:
            raise unknown(f"key in {where}", key, known)
    own = {k: v for k, v in table.items() if k not in ("name", "accelerator", "count", "torus")}
    device_name = table["accelerator"] if base else table.get("name", stem)
    nested = table.get("accelerator", {})
    merged = _merge(base or (nested if isinstance(nested, Mapping) else {}), own)
    device = read_accelerator(str(device_name), merged, where)
    torus = tuple(typed(f"{where}: torus", n, int) for n in table.get("torus", ()))
    if "count" not in table and not torus:
        raise UsageError(
            f"{where} does not say how many accelerators: give it a count, or write {where}x8"
        )
    count = typed(f"{where}: count", table.get("count", math.prod(torus) if torus else 0), int)
    name = str(table.get("name", stem))
    if torus and count != math.prod(torus):
        return Cluster(name=name, accelerator=device, count=count, torus=torus)
    if torus:
        return build_cluster(name, device, AskedCluster(device.name, torus))
    return build_cluster(name, device, AskedCluster(device.name, (count,)))


def read_accelerator(name: str, table: Mapping[str, Any], where: str) -> Accelerator:
    """An accelerator file as a value.

    Args:
        name: of the accelerator.
        table: the file.
        where: for messages.

    Raises:
        UsageError: a key that is missing, unknown, or of the wrong kind.
    """
    _only(where, table, (*_DEVICE_KEYS, *_SECTIONS))
    domain = table.get("domain", {})
    _only(f"[domain] of {where}", domain, _DOMAIN_KEYS)
    peaks = table.get("peak_tflops", {})
    return Accelerator(
        name=name,
        vendor=str(table.get("vendor", "")),
        memory=GB * _positive(where, table, "memory_gb"),
        hbm=GB * _positive(where, table, "hbm_gb_per_s"),
        peaks=tuple((key, TERA * _positive(where, peaks, key)) for key in peaks),
        domain=Domain(
            size=typed(f"{where}: domain.size", domain.get("size", 1), int),
            topology=typed(
                f"{where}: domain.topology",
                domain.get("topology", "none"),
                Literal["switch", "mesh", "torus", "none"],
            ),
            link=_link(where, "domain", domain),
            axes=typed(f"{where}: domain.axes", domain.get("axes", 0), int),
            reduces=typed(f"{where}: domain.reduces", domain.get("reduces", False), bool),
        ),
        network=_link(where, "network", table.get("network", {})),
        host=_link(where, "host", table.get("host", {})),
        per_host=typed(f"{where}: per_host", table.get("per_host", 8), int),
        devices=tuple(table.get("devices", ())),
        sources=tuple((k, str(v)) for k, v in table.get("sources", {}).items()),
        notes=str(table.get("notes", "")),
    )


def typed(key: str, value: Any, kind: Any) -> Any:
    """Check one value of a file against the type it must have; an int may stand for a float.

    Args:
        key: for messages.
        value: as it was read.
        kind: a type, a union whose first counts, or a Literal.

    Raises:
        UsageError: another kind of value, or a number that is not finite.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            options = ", ".join(str(a) for a in get_args(kind))
            raise UsageError(f"{key} is {value!r}; it can be {options}")
        return value
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise UsageError(f"{key} is {value!r}; it is {words[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key} is {value}; it is a finite number")
    return value


def _link(where: str, section: str, table: Mapping[str, Any]) -> Link:
    if section != "domain":
        _only(f"[{section}] of {where}", table, _LINK_KEYS)
    rate = typed(f"{where}: {section}.gb_per_s", table.get("gb_per_s", 0.0), float)
    share = SUSTAINED_SHARE[section]
    sustained = table.get("sustained_gb_per_s", rate * share)
    latency = table.get("latency_us", LATENCY_US[section])
    return Link(
        name=str(table.get("link", "none")),
        bandwidth=GB * rate,
        sustained=GB * typed(f"{where}: {section}.sustained_gb_per_s", sustained, float),
        latency=1e-6 * typed(f"{where}: {section}.latency_us", latency, float),
    )


def _positive(where: str, table: Mapping[str, Any], key: str) -> float:
    if key not in table:
        raise UsageError(f"{where} has no {key}; it needs one")
    value = float(typed(f"{where}: {key}", table[key], float))
    if not value > 0:
        raise UsageError(f"{where}: {key} is {value}; it must be positive")
    return value


def _only(where: str, table: Any, known: tuple[str, ...]) -> None:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {table!r}; it is a table of keys")
    for key in table:
        if key not in known:
            raise unknown(f"key in {where}", key, known)


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `base`, one table deep."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = {**below, **value} if both else value  # type: ignore[dict-item]  # both are mappings
    return merged


def _most_even(count: int, axes: int) -> tuple[int, ...]:
    """Split a count over the axes of a torus, as near to a cube as its divisors allow."""
    sizes = []
    left = count
    for axis in range(axes, 1, -1):
        goal = left ** (1 / axis)
        size = max(d for d in range(1, int(goal + 1e-9) + 1) if left % d == 0)
        sizes.append(size)
        left //= size
    return (*sizes, left)
