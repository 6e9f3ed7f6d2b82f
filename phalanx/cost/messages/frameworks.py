"""What other programs send: the list of our own trainer, transformed rule by rule.

    rule            other programs
    formats         move activations in 16 bits, also the inputs of products in low precision
    once            reduce gradients once a step in one message, and nothing is padded
    recomputation   stops before the last sum of a block; of parts nothing is gathered again
    ring            is all they have along cp; it is not sent again, and gradients are as narrow
    experts         get the rows of each rank's own tokens
    pipeline        each tp rank sends its part, with or without sp
    small sums      are left out: of losses, norms, counts, and of what is held whole

Sources: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2; Narayanan et al. 2021 (arXiv:2104.04473), section 4.1.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

import numpy as np

from phalanx.core.precision import Precision
from phalanx.core.recompute import Recompute
from phalanx.cost.framework import Framework
from phalanx.cost.holdings import Holdings
from phalanx.cost.messages import ALL, messages, setting
from phalanx.cost.messages.unit import UnitMessage
from phalanx.cost.table import Choice, Table

HALF = 2  # bytes of a 16-bit number
_SMALL = (
    *("loss maximum", "loss sums", "partial gradients", "shared gradients", "valid tokens"),
    *("rows per expert", "expert visits", "expert loads", "expert loads both ways", "amax"),
    *("gradients both ways", "tied embedding", "gradient norm", "loss"),
)
# What stands beside a product in backward: the sum of an input's gradient beside the gradient of
# the weight, and the input that is gathered again beside the sum's product.
_BESIDE_PRODUCTS = ("tp input gradient", "tp input again")


def messages_of(
    table: Table,
    framework: Framework,
    *,
    axes: Container[str] = ALL,
    held: Holdings | None = None,
) -> list[UnitMessage]:
    """Every kind of message of every kind of unit, as a framework sends it.

    Args:
        table: the layouts.
        framework: the program.
        axes: that are asked.
        held: what the first pipeline rank holds, if that is known.

    Returns:
        Messages with columns that broadcast with those of the table.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.
    """
    if framework.sends_as_ledger:
        return messages(setting(table, held=held), axes)
    plain = _as_others_cut(table)
    where = replace(setting(plain, held=held), wide=int(framework.gradient), pads=False)
    found = [each for each in messages(where, axes) if each.purpose not in _SMALL]
    wide = framework.gradient
    return list(_joined(each for sent in found for each in _changed(plain, wide, sent)))


def _as_others_cut(table: Table) -> Table:
    """The same layouts without what only our trainer does."""
    segments = tuple(Recompute(segment=mode.segment) for mode in table.recompute.values)
    return replace(
        table,
        precision=Precision(rest="bf16"),
        logits=np.zeros_like(table.logits),
        compile=np.zeros_like(table.compile),
        recompute=Choice(segments, table.recompute.codes),
        context=Choice(("ring",), np.zeros_like(table.context.codes)),
    )


def _changed(table: Table, wide: float, sent: UnitMessage) -> Iterator[UnitMessage]:
    match sent.axis:
        case "tensor":
            beside = sent.behind if sent.purpose in _BESIDE_PRODUCTS else "nothing"
            if sent.share == "all":
                yield replace(sent, behind=beside)
        case "context":
            gradients = sent.purpose == "key and value gradients"
            if sent.when != "recompute":
                yield replace(sent, bytes=sent.bytes * HALF / wide if gradients else sent.bytes)
        case "expert":
            yield replace(sent, bytes=sent.bytes / np.where(table.sp, table.tp, 1))
        case "pipeline":
            parts = np.where(table.sp, table.tp, 1)
            yield replace(sent, bytes=sent.bytes * parts / table.tp)
        case "data":
            yield _of_data_axis(sent)


def _of_data_axis(sent: UnitMessage) -> UnitMessage:
    """One message a step; around units a tied table is gathered like any other."""
    if sent.unit == "embedding" and sent.purpose == "weights" and sent.when != "step":
        once = 1 if sent.when == "forward" else 0
        return replace(sent, times=np.minimum(sent.times, once))
    return replace(sent, together=sent.when == "step")


def _joined(found: Iterable[UnitMessage]) -> Iterator[UnitMessage]:
    """Parts of one unit that are moved at once are one message."""
    units: dict[tuple[object, ...], UnitMessage] = {}
    for sent in found:
        if sent.axis != "data":
            yield sent
            continue
        key = (sent.unit, sent.purpose, sent.collective, sent.among, sent.when, sent.share)
        before = units.get(key, replace(sent, bytes=0 * sent.bytes))
        units[key] = replace(
            sent,
            bytes=before.bytes + sent.bytes * (sent.times > 0),
            times=np.maximum(sent.times, before.times),
        )
    yield from units.values()
