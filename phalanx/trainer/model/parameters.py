"""How a parameter is declared: its global name, its shape, how it is cut, how it is initialised.

Everything else about a parameter follows from its declaration: which part of the global tensor a
rank holds, who reduces its gradient, whether it decays, its name in a checkpoint.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from phalanx.core.layout import share

Init = Literal["normal", "residual", "ones", "zeros"]


@dataclass(frozen=True)
class Share:
    """Which of so many equal parts is a rank's.

    Attributes:
        parts: how many there are, one for each rank of a group.
        index: of this one.
    """

    parts: int
    index: int


WHOLE = Share(1, 0)


class Box(NamedTuple):
    """A rectangular part of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One parameter of the whole model, whatever rank holds it.

    Attributes:
        name: unique in the model, the same under every layout.
        shape: of the whole tensor.
        tp_dim: the dim that tensor parallelism cuts, or None where every rank holds all of it.
        tp_limit: into how many parts `tp_dim` can be cut; of more ranks, neighbours hold the same
            part, and the gradient of one is a part of their sum. 0 sets no limit.
        expert_dim: the dim that expert parallelism cuts, or None; experts are counted along it.
        needs_tp_reduce: held whole but applied to a part of the activations, so that its gradient
            on one rank is only a part of the sum.
        init: distribution of the initial values.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_limit: int = 0
    expert_dim: int | None = None
    needs_tp_reduce: bool = False
    init: Init = "normal"

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to vectors."""
        return len(self.shape) > 1

    def copies(self, parts: int) -> int:
        """How many neighbours among `parts` tensor-parallel ranks hold the same of it."""
        if self.tp_dim is None:
            return parts
        return max(parts // self.tp_limit, 1) if self.tp_limit else 1

    def box(self, tensor: Share = WHOLE, expert: Share = WHOLE) -> Box:
        """What a rank holds, by its share along tp and along ep.

        Args:
            tensor: among the ranks along tp, of which some may hold the same.
            expert: among the ranks along ep.
        """
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        copies = self.copies(tensor.parts)
        among = Share(tensor.parts // copies, tensor.index // copies)
        for dim, mine in ((self.tp_dim, among), (self.expert_dim, expert)):
            if dim is not None:
                offsets[dim], sizes[dim] = share(self.shape[dim], mine.parts, mine.index)
        return Box(tuple(offsets), tuple(sizes))


class How(TypedDict, total=False):
    """What a declaration says besides name and shape."""

    tp_dim: int | None
    tp_limit: int
    expert_dim: int | None
    needs_tp_reduce: bool
    init: Init


class Declared(nn.Module):
    """A module that declares its parameters; memory and values come later, from its unit."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.declarations: dict[str, Declaration] = {}

    def declare(self, name: str, shape: tuple[int, ...], **how: Unpack[How]) -> None:
        """Declare parameter `name` of this module; it has no elements until its unit gives it some.

        Args:
            name: without the module's prefix.
            shape: of the whole tensor, under every layout.
            **how: it is cut and initialised; see `Declaration`.
        """
        self.declarations[name] = Declaration(name=f"{self.prefix}.{name}", shape=shape, **how)
        self.register_parameter(name, nn.Parameter(torch.empty(0, device="meta")))


class OwnedParameter(NamedTuple):
    """A declaration and the module that uses the parameter."""

    declaration: Declaration
    owner: Declared
    attribute: str


def declared_in(module: nn.Module) -> Iterator[OwnedParameter]:
    """Every parameter declared in `module` and below, in order of definition."""
    for owner in module.modules():
        if isinstance(owner, Declared):
            for attribute, declaration in owner.declarations.items():
                yield OwnedParameter(declaration, owner, attribute)


def initial_values(declaration: Declaration, box: Box, recipe: "Initial") -> Tensor:
    """The values that every layout starts from, for one box of a global tensor.

    Each element is a function of (seed, name, its index in the whole tensor), so any part can be
    drawn alone.

    Args:
        declaration: gives name, shape and distribution.
        box: which elements.
        recipe: the seed, the standard deviation of matrices, and L.

    Returns:
        float32, shape `box.sizes`, on the CPU.
    """
    if declaration.init in ("ones", "zeros"):
        return torch.full(box.sizes, 1.0 if declaration.init == "ones" else 0.0)
    std = recipe.std
    if declaration.init == "residual":
        std /= math.sqrt(2 * recipe.layers)
    uniform = uniform_values(f"{recipe.seed}/{declaration.name}", declaration.shape, box)
    normal: Tensor = torch.special.ndtri(uniform)
    return (normal * std).float()


class Initial(NamedTuple):
    """What initial values depend on, besides a parameter's name and shape.

    Attributes:
        seed: of the run.
        std: standard deviation of matrices; those that end a residual branch have it divided
            by sqrt(2 L) (Radford et al. 2019, section 2.3).
        layers: L.
    """

    seed: int
    std: float
    layers: int

    def __call__(self, declaration: Declaration, box: Box) -> Tensor:
        """The values of one box of a parameter; see `initial_values`."""
        return initial_values(declaration, box, self)


def uniform_values(key: str, shape: tuple[int, ...], box: Box) -> Tensor:
    """Uniform numbers in (0, 1), one for each element of a box of a tensor of `shape`.

    A counter-based generator: SplitMix64 (Steele et al. 2014) at position (key + element index).

    Args:
        key: any text; another one gives other numbers.
        shape: of the whole tensor, whose elements are counted row by row.
        box: which of them.

    Returns:
        float64, shape `box.sizes`, on the CPU.
    """
    index = torch.zeros((), dtype=torch.int64)
    for size, offset, length in zip(shape, box.offsets, box.sizes, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(offset, offset + length)
    return uniform_at(key_of(key), index)


def key_of(text: str) -> int:
    """A 64-bit key from a text, the same on every machine."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def uniform_at(key: int, index: Tensor) -> Tensor:
    """Uniform float64 in (0, 1) at each int64 counter of `index`.

    Args:
        key: 64 bits, signed; see `key_of`.
        index: any shape, which the result has too.
    """
    z = index * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift(z, 31)
    return (_shift(z, 12).double() + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
