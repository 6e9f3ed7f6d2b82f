"""What each rank saw, compared with the reference tensor by tensor."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.train.parallel.data import ShardedUnit
from phalanx.train.unit import Slot
from phalanx.verify.reference import ReferenceStep


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


@dataclass(frozen=True)
class Tolerance:
    """How far a tensor may be from the reference.

    Attributes:
        relative: of ||x - ref|| / ||ref||.
        element: of the largest element's difference, as a share of the tensor's largest.
        floor: of the norms, as a share of the largest tensor's: some gradients are zero but for
            rounding (softmax does not see a bias of all keys), and have no digits to compare.
    """

    relative: float
    element: float
    floor: float


TOLERANCES = {
    "fp64": Tolerance(1e-10, 1e-8, 1e-5),
    "fp32": Tolerance(1e-5, 1e-3, 1e-2),
    "bf16": Tolerance(5e-2, 2e-1, 1e-2),
}


def see_gradients(
    units: Iterable[ShardedUnit], step: int, reference: ReferenceStep
) -> Iterator[Seen]:
    """Compare the reduced gradients that this rank keeps."""
    for sharded in units:
        unit = sharded.unit
        for slot, start, stop in unit.pieces(unit.low, unit.high):
            mine = unit.grad[start - unit.low : stop - unit.low]
            yield _see(step, "grad", slot, (start, stop), mine, reference.grads)


def see_weights(
    units: Iterable[ShardedUnit], step: int, reference: ReferenceStep
) -> Iterator[Seen]:
    """Compare the whole weights that this rank computes with, after the update."""
    for sharded in units:
        sharded.acquire()
        for slot in sharded.unit.slots:
            mine = sharded.unit.weights[slot.start : slot.stop]
            yield _see(step, "weight", slot, (slot.start, slot.stop), mine, reference.weights)
        sharded.release()


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
    difference = (mine.double() - theirs).abs()
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


class Verdict(NamedTuple):
    """One field of all tensors: the worst relative error, and what is wrong, if anything."""

    worst: float
    complaints: list[str]


def judge(
    seen: Iterable[Seen], references: list[ReferenceStep], field: str, tolerance: Tolerance
) -> Verdict:
    """Put the stretches of every tensor together and compare with the reference.

    The stretches must cover each tensor exactly; of copies of a stretch the worst counts.
    """
    by_tensor: dict[tuple[int, str], dict[object, list[Seen]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for item in seen:
        if item.field == field:
            by_tensor[item.step, item.name][item.place].append(item)
    worst, complaints = 0.0, []
    for step, reference in enumerate(references):
        tensors = reference.grads if field == "grad" else reference.weights
        norms = {name: torch.linalg.vector_norm(t.double()).item() for name, t in tensors.items()}
        floor = tolerance.floor * max(norms.values())
        for name, tensor in tensors.items():
            places, norm = by_tensor[step, name], max(norms[name], floor)
            error, complaint = _judge_tensor(places, tensor, norm, tolerance)
            worst = max(worst, error)
            if complaint:
                complaints.append(f"step {step + 1}: {field} of {name} {complaint}")
    return Verdict(worst, complaints)


def _judge_tensor(
    places: dict[object, list[Seen]], reference: Tensor, norm: float, tolerance: Tolerance
) -> tuple[float, str]:
    covered = sum(copies[0].size for copies in places.values())
    if covered != reference.numel():
        return float("inf"), f"covers {covered} of {reference.numel()} elements"
    for copies in places.values():
        if copies[0].field == "weight" and len({copy.digest for copy in copies}) > 1:
            return float("inf"), "differs between ranks that hold copies of it"
    squares = sum(max(copy.squares for copy in copies) for copies in places.values())
    largest = max(copy.largest for copies in places.values() for copy in copies)
    top = max(reference.abs().max().item(), norm / reference.numel() ** 0.5)
    if not squares < float("inf"):
        return float("inf"), "is not finite"
    error = squares**0.5 / norm
    if error > tolerance.relative:
        return error, f"is off by {error:.1e} of its norm"
    if largest > tolerance.element * top:
        return error, f"has an element off by {largest / top:.1e} of its largest"
    return error, ""
