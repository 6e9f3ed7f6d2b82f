"""What each rank saw, compared with the reference tensor by tensor."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.oracle.limits import Limit, StepLimits
from phalanx.oracle.reference import ReferenceStep
from phalanx.trainer.engine.unit import Slot
from phalanx.trainer.model.experts import Router
from phalanx.trainer.model.parameters import Declaration
from phalanx.trainer.parallel.data import ShardedUnit


class Seen(NamedTuple):
    """One stretch of one tensor on one rank, against the same stretch of the reference.

    Attributes:
        step: from 0.
        field: "grad" or "weight".
        name: of the global parameter.
        place: which stretch: offsets and sizes of the box, and the range inside it.
        squares: sum of squared differences.
        largest: largest difference, absolute.
        size: elements of the stretch.
        digest: of the bytes on this rank; copies must agree in it.
    """

    step: int
    field: str
    name: str
    place: tuple[tuple[int, ...], tuple[int, ...], int, int]
    squares: float
    largest: float
    size: int
    digest: str


_SMALLEST = 1e-300  # keeps a division by the norm of a tensor of zeros finite


def see_gradients(
    units: Iterable[ShardedUnit], step: int, reference: ReferenceStep
) -> Iterator[Seen]:
    """Compare the reduced gradients that this rank keeps.

    Args:
        units: of this rank.
        step: from 0.
        reference: the same step on one device.
    """
    for sharded in units:
        unit = sharded.unit
        for slot, start, stop in unit.pieces(unit.low, unit.high):
            mine = unit.grad[start - unit.low : stop - unit.low]
            yield _see(step, "grad", slot, (start, stop), mine, reference.grads)


def see_weights(
    units: Iterable[ShardedUnit], step: int, reference: ReferenceStep
) -> Iterator[Seen]:
    """Compare the whole weights that this rank computes with, after the update.

    Args:
        units: of this rank.
        step: from 0.
        reference: the same step on one device.
    """
    for sharded in units:
        sharded.acquire()
        for slot in sharded.unit.slots:
            mine = sharded.unit.weights[slot.start : slot.stop]
            yield _see(step, "weight", slot, (slot.start, slot.stop), mine, reference.weights)
        sharded.release()


def see_biases(routers: Iterable[Router], step: int, reference: ReferenceStep) -> Iterator[Seen]:
    """Compare what evens out the load of experts, after the update.

    Args:
        routers: of this rank.
        step: from 0.
        reference: the same step on one device.
    """
    for router in routers:
        name, shape = f"{router.prefix}.bias", tuple(router.bias.shape)
        declaration = Declaration(name=name, shape=shape)
        slot = Slot(declaration, declaration.box(), 0, shape[0])
        yield _see(step, "weight", slot, (0, shape[0]), router.bias, reference.weights)


def _see(
    step: int,
    field: str,
    slot: Slot,
    span: tuple[int, int],
    mine: Tensor,
    reference: dict[str, Tensor],
) -> Seen:
    name, box = slot.declaration.name, slot.box
    start, stop = span[0] - slot.start, span[1] - slot.start
    whole = reference[name]
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    theirs = whole.reshape(-1)[start:stop].to(mine.dtype).double()
    difference = (mine.double() - theirs).abs().nan_to_num(nan=math.inf)
    return Seen(
        step=step,
        field=field,
        name=name,
        place=(box.offsets, box.sizes, start, stop),
        squares=difference.square().sum().item(),
        largest=difference.max().item(),
        size=stop - start,
        digest=hashlib.sha256(mine.clone().view(torch.uint8).numpy().tobytes()).hexdigest(),
    )


class Judgment(NamedTuple):
    """One field of all tensors, or a number: the worst error, and what is wrong, if anything.

    Attributes:
        worst: relative error.
        complaints: one line each.
        used: the worst error as a share of what is allowed.
    """

    worst: float
    complaints: list[str]
    used: float


_Places = dict[object, list[Seen]]  # of one tensor: by stretch, what each rank that holds it saw


def judge(seen: Iterable[Seen], limits: Sequence[StepLimits], field: str) -> Judgment:
    """Put the stretches of every tensor together and compare with the reference.

    The stretches must cover each tensor exactly; of copies of a stretch the worst counts. A step
    that overflows has no gradients to compare, and leaves every weight as it was.

    Args:
        seen: stretches, from all ranks.
        limits: how far each step may be off.
        field: "grad" or "weight".
    """
    by_tensor: dict[tuple[int, str], _Places] = defaultdict(lambda: defaultdict(list))
    for item in seen:
        if item.field == field:
            by_tensor[item.step, item.name][item.place].append(item)
    worst, used, complaints = 0.0, 0.0, []
    for step, limit in enumerate(limits):
        tensors = limit.grads if field == "grad" else limit.weights
        for name, allowed in tensors.items():
            places = by_tensor[step, name]
            if field == "grad" and limit.overflows:
                continue
            error, share, complaint = _errors(places, allowed)
            if not complaint and limit.overflows and _moved(places, by_tensor[step - 1, name]):
                complaint = "moved in a step that overflowed"
            worst, used = max(worst, error), max(used, share)
            if complaint:
                complaints.append(f"step {step + 1}: {field} of {name} {complaint}")
    return Judgment(worst, complaints, used)


def _errors(places: _Places, limit: Limit) -> tuple[float, float, str]:
    """Relative error, its share of what is allowed, and what is wrong."""
    covered = sum(copies[0].size for copies in places.values())
    if covered != limit.size:
        return math.inf, math.inf, f"covers {covered} of {limit.size} elements"
    for copies in places.values():
        if copies[0].field == "weight" and len({copy.digest for copy in copies}) > 1:
            return math.inf, math.inf, "differs between ranks that hold copies of it"
    squares = sum(max(copy.squares for copy in copies) for copies in places.values())
    largest = max(copy.largest for copies in places.values() for copy in copies)
    if not math.isfinite(squares):
        return math.inf, math.inf, "is not finite"
    error, element = math.sqrt(squares) / limit.norm, largest / limit.largest
    used = max(error / limit.off, element / limit.element)
    complaint = ""
    if error > limit.off:
        complaint = f"is off by {error:.1e} of its norm; rounding explains {limit.off:.1e}"
    elif element > limit.element:
        complaint = (
            f"has an element off by {element:.1e} of its largest; "
            f"rounding explains {limit.element:.1e}"
        )
    return error, used, complaint


def _moved(places: _Places, before: _Places) -> bool:
    """Whether any stretch has other bytes than it had after the step before, or at the start."""
    if not before:
        return any(copy.squares > 0 for copies in places.values() for copy in copies)
    return any(copies[0].digest != before[place][0].digest for place, copies in places.items())


def judge_numbers(
    ours: Sequence[Sequence[float]], theirs: Sequence[float], allowed: Sequence[float], name: str
) -> Judgment:
    """Compare what each rank says at each step; all must say the same.

    Args:
        ours: by rank, by step.
        theirs: the reference's, by step.
        allowed: the largest difference, by step.
        name: of the number.
    """
    worst, used, complaints = 0.0, 0.0, []
    for step, (true, limit) in enumerate(zip(theirs, allowed, strict=True)):
        off = max(_distance(values[step], true) for values in ours)
        error = off / max(abs(true), 1e-14) if math.isfinite(true) else off
        worst, used = max(worst, error), max(used, off / max(limit, _SMALLEST))
        if off > limit:
            complaints.append(f"step {step + 1}: {name} is off by {error:.1e}")
    if any(list(values) != list(ours[0]) for values in ours):
        complaints.append(f"{name} differs between ranks")
    return Judgment(worst, complaints, used)


def _distance(mine: float, true: float) -> float:
    """Between two numbers; none between two that are not finite."""
    if not math.isfinite(mine) and not math.isfinite(true):
        return 0.0
    off = abs(mine - true)
    return off if math.isfinite(off) else math.inf
