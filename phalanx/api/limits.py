"""What hides messages behind arithmetic for one model on one cluster: limits of tp, floors of dp.

The formulas are the scaling book's, in `phalanx/cost/roofline.py`: perfect overlap, two matrices to
a layer, peak rates. They say what is hopeless before anything is priced.
"""

from typing import Any

from phalanx.core.cluster import Cluster
from phalanx.core.model import ModelShape
from phalanx.cost.roofline import (
    LayerSizes,
    SwitchedFabric,
    block_of,
    domain_weights_floor,
    tensor_limit,
    weights_floor,
)

BOTH_WAYS = 2  # links of one axis of a torus


def limits_of(shape: ModelShape, cluster: Cluster, number_format: str = "bf16") -> dict[str, Any]:
    """The limits, as `phalanx models NAME --on CLUSTER --json` prints them.

    Args:
        shape: the model.
        cluster: the devices.
        number_format: of the products.

    Returns:
        `tensor_limit`, the largest tp whose messages hide inside a domain; `domain_tokens_floor`
        and `network_tokens_floor`, tokens per device and step below which data parallelism waits
        for weights, inside a domain and across domains; None where there is no such fabric.

    Raises:
        RefusedError: nobody published the peak in this format.

    Example:
        >>> from phalanx.api.names import cluster_of, model_of
        >>> found = limits_of(model_of("llama-3.1-70b"), cluster_of("h100x64"))
        >>> round(found["tensor_limit"]), round(found["network_tokens_floor"])
        (13, 2474)
    """
    block, peak = block_of(shape), cluster.accelerator.peak(number_format)
    inside = _inside(cluster)
    return {
        "cluster": cluster.name,
        "tensor_limit": tensor_limit(block.k * block.f, peak / inside) if inside else None,
        "domain_tokens_floor": (weights_floor(peak / inside, block.sparsity) if inside else None),
        "network_tokens_floor": _across(block, cluster, peak),
    }


def _inside(cluster: Cluster) -> float:
    """Bytes/s of one device into its domain: on a torus, both links of one axis."""
    if cluster.domain.topology == "none" or cluster.domain_size == 1:
        return 0.0
    rate = cluster.domain.link.bandwidth
    return rate * BOTH_WAYS if cluster.domain.axes else rate


def _across(block: LayerSizes, cluster: Cluster, peak: float) -> float | None:
    if cluster.count <= cluster.domain_size:
        return None
    egress = cluster.accelerator.network.bandwidth * cluster.domain_size
    inside = _inside(cluster) or cluster.accelerator.network.bandwidth
    fabric = SwitchedFabric(cluster.domain_size, inside, egress)
    return block.sparsity * domain_weights_floor(peak, fabric, inner=1)
