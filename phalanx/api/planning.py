"""Planning from Python: what a layout costs, and what its ranks send each other."""

from dataclasses import replace

from phalanx.api.names import (
    ClusterLike,
    LayoutLike,
    ModelLike,
    cluster_of,
    framework_of,
    layout_of,
    layout_on,
    model_of,
    tokens_of,
)
from phalanx.core.errors import UsageError, require_whole
from phalanx.core.estimate import Estimate
from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.core.run import Recipe, Run
from phalanx.cost.messages import rank_messages
from phalanx.cost.refusals import refuse
from phalanx.planner.estimate import estimate as price
from phalanx.planner.explain import suggest_fix
from phalanx.planner.parse import sequences_per_step
from phalanx.planner.sweep import Request
from phalanx.schedules.layouts import is_asynchronous


def estimate(
    model: ModelLike,
    cluster: ClusterLike,
    layout: LayoutLike,
    *,
    batch: int,
    seq: int,
    framework: str = "phalanx",
) -> Estimate:
    """Price one layout: seconds as a tree of terms, bytes by rank, messages by axis.

    Args:
        model: a catalog name, a `.toml` file, a table of sizes or a `ModelShape`.
        cluster: `h100x64`, a catalog name, a `.toml` file or a `Cluster`.
        layout: a line, a table of keys or a `Layout`; without dp, it takes what the other axes
            leave of the devices.
        batch: sequences per step, all devices together.
        seq: tokens per sequence.
        framework: the program whose ways are priced; `phalanx help framework` names them.

    Returns:
        The estimate: `step_seconds`, `peak_bytes` of the worst rank, `step`, the tree of terms,
        `messages` of the busiest rank, `mfu` and `hfu`.

    Raises:
        UsageError: nobody knows a name, or a number cannot be.
        RefusedError: the model, the batch or the devices cannot be cut so.

    Example:
        >>> import phalanx
        >>> found = phalanx.estimate("llama-3.1-70b", "h100x64", "tp=8 pp=4", batch=64, seq=4096)
        >>> found.layout.dp, found.fits
        (2, True)
    """
    request, asked = estimate_request(model, cluster, layout, (None, batch), seq, framework)
    return price(
        request.shape, request.cluster, asked, request.seq, request.batch, request.framework
    )


def estimate_request(
    model: ModelLike,
    cluster: ClusterLike,
    layout: LayoutLike,
    step: tuple[str | None, int | None],
    seq: int,
    framework: str,
) -> tuple[Request, Layout]:
    """What an estimate is asked for, as values.

    Args:
        model: as `model_of` takes it.
        cluster: as `cluster_of` takes it.
        layout: as `layout_on` takes it.
        step: tokens of one step, or its sequences; the other is None.
        seq: tokens per sequence.
        framework: the program whose ways are priced.

    Raises:
        UsageError: nobody knows a name, or a number cannot be.
        RefusedError: the layout is for another number of devices.
    """
    tokens, batch = step
    for name, value in (("seq", seq), ("batch", batch)):
        if value is not None or name == "seq":
            require_whole(name, value)
    shape, devices = model_of(model), cluster_of(cluster)
    asked = layout_on(layout, devices)
    if batch is None:
        batch = sequences_per_step(tokens_of(tokens or ""), seq, asked.dp * asked.mb)
    profile = framework_of(framework)
    return Request(shape=shape, cluster=devices, seq=seq, batch=batch, framework=profile), asked


def suggestion(request: Request, found: Estimate) -> str:
    """The smallest change that makes a layout fit, in words; empty where it fits.

    Args:
        request: what was asked.
        found: the estimate.
    """
    if found.fits:
        return ""
    remedy = suggest_fix(request, found.layout)
    return f"it fits with {remedy.changes}" if remedy else "no small change makes it fit"


def messages(
    model: ModelLike, layout: LayoutLike, *, batch: int, seq: int, rank: int = 0
) -> tuple[Message, ...]:
    """What one rank of the trainer sends in one step, message by message.

    The list is the one that the trainer's own ledger is held against, byte for byte.

    Args:
        model: a catalog name, a `.toml` file, a table of sizes or a `ModelShape`.
        layout: a line, a table of keys or a `Layout`; bf16 unless it names a precision.
        batch: sequences per step, all ranks together.
        seq: tokens per sequence.
        rank: which; tp is fastest, then cp, pp, and dp outermost.

    Returns:
        Messages with axis, collective, purpose, bytes of the full vector, and times per step.

    Raises:
        UsageError: nobody knows a name, or there is no such rank.
        RefusedError: the trainer cannot cut the model or the batch so.

    Example:
        >>> import phalanx
        >>> sent = phalanx.messages("llama-3.1-8b", "tp=8 sp=off", batch=1, seq=8192)
        >>> sorted({message.axis for message in sent})
        ['tensor', 'world']
    """
    for name, value in (("batch", batch), ("seq", seq), ("rank", rank)):
        require_whole(name, value)
    shape, named = model_of(model), layout_of(layout)
    asked = replace(named, precision=named.precision.on("bf16"))
    clip = 0.0 if is_asynchronous(asked) else 1.0  # stale updates have no norm of a step to clip by
    run = Run(model=shape, layout=asked, recipe=Recipe(seq=seq, batch=batch, clip=clip))
    if not 0 <= rank < asked.ranks:
        raise UsageError(f"rank is {rank}; {asked} has ranks 0 to {asked.ranks - 1}")
    refuse(run)
    return tuple(rank_messages(run, asked.coordinates(rank)))
