"""What each rank saw, compared with the reference tensor by tensor."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.core.precision import Precision
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


@dataclass(frozen=True)
class Tolerance:
    """How far a layout may be from the reference.

    Attributes:
        loss, grad_norm: |x - ref| / |ref|. The largest element, which a recipe may take for the
            norm, has the rounding of one element.
        grad, weight: ||x - ref|| / ||ref|| of a tensor.
        element: largest difference of an element, as a share of the tensor's largest element.
        noise: a gradient below this share of the whole model's is rounding and nothing else. The
            bias of the keys has such a one, since softmax does not see it. Under AdamW, which
            divides by it, the weights of such a tensor may drift.
    """

    loss: float
    grad_norm: float
    grad: float
    weight: float
    element: float
    noise: float


TOLERANCES = {
    "fp64": Tolerance(1e-10, 1e-10, 1e-10, 1e-10, element=1e-8, noise=1e-15),
    "fp32": Tolerance(1e-5, 1e-5, 1e-5, 1e-5, element=1e-3, noise=1e-7),
    "fp16": Tolerance(1e-3, 5e-3, 1e-2, 2e-3, element=5e-2, noise=5e-4),
    "bf16": Tolerance(5e-3, 3e-2, 5e-2, 1e-2, element=2e-1, noise=3e-3),
}


# With products in few bits and the rest in fp64, both sides round the same numbers, and fp64's
# tolerance holds. Where the rest is shorter, it rounds otherwise under another order of the same
# sums; then a number near the middle between two of few bits goes up on one side and down on the
# other, and differs by their whole distance: 1/8 of it in E4M3, 1/4 in E5M2, 1/2 in E2M1. In fp32
# that is one number in a million, in bf16 most.
_FEW_BITS = {
    "fp32": Tolerance(1e-4, 1e-3, 2e-2, 1e-3, element=0.5, noise=1e-6),
    "bf16": Tolerance(2e-2, 1e-1, 4e-1, 2e-2, element=2.0, noise=1e-2),
}
_FOUR_BITS = Tolerance(2e-2, 1e-1, 9e-1, 2e-2, element=4.0, noise=1e-2)


def tolerance_of(precision: Precision) -> Tolerance:
    """How far a run of this precision may be off."""
    recipe, rest = precision.recipe, precision.rest
    if not recipe or rest == "fp64":
        return TOLERANCES[rest]
    return _FOUR_BITS if (recipe, rest) == ("nvfp4", "bf16") else _FEW_BITS[rest]


_SMALLEST = 1e-300  # keeps a division by the norm of a tensor of zeros finite


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


def see_biases(routers: Iterable[Router], step: int, reference: ReferenceStep) -> Iterator[Seen]:
    """Compare what evens out the load of experts, after the update."""
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


_Places = dict[object, list[Seen]]  # of one tensor: by stretch, what each rank that holds it saw


class Deviation(NamedTuple):
    """One field of all tensors: the worst relative error, and what is wrong, if anything."""

    worst: float
    complaints: list[str]


def judge(
    seen: Iterable[Seen], references: list[ReferenceStep], field: str, tolerance: Tolerance
) -> Deviation:
    """Put the stretches of every tensor together and compare with the reference.

    The stretches must cover each tensor exactly; of copies of a stretch the worst counts.
    """
    by_tensor: dict[tuple[int, str], _Places] = defaultdict(lambda: defaultdict(list))
    for item in seen:
        if item.field == field:
            by_tensor[item.step, item.name][item.place].append(item)
    relative = tolerance.grad if field == "grad" else tolerance.weight
    scales = _gradient_scales if field == "grad" else _weight_scales
    worst, complaints = 0.0, []
    for step, tensors in enumerate(scales(references, tolerance)):
        for name, scale in tensors.items():
            error, element, complaint = _errors(by_tensor[step, name], scale)
            if not complaint and not error <= relative:
                complaint = f"is off by {error:.1e} of its norm"
            if not complaint and not element <= tolerance.element:
                complaint = f"has an element off by {element:.1e} of its largest"
            worst = max(worst, error)
            if complaint:
                complaints.append(f"step {step + 1}: {field} of {name} {complaint}")
    return Deviation(worst, complaints)


class _Scale(NamedTuple):
    """What the differences of one tensor are divided by."""

    size: int
    norm: float
    largest: float


def _scale(x: Tensor, least: float) -> _Scale:
    """The norm and the largest element of `x`, or those of a tensor of norm `least`."""
    norm = float(torch.linalg.vector_norm(x.double()))
    largest = float(x.abs().max())
    return _Scale(x.numel(), max(norm, least), max(largest, least / math.sqrt(x.numel())))


def _gradient_scales(
    references: Iterable[ReferenceStep], tolerance: Tolerance
) -> Iterator[dict[str, _Scale]]:
    for reference in references:
        least = max(tolerance.noise * reference.grad_norm / tolerance.grad, _SMALLEST)
        yield {name: _scale(grad, least) for name, grad in reference.grads.items()}


def _weight_scales(
    references: Iterable[ReferenceStep], tolerance: Tolerance
) -> Iterator[dict[str, _Scale]]:
    """Elements count as at least as large as the model's: biases start at zero."""
    drifts: set[str] = set()
    for reference in references:
        noise = tolerance.noise * reference.grad_norm
        drifts |= {n for n, grad in reference.grads.items() if 0 < grad.double().norm() <= noise}
        weights = reference.weights
        typical = _root_mean_square(weights.values())
        yield {
            name: _scale(w, math.inf if name in drifts else typical * math.sqrt(w.numel()))
            for name, w in weights.items()
        }


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    squares = [(float(x.double().square().sum()), x.numel()) for x in tensors]
    return math.sqrt(sum(s for s, _ in squares) / sum(n for _, n in squares))


def _errors(places: _Places, scale: _Scale) -> tuple[float, float, str]:
    """Relative error of the norm, of the worst element, and what is wrong beside the numbers."""
    covered = sum(copies[0].size for copies in places.values())
    if covered != scale.size:
        return math.inf, math.inf, f"covers {covered} of {scale.size} elements"
    for copies in places.values():
        if copies[0].field == "weight" and len({copy.digest for copy in copies}) > 1:
            return math.inf, math.inf, "differs between ranks that hold copies of it"
    squares = sum(max(copy.squares for copy in copies) for copies in places.values())
    largest = max(copy.largest for copies in places.values() for copy in copies)
    if not math.isfinite(squares):
        return math.inf, math.inf, "is not finite"
    return math.sqrt(squares) / scale.norm, largest / scale.largest, ""
