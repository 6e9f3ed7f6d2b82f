"""Products looked at now and then: what a matrix product came to must agree with a checksum of it.

For a vector r of random signs, r (a b^T) = (r a) b^T, and the right side costs two products of a
matrix with a vector. Rounding moves an element y_ij of the product by no more than
e_ij = u |y_ij| + v |a_i| |b_j|, with u the unit roundoff of its format and v that of a sum of k
terms; so r e stays below `SIGMAS` |e_j| but for one in 10^31 draws of the signs (Hoeffding 1963).
What is larger is no rounding. In fp32 that finds a flip of the sign, of the exponent and of the
upper bits of one element; in bf16 one that moves it by about its own size or more.

Source: Huang and Abraham 1984, "Algorithm-based fault tolerance for matrix operations".
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.trainer import faults
from phalanx.trainer.precision.product import Operand, Plain

SIGMAS = 12.0
_ROWS = 1024  # that are widened to fp64 at a time
_SPLIT_SUMS = 8  # roundings of partial sums, where a GPU adds them up in the format of the result


class ProductSampler:
    """Chooses one product in every so many steps of this rank, and remembers how it came out.

    Attributes:
        every: steps between two that have one looked at; 0 looks at none.
    """

    def __init__(self, every: int = 0, seed: int = 0) -> None:
        """Look at nothing yet.

        Args:
            every: steps.
            seed: of what is chosen, and of the signs.
        """
        self.every = every
        self._at = -1
        self._seen = 0
        self._all = False
        self._dice = random.Random(seed)
        self._signs = torch.Generator().manual_seed(seed)
        self._looks: list[tuple[str, Tensor]] = []

    def begin_step(self, step: int) -> None:
        """Choose one of as many products as the step before had, if it is the turn of this one.

        Args:
            step: from 0.
        """
        count, self._seen = self._seen, 0
        due = self.every > 0 and step % self.every == 0 and count > 0
        self._at = self._dice.randrange(count) if due else -1

    @contextmanager
    def looking_at_all(self) -> Iterator[None]:
        """Inside, every product is looked at."""
        self._all = True
        try:
            yield
        finally:
            self._all = False

    def takes(self) -> bool:
        """Whether the product that has just been computed is one that is looked at."""
        self._seen += 1
        return self._all or self._seen - 1 == self._at

    def look(self, name: str, y: Tensor, a: Tensor, b: Tensor) -> None:
        """Note how far y is from a b^T, as a share of what rounding may explain.

        Args:
            name: of the product.
            y: [..., n], as it was computed.
            a: [..., k].
            b: [n, k].
        """
        faults.point("product", tensors=lambda: {f"product:{name}": y})
        self._looks.append((name, excess(y.flatten(0, -2), a.flatten(0, -2), b, self._signs)))

    def found(self) -> str:
        """What was wrong since the last call, in words; empty where nothing was."""
        looks, self._looks = self._looks, []
        if not looks:
            return ""
        shares = torch.stack([share for _, share in looks]).tolist()
        for (name, _), share in zip(looks, shares, strict=True):
            if share > 1:
                return f"{name} differs from its checksum by {share:.3g} times what rounding allows"
        return ""


def excess(y: Tensor, a: Tensor, b: Tensor, signs: torch.Generator) -> Tensor:
    """How far y is from a b^T in its worst column, over what rounding may explain.

    Args:
        y: [N, n], as it was computed.
        a: [N, k].
        b: [n, k].
        signs: draws those that the rows are added up with.

    Returns:
        fp64 [], on the device of y; nan where something is not finite.
    """
    k = a.shape[1]
    r = torch.randint(0, 2, (len(y), 1), generator=signs).to(y.device, torch.float64) * 2 - 1
    mine, theirs = y.new_zeros(y.shape[1], dtype=torch.float64), r.new_zeros(k)
    squares, norm = torch.zeros_like(mine), r.new_zeros(())
    for rows in range(0, len(y), _ROWS):
        part = slice(rows, rows + _ROWS)
        wide, operand = y[part].double(), a[part].double()
        mine += (wide * r[part]).sum(0)
        theirs += (operand * r[part]).sum(0)
        squares += wide.square().sum(0)
        norm += operand.square().sum()
    other = b.double()
    unit, of_sum = _units(y, k)
    bound = 2 * (unit**2 * squares + of_sum**2 * norm * other.square().sum(1))
    tiny = torch.finfo(torch.float64).tiny
    return ((mine - other @ theirs).square() / (SIGMAS**2 * bound + tiny)).max().sqrt()


def _units(y: Tensor, k: int) -> tuple[float, float]:
    """The unit roundoff of what y is kept in, and that of a sum of k terms."""
    unit = torch.finfo(y.dtype).eps / 2
    of_sum = k * min(unit, torch.finfo(torch.float32).eps / 2)
    if y.device.type != "cpu":
        of_sum = max(of_sum, _SPLIT_SUMS * unit)
    return unit, of_sum


class SampledPlain(Plain):
    """As `Plain`, and a sampler looks at a product now and then."""

    def __init__(self, name: str, sampler: ProductSampler) -> None:
        """Multiply for one projection.

        Args:
            name: of it.
            sampler: of this rank.
        """
        self._name, self._sampler = name, sampler

    def forward(self, x: Operand, w: Operand) -> Tensor:
        """As `Plain.forward`.

        Args:
            x: [..., n_in].
            w: [n_out, n_in].
        """
        y = super().forward(x, w)
        if self._sampler.takes():
            self._sampler.look(f"the product of {self._name}", y, x.data, w.data)
        return y

    def input_gradient(self, g: Operand, w: Operand) -> Tensor:
        """As `Plain.input_gradient`.

        Args:
            g: [tokens, n_out].
            w: [n_out, n_in].
        """
        y = super().input_gradient(g, w)
        if self._sampler.takes():
            self._sampler.look(f"the input gradient of {self._name}", y, g.data, w.data.t())
        return y

    def weight_gradient(self, g: Operand, x: Operand) -> Tensor:
        """As `Plain.weight_gradient`.

        Args:
            g: [tokens, n_out].
            x: [..., n_in].
        """
        y = super().weight_gradient(g, x)
        if self._sampler.takes():
            rows = x.data.flatten(0, -2)
            self._sampler.look(f"the weight gradient of {self._name}", y, g.data.t(), rows.t())
        return y
