"""A piece: the elements of one tensor that one rank owns, and where they belong in the whole."""

from dataclasses import dataclass

import torch

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.box import FlatRange, Region, check_part

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements `start` to `stop` of a box of a global tensor: to be saved, or to be filled.

    Attributes:
        name: global parameter name, for example "blocks.3.attention.q.weight".
        field: what is kept about it: "weight", "exp_avg", "exp_avg_sq", ...
        shape: of the global tensor.
        offsets: of the box in the global tensor.
        sizes: of the box.
        start: first element, in the row-major flattened box.
        stop: one past the last element.
        data: 1-D, contiguous, stop - start elements, on any device.

    Raises:
        CheckpointError: the numbers contradict each other.
    """

    name: str
    field: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        """Reject a piece that does not lie in its tensor, or whose data is of another size."""
        check_part(self.label, self.shape, self.part)
        if self.data.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise CheckpointError(f"{self.label} is {self.data.dtype}; a checkpoint holds {known}")
        wanted = (self.stop - self.start,)
        if self.data.shape != wanted or not self.data.is_contiguous():
            raise CheckpointError(
                f"{self.label}: data has shape {tuple(self.data.shape)}; elements {self.start} to "
                f"{self.stop} need one contiguous dim of {wanted[0]}"
            )

    @property
    def part(self) -> FlatRange:
        """Which elements these are."""
        return FlatRange(Region(self.offsets, self.sizes), self.start, self.stop)

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.field} of {self.name}"

    @property
    def dtype(self) -> str:
        """The element type, in the words of safetensors."""
        return DTYPES[self.data.dtype]
