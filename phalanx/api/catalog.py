"""What the catalog knows, as the documents of `phalanx models` and `phalanx clusters`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.catalog.load import ModelEntry
from phalanx.core.cluster import Accelerator, Cluster, Link
from phalanx.cost.flops import describe_convention, flops_per_token

SCHEMA = 1


def models_document(
    entries: Sequence[ModelEntry], seq: int, limits: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `phalanx models --json` prints.

    Args:
        entries: models of the catalog.
        seq: tokens per sequence, for the FLOP of a token.
        limits: of the one model on a cluster; see `limits_of`.
    """
    return {
        "schema": SCHEMA,
        "seq": seq,
        "models": [_model_record(entry, seq) for entry in entries],
        **({"limits": dict(limits)} if limits else {}),
    }


def clusters_document(
    devices: Sequence[Accelerator], clusters: Sequence[Cluster]
) -> dict[str, Any]:
    """What `phalanx clusters --json` prints.

    Args:
        devices: accelerators of the catalog.
        clusters: those that have a name.
    """
    return {
        "schema": SCHEMA,
        "accelerators": [_device_record(device) for device in devices],
        "clusters": [_cluster_record(cluster) for cluster in clusters],
    }


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """What `phalanx clusters NAME --json` prints."""
    return {
        "schema": SCHEMA,
        "cluster": _cluster_record(cluster),
        "accelerator": _device_record(cluster.accelerator),
    }


def _model_record(entry: ModelEntry, seq: int) -> dict[str, Any]:
    shape = entry.shape
    return {
        **asdict(shape),
        "aliases": list(entry.aliases),
        "parameters": shape.params(),
        "active_parameters": shape.active_params(),
        "published_parameters": entry.published_params or None,
        "published_active_parameters": entry.published_active or None,
        "flops_per_token": flops_per_token(shape, seq, causal=True),
        "convention": describe_convention(causal=True),
        "source": entry.source,
        "verified": entry.verified,
        "notes": entry.notes,
    }


def _link_record(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "bytes_per_second": link.bandwidth,
        "sustained_bytes_per_second": link.sustained,
        "latency_seconds": link.latency,
    }


def _device_record(device: Accelerator) -> dict[str, Any]:
    return {
        "name": device.name,
        "vendor": device.vendor,
        "memory_bytes": device.memory,
        "memory_bytes_per_second": device.hbm,
        "peak_flops_per_second": dict(device.peaks),
        "domain": {
            "size": device.domain.size,
            "topology": device.domain.topology,
            "axes": device.domain.axes,
            "reduces": device.domain.reduces,
            **_link_record(device.domain.link),
        },
        "network": _link_record(device.network),
        "host": _link_record(device.host),
        "per_host": device.per_host,
        "device_names": list(device.devices),
        "sources": dict(device.sources),
        "notes": device.notes,
    }


def _cluster_record(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "accelerator": cluster.accelerator.name,
        "devices": cluster.count,
        "torus": list(cluster.torus),
        "domain_size": cluster.domain_size,
        "memory_bytes": cluster.memory,
    }
