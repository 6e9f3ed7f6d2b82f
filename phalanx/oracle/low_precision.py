"""Products in low precision from their definitions alone, for the reference: slow, in fp64.

It shares nothing with `trainer/precision/`. What a scale belongs to is part of a recipe. A tensor
is what one micro-batch of `mb` sequences brings to a product, whole: all its tokens in order of
(position, sequence), all its channels. Matrices are whole too, whatever tp cuts.

    recipe        inputs, matrices   gradients   one scale for each
    fp8           E4M3               E5M2        tensor, from the largest values of 1,024 steps
    fp8-current   E4M3               E5M2        tensor
    fp8-block     E4M3               E4M3        128 of a row; 128 x 128 of a matrix
    mxfp8         E4M3               E4M3        32 along the inner dim
    nvfp4         E2M1               E2M1        16 of a row, 16 x 16 of a matrix; and the tensor

The weight gradient's inner dim is the tokens. It reads the inputs of fp8-block and mxfp8 as the
forward pass rounded them, rounded once more along tokens.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.trainer.ops.autograd import apply


class _Bits(NamedTuple):
    """A format: bits of the fraction, exponent of the smallest normal number, largest number."""

    fraction: int
    least: int
    largest: float

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest number to each of x as fp32 holds it, ties to even."""
        x = x.float().double()
        exponent = (torch.frexp(x)[1] - 1).clamp(min=self.least)
        spacing = 2.0 ** (exponent - self.fraction)
        return ((x / spacing).round() * spacing).clamp(-self.largest, self.largest)


_E4M3 = _Bits(3, -6, 448.0)
_E5M2 = _Bits(2, -14, 57344.0)
_E2M1 = _Bits(1, 0, 6.0)


