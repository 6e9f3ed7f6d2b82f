"""What an operator of a model says about itself, without knowing how a layout cuts it.

The list of all operators is in `core/operators/`.

Symbols: h hidden, t tp.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

# Whose tokens an operator sees: all of the rank's part of a sequence; under sp only 1/t of them;
# or those of experts, which programs cut as they cut the experts.
Tokens = Literal["gathered", "own", "routed"]
# How a saved tensor is stored: like an activation; as the product that reads it multiplies; both
# ways; in fp32; or in what some programs do not have: statistics, rotary angles, dropout masks,
# and logits, which each keeps in a format of its own.
Format = Literal["activation", "operand", "both", "fp32", "statistics", "angles", "mask", "logits"]
# What recomputation may repeat by itself; see `core.recompute.PARTS`.
Part = Literal["block", "core", "norms", "mlp", "activation", "latent", "experts"]
# Where the gradient of a parameter that every rank holds whole is only a part of the sum.
TpReduce = Literal["never", "sp", "tp"]
UnitName = Literal["embedding", "dense block", "routed block", "head"]


class Width(NamedTuple):
    """Channels of a tensor, and how tp cuts them.

    Attributes:
        pieces: what cannot be cut further: heads, or single channels. They are dealt over the tp
            ranks as evenly as possible; of more ranks than pieces, neighbours have the same one.
        each: channels of a piece.
        cut: whether tp cuts them at all.
    """

    pieces: int
    each: int = 1
    cut: bool = True

    @property
    def channels(self) -> int:
        """All of them."""
        return self.pieces * self.each

    def parts(self, t: Any) -> Any:
        """Into how many parts t ranks cut it: by arithmetic alone, so that t may be a column.

        Never more than there are pieces: then t of them share what one would have.
        """
        one = t // t
        return t - (t - self.pieces) * (t > self.pieces) if self.cut else one

    def share(self, t: Any) -> Any:
        """Channels of one of t ranks, on average."""
        return self.channels / self.parts(t)

    def held(self, t: Any, index: int = 0) -> Any:
        """Channels that one tp rank has, exactly; the first has the most.

        Args:
            t: tp, a number or a column of whole numbers.
            index: the tp rank, 0 to t - 1. Of more ranks than pieces, neighbours in a row have the
                same piece.

        Example:
            >>> [Width(pieces=10, each=128).held(4, index) for index in range(4)]
            [384, 384, 256, 256]
        """
        parts = self.parts(t)
        place = index * parts // t if self.cut else 0
        return (self.pieces // parts + (place < self.pieces % parts)) * self.each

    def is_shared(self, t: Any) -> Any:
        """1 where several of t ranks hold the same piece, else 0."""
        return (t > self.pieces) * int(self.cut)


def whole(channels: int) -> Width:
    """Channels that every rank has."""
    return Width(channels, cut=False)


class Parameter(NamedTuple):
    """A matrix or a vector.

    Attributes:
        name: in its block, as the trainer declares it; or in the model, at the ends.
        dims: its sides.
        tp_reduce: where a rank that holds it whole has only a part of its gradient: nowhere; where
            sp cuts the tokens that it is applied to; or under every tp, since each rank applies it
            to its own heads, or learns through its part of the experts.
        experts: how many there are of it, of which ep gives each rank some; 0 if it is of no
            expert.
        again: the parts of a block under whose recomputation a token is multiplied with it again.
    """

    name: str
    dims: tuple[Width, ...]
    tp_reduce: TpReduce = "never"
    experts: int = 0
    again: frozenset[str] = frozenset()

    def elements(self, experts: int | None = None) -> int:
        """Elements of all of it, before anything is cut.

        Args:
            experts: of how many experts, if it is of experts; None counts all that there are.
        """
        count = self.experts if experts is None else min(self.experts, experts)
        return prod(dim.channels for dim in self.dims) * (count if self.experts else 1)

    def held(self, t: Any, index: int = 0) -> Any:
        """Elements that one tp rank has: the product of the sides, of which it cuts some.

        Args:
            t: tp, a number or a column of whole numbers.
            index: the tp rank, 0 to t - 1; the first has the most.

        Returns:
            Like t, also where nothing is cut; of a parameter of experts, those of one expert.
        """
        sizes = [dim.held(t, index) for dim in self.dims if dim.cut]
        return prod(dim.channels for dim in self.dims if not dim.cut) * prod(sizes) * (t // t)

    @property
    def cut(self) -> Width | None:
        """The side that tp cuts."""
        return next((dim for dim in self.dims if dim.cut), None)


class SavedTensor(NamedTuple):
    """One kind of tensor that backward will read.

    Attributes:
        name: what it is.
        width: elements per token.
        tokens: whose.
        format: of an element.
        freed_by: the parts of a block under whose recomputation it is not saved.
        is_input: it is what whole blocks are computed again from.
        others: width in programs that give experts each rank's own tokens, if it differs.
    """

    name: str
    width: Width
    tokens: Tokens = "gathered"
    format: Format = "activation"
    freed_by: frozenset[str] = frozenset()
    is_input: bool = False
    others: int = 0


class Boundary(NamedTuple):
    """How tensor-parallel ranks meet around an operator.

    Attributes:
        kind: columns: the ranks need all tokens of its input, which is not saved whole, and add up
            its gradient; gather: the same of an input that is saved whole; rows: they add up what
            it makes.
        width: channels of what travels.
        low_precision: it travels as the product multiplies it.
        again: the parts under whose recomputation the input is gathered once more.
        beside_product: parts of it travel while others are multiplied (Wang et al. 2023, ASPLOS,
            "Overlap communication with dependent computation via decomposition").
    """

    kind: Literal["columns", "gather", "rows"]
    width: int
    low_precision: bool = False
    again: frozenset[str] = frozenset()
    beside_product: bool = True


class MatrixProduct(NamedTuple):
    """Tokens x `inner` by `inner` x `out`, and both gradients.

    Attributes:
        inner: channels of a token, which are multiplied and added up.
        out: channels of the result; several where several matrices read the same input at once.
        tokens: whose.
        low_precision: recipes of few bits round its operands; else it keeps the format of the rest.
    """

    inner: Width
    out: tuple[Width, ...]
    tokens: Tokens = "gathered"
    low_precision: bool = True


class AttentionCore(NamedTuple):
    """Scores of queries and keys, their softmax, and the values that it selects.

    Attributes:
        heads, kv_heads: how many.
        query: channels of a query or key.
        value: channels of a value.
    """

    heads: Width
    kv_heads: Width
    query: int
    value: int


class MemoryBound(NamedTuple):
    """Passes over a tensor that are limited by memory.

    Attributes:
        widths: elements per token.
        forward, backward: how often they are read or written.
        kernels: how many of them do it.
        fused_kernels: the same in programs with kernels of their own for it; 0 is no other number.
        tokens: whose.
        unfused: how often more backward does it where nothing is fused.
        drops: dropout, where there is any, comes with it.
        element: bytes of an element.
    """

    widths: tuple[Width, ...]
    forward: float
    backward: float
    kernels: int = 1
    tokens: Tokens = "gathered"
    fused_kernels: int = 0
    unfused: float = 0.0
    drops: bool = False
    element: int = 2


class CrossEntropy(NamedTuple):
    """The loss of every token, and the gradient of its logits."""

    vocabulary: Width


Computation = MatrixProduct | AttentionCore | MemoryBound | CrossEntropy


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of a block.

    Attributes:
        name: what it is called in a list of kernels.
        computes: what.
        part: what recomputation repeats it alone with.
        is_last: nothing in the backward of its own block reads what it makes.
        parameters: those that it has.
        saves: what it reads in backward.
        boundary: how tensor-parallel ranks meet there.
        scaled: in low precision, how many matrices multiply each of the inputs that get scales.
    """

    name: str
    computes: Computation
    part: Part = "block"
    is_last: bool = False
    parameters: tuple[Parameter, ...] = ()
    saves: tuple[SavedTensor, ...] = ()
    boundary: Boundary | None = None
    scaled: tuple[int, ...] = ()


Operators = tuple[Operator, ...]


class BlockOperators(NamedTuple):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: Operators
    mlp: Operators

    @property
    def all(self) -> Operators:
        """Both branches."""
        return self.attention + self.mlp


@dataclass(frozen=True)
class ModelOperators:
    """The operators of a model, each kind of unit once.

    Attributes:
        embedding, head: its ends.
        dense: of a block with an MLP.
        routed: of a block with experts.
    """

    embedding: Operators
    dense: BlockOperators
    routed: BlockOperators
    head: Operators

    def of(self, unit: UnitName) -> Operators:
        """Those of one kind of unit."""
        units = {
            "embedding": self.embedding,
            "dense block": self.dense.all,
            "routed block": self.routed.all,
            "head": self.head,
        }
        return units[unit]

    def block(self, *, routed: bool) -> BlockOperators:
        """Those of a block, with experts or without."""
        return self.routed if routed else self.dense


UNITS: tuple[UnitName, ...] = ("embedding", "dense block", "routed block", "head")
