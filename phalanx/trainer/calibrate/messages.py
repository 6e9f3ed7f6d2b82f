"""Each collective of a layout by size, over the trainer's own groups, and what hiding it costs."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.trainer.calibrate.bench import Bench, Sampled
from phalanx.trainer.ops.kernels import times
from phalanx.trainer.parallel.comm import Group

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
QUICK_SIZES = (1 << 12, 1 << 16, 1 << 20)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


class MessageTime(NamedTuple):
    """One collective among neighbours.

    Attributes:
        name: of it.
        ranks: of the group.
        bytes: of the full vector; of a send, of the message.
        seconds: from its start until it has been waited for.
    """

    name: str
    ranks: int
    bytes: int
    seconds: Sampled


def messages(bench: Bench, group: Group, *, quick: bool) -> Iterator[MessageTime]:
    """Time collectives of one group, while all others of its kind send theirs.

    Args:
        bench: where.
        group: of this rank.
        quick: only a few sizes.
    """
    for name in COLLECTIVES:
        for size in QUICK_SIZES if quick else SIZES:
            count = size // 4 // group.size * group.size
            send = _sender(name, group, torch.zeros(count, device=bench.mesh.device))
            yield MessageTime(name, group.size, 4 * count, bench.sample(send, sends=True))


def _sender(name: str, group: Group, x: Tensor) -> Callable[[], None]:
    out, part = torch.empty_like(x), torch.empty(len(x) // group.size, device=x.device)
    match name:
        case "all_reduce":
            return lambda: group.all_reduce(x, "calibration").wait()
        case "all_gather":
            return lambda: group.all_gather(out, part, "calibration").wait()
        case "reduce_scatter":
            return lambda: group.reduce_scatter(part, x, "calibration").wait()
        case "all_to_all":
            return lambda: group.all_to_all(out, x, "calibration").wait()
        case _:
            return lambda: group.shift(out, x, "calibration").wait()


def interference(bench: Bench) -> float:
    """Share of a hidden message that arithmetic loses to it: 0 to 1.

    Args:
        bench: where; of one rank nothing is lost.
    """
    group, device = bench.mesh.data, bench.mesh.device
    if group.size == 1:
        return 0.0
    x = torch.zeros(1 << 20, device=device)
    a = torch.randn(768, 768, device=device)

    def compute() -> None:
        for _ in range(4):
            times(a, a)

    def both() -> None:
        pending = group.all_reduce(x, "calibration")
        compute()
        pending.wait()

    alone = bench.sample(compute).median
    message = bench.sample(lambda: group.all_reduce(x, "calibration").wait(), sends=True).median
    together = bench.sample(both, sends=True).median
    hidden = min(message, alone)
    return min(max((together - max(alone, message)) / hidden, 0.0), 1.0)