class Emulation:
    """Every product of a run in one recipe.

    Attributes:
        recipe: its name; empty multiplies as torch does.
        mb: sequences of a micro-batch.
        amaxes: of delayed scaling: the largest values of past steps, by tensor, newest last.
    """

    def __init__(self, recipe: str, mb: int) -> None:
        self.recipe, self.mb = recipe, mb
        self.amaxes: dict[str, list[float]] = defaultdict(list)
        self._seen: dict[str, float] = defaultdict(float)

    def linear(self, x: Tensor, w: Tensor, name: str) -> Tensor:
        """Compute x w^T, and its gradients.

        Args:
            x: [b, s, n_in]; every mb sequences in a row are a micro-batch.
            w: [n_out, n_in], whole.
            name: of the projection; delayed scaling remembers the largest values by it.

        Returns:
            [b, s, n_out], in the dtype of x.
        """
        if not self.recipe:
            return F.linear(x, w)
        return cast(Tensor, apply(_Linear, x, w, self, name))

    def end_step(self) -> None:
        """Let the next step know the largest values of this one."""
        for tensor, amax in self._seen.items():
            self.amaxes[tensor] = [*self.amaxes[tensor], amax][-1024:]
        self._seen.clear()

    def whole(self, x: Tensor, bits: _Bits, tensor: str) -> Tensor:
        """Rounded with one scale: from the largest value of x, or of past steps in delayed scaling.

        Args:
            x: a matrix of any size.
            bits: the format.
            tensor: what it is called where its largest values are remembered.

        Returns:
            fp64, of the shape of x: numbers of the format times the scale. In delayed scaling x
            itself, until a first step has ended.
        """
        amax = x.abs().max().float()
        if self.recipe == "fp8":
            self._seen[tensor] = max(self._seen[tensor], amax.item())
            if not self.amaxes[tensor]:
                return x
            amax = torch.tensor(max(self.amaxes[tensor]))
        scale = (amax / bits.largest).double() if amax else torch.ones(())
        return bits.nearest(x / scale) * scale

    def operands(self, x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is multiplied for x and w, by the recipe.

        Args:
            x: [mb s, n_in], the tokens of one micro-batch.
            w: [n_out, n_in].
            name: of the projection.

        Returns:
            x and w of the forward, w of the input gradient, and x of the weight gradient.
        """
        match self.recipe:
            case "fp8" | "fp8-current":
                x, w = self.whole(x, _E4M3, f"{name}/x"), self.whole(w, _E4M3, f"{name}/w")
                return x, w, w, x
            case "fp8-block":
                rows, squares = _tiles(x, 1, 128, _shifted), _tiles(w, 128, 128, _shifted)
                return rows, squares, squares, _tiles(rows, 128, 1, _shifted)
            case "mxfp8":
                rows = _tiles(x, 1, 32, _shifted)
                along_in, along_out = _tiles(w, 1, 32, _shifted), _tiles(w, 32, 1, _shifted)
                return rows, along_in, along_out, _tiles(rows, 32, 1, _shifted)
            case _:
                squares = _tiles(w, 16, 16, _in_four_bits(w))
                four = _in_four_bits(x)
                return _tiles(x, 1, 16, four), squares, squares, _tiles(x, 16, 1, four)

    def gradients(self, g: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """What is multiplied for the gradient of a projection's output, by the recipe.

        Args:
            g: [mb s, n_out], the tokens of one micro-batch.
            name: of the projection.

        Returns:
            g of the input gradient, and g of the weight gradient.
        """
        match self.recipe:
            case "fp8" | "fp8-current":
                g = self.whole(g, _E5M2, f"{name}/g")
                return g, g
            case "fp8-block":
                return _tiles(g, 1, 128, _shifted), _tiles(g, 128, 1, _shifted)
            case "mxfp8":
                return _tiles(g, 1, 32, _shifted), _tiles(g, 32, 1, _shifted)
            case _:
                four = _in_four_bits(g)
                return _tiles(g, 1, 16, four), _tiles(g, 16, 1, four)


Rounding = Callable[[Tensor, Tensor], Tensor]  # of tiles, by the largest value of each


def _tiles(x: Tensor, rows: int, columns: int, rounding: Rounding) -> Tensor:
    """Round a matrix tile by tile; tiles at its edges are smaller."""
    n, m = x.shape
    padded = F.pad(x.double(), (0, -m % columns, 0, -n % rows))
    tiles = padded.view(-(-n // rows), rows, -(-m // columns), columns)
    done = rounding(tiles, tiles.abs().amax((1, 3), keepdim=True).float())
    return done.reshape(padded.shape)[:n, :m]


def _shifted(tiles: Tensor, amax: Tensor) -> Tensor:
    """To E4M3, by the smallest power of two that lets nothing saturate."""
    share = (amax / _E4M3.largest).double()
    scale = torch.where(share > 0, 2.0 ** share.log2().ceil(), 1.0)
    return _E4M3.nearest(tiles / scale) * scale


def _in_four_bits(whole: Tensor) -> Rounding:
    """To E2M1, by an E4M3 scale that is itself scaled to the largest value of the tensor."""
    amax = whole.abs().max().float()
    of_all = amax / (6.0 * 448.0) if amax else torch.ones(())

    def rounding(tiles: Tensor, amax: Tensor) -> Tensor:
        scale = _E4M3.nearest(amax / 6.0 / of_all) * of_all.double()
        numbers = _E2M1.nearest(tiles / torch.where(scale == 0, 1.0, scale))
        return torch.where(scale == 0, 0.0, numbers * scale)

    return rounding


class _Linear(torch.autograd.Function):
    """One projection, micro-batch by micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, emulation: Emulation, name: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.emulation, ctx.name = emulation, name
        results = []
        for part in x.split(emulation.mb):
            rows, matrix, _, _ = emulation.operands(_in_order(part), w, name)
            results.append(_back(rows.double() @ matrix.double().t(), part))
        return torch.cat(results).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        emulation: Emulation = ctx.emulation
        dw, dx = torch.zeros(w.shape, dtype=torch.float64), []
        for part, grad in zip(x.split(emulation.mb), grads[0].split(emulation.mb), strict=True):
            _, _, matrix, columns = emulation.operands(_in_order(part), w, ctx.name)
            for_input, for_weight = emulation.gradients(_in_order(grad), ctx.name)
            dx.append(_back(for_input.double() @ matrix.double(), part))
            dw += for_weight.double().t() @ columns.double()
        return torch.cat(dx).to(x.dtype), dw.to(w.dtype), None, None


def _in_order(x: Tensor) -> Tensor:
    """The tokens of a micro-batch by position, then sequence: [mb, s, n] to [s mb, n]."""
    return x.transpose(0, 1).flatten(0, 1)


def _back(y: Tensor, like: Tensor) -> Tensor:
    return y.view(like.shape[1], like.shape[0], -1).transpose(0, 1)
