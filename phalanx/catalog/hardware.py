"""Turns the tables of accelerator and cluster files into values, with every unit resolved."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from phalanx.catalog.measured import read_collectives, read_sustained
from phalanx.catalog.typed import only, positive, typed
from phalanx.core.cluster import Accelerator, Cluster, Domain, Link
from phalanx.core.errors import UsageError, divisors, unknown

GB = 1e9
TERA = 1e12
MOST_ACCELERATORS = 10**8

# What large collectives reach where nobody has published a figure for this part: an assumption,
# near the 80 to 90 % of the data sheet that NCCL shows on the parts that have been measured.
SUSTAINED_SHARE = {"domain": 0.8, "network": 0.85, "host": 0.8}
LATENCY_US = {"domain": 3.0, "network": 10.0, "host": 10.0}

_NAME = re.compile(
    r"^(?P<name>.*?[a-z0-9])(?:\s*[:x×]\s*|\s+)(?P<sizes>\d+(?:\s*x\s*\d+)*)$", re.IGNORECASE
)

_LINK_KEYS = ("link", "gb_per_s", "sustained_gb_per_s", "latency_us")
_DOMAIN_KEYS = ("size", "topology", "axes", "reduces", *_LINK_KEYS)
# of what was measured itself, `measured` is for readers, and nothing is computed from it
_SECTIONS = (
    *("peak_tflops", "domain", "network", "host", "sources"),
    *("sustained", "collectives", "measured"),
)
_DEVICE_KEYS = (
    "vendor",
    "memory_gb",
    "hbm_gb_per_s",
    "per_host",
    "aliases",
    "devices",
    "notes",
    "precision",
)


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
    match = _NAME.match(name.strip())
    if match is None:
        return None
    sizes = tuple(int(n) for n in re.split(r"\s*[xX]\s*", match["sizes"]))
    asked = match["name"]  # of a file capitals count
    return AskedCluster(asked if asked.endswith(".toml") else asked.lower(), sizes)


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
    only(where, table, (*_DEVICE_KEYS, *_SECTIONS))
    domain = table.get("domain", {})
    only(f"[domain] of {where}", domain, _DOMAIN_KEYS)
    peaks = table.get("peak_tflops", {})
    return Accelerator(
        name=name,
        vendor=str(table.get("vendor", "")),
        memory=GB * positive(where, table, "memory_gb"),
        hbm=GB * positive(where, table, "hbm_gb_per_s"),
        peaks=tuple((key, TERA * positive(where, peaks, key)) for key in peaks),
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
        precision=typed(
            f"{where}: precision", table.get("precision", "bf16"), Literal["bf16", "fp32"]
        ),
        sustained=read_sustained(name, table["sustained"], where) if "sustained" in table else None,
        collectives=read_collectives(table.get("collectives", ()), where),
    )


def _link(where: str, section: str, table: Mapping[str, Any]) -> Link:
    if section != "domain":
        only(f"[{section}] of {where}", table, _LINK_KEYS)
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
