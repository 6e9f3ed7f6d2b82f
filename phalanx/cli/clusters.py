"""List accelerators and clusters, or show one: memory, peaks, links, and sources.

phalanx clusters
phalanx clusters h100x16384
phalanx clusters tpu-v5p:16x16x16 --json
"""

import json
from argparse import ArgumentParser, Namespace

from phalanx.api.catalog import cluster_document, clusters_document
from phalanx.catalog import load
from phalanx.cli.table import format_argument, print_facts, print_table
from phalanx.core.cluster import Accelerator, Cluster, Link
from phalanx.core.units import show_bytes, show_count, show_rate
from phalanx.cost.state import MIXED_ADAM, largest_model

PEAK_HEADERS = ("bf16", "fp8", "fp4")
HEADERS = ("accelerator", "memory", "bandwidth", *PEAK_HEADERS, "fast fabric", "network")
CLUSTER_HEADERS = ("cluster", "accelerators", "memory", "network")


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "cluster", nargs="?", help="h100x16384, tpu-v5p:16x16x16, a name or a file (default: all)"
    )
    format_argument(parser)


def run(args: Namespace) -> int:
    """List what the catalog knows, or show one cluster."""
    if args.cluster:
        _show(load.cluster(args.cluster), args)
        return 0
    devices, clusters = load.accelerators(), load.clusters()
    if args.json:
        print(json.dumps(clusters_document(devices, clusters), indent=2))
        return 0
    print_table(HEADERS, [_row(device) for device in devices], args.format)
    print()
    print_table(CLUSTER_HEADERS, [_cluster_row(cluster) for cluster in clusters], args.format)
    if args.format == "table":
        print("\nPeaks are dense FLOP/s; rates are one way per accelerator.")
        print("A cluster is an accelerator and a count: phalanx clusters h100x16384")
    return 0


def _show(cluster: Cluster, args: Namespace) -> None:
    if args.json:
        print(json.dumps(cluster_document(cluster), indent=2))
        return
    device = cluster.accelerator
    print_facts(
        [
            ("cluster", cluster.name),
            ("accelerators", f"{cluster.count:,} {device.name}"),
            ("memory", f"{show_bytes(device.memory)} each, {show_bytes(cluster.memory)} in all"),
            ("largest model", _largest(cluster)),
            ("memory bandwidth", show_rate(device.hbm, "B")),
            *((f"peak {name}", _peak_line(cluster, name)) for name in device.formats),
            ("fast fabric", _fabric(cluster)),
            ("network", _link(device.network)),
            ("host", _link(device.host)),
            *((f"source: {name}", source) for name, source in device.sources),
            ("notes", device.notes),
        ],
        args.format,
    )


def _largest(cluster: Cluster) -> str:
    """Parameters whose training state fills one device, and all of them."""
    one, every = (largest_model(size) for size in (cluster.accelerator.memory, cluster.memory))
    return (
        f"{show_count(one)} parameters with their training state on one, {show_count(every)} "
        f"sharded over all, at {MIXED_ADAM.total:g} bytes each and nothing else"
    )


def _peak_line(cluster: Cluster, number_format: str) -> str:
    peak = cluster.accelerator.peak(number_format)
    return f"{show_rate(peak)} dense each, {show_rate(peak * cluster.count)} in all"


def _fabric(cluster: Cluster) -> str:
    domain = cluster.domain
    if domain.topology == "none":
        return ""
    shape = " as " + "x".join(map(str, cluster.torus)) if cluster.torus else ""
    per = "per link" if domain.topology == "torus" else "each"
    size = f"{domain.topology} of {cluster.domain_size:,}{shape}"
    return f"{size}; {_link(domain.link, per)}"


def _link(link: Link, per: str = "each") -> str:
    if not link.bandwidth:
        return ""
    rate, reached = show_rate(link.bandwidth, "B"), show_rate(link.sustained, "B")
    return f"{link.name}, {rate} one way {per}, {reached} sustained"


def _row(device: Accelerator) -> list[str]:
    peaks = dict(device.peaks)
    shown = [show_rate(peaks[name]) if name in peaks else "-" for name in PEAK_HEADERS]
    domain = device.domain
    fabric = f"{domain.size} x {show_rate(domain.link.bandwidth, 'B')} {domain.topology}"
    return [
        device.name,
        show_bytes(device.memory),
        show_rate(device.hbm, "B"),
        *shown,
        fabric if domain.topology != "none" else "-",
        show_rate(device.network.bandwidth, "B"),
    ]


def _cluster_row(cluster: Cluster) -> list[str]:
    device = cluster.accelerator
    count = f"{cluster.count:,} x {device.name}"
    return [cluster.name, count, show_bytes(cluster.memory), device.network.name]
