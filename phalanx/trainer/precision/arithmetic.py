"""Chooses, when a run starts, how its projections multiply; and says so.

What always keeps the format of the rest: embedding, head, router, norms, attention (DeepSeek-AI
2024, arXiv:2412.19437, section 3.3.1). Master weights, accumulated gradients and their reduction
are fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.precision.blocks import Blocks
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.precision.history import AmaxHistory
from phalanx.trainer.precision.multiply import emulated, has_native_products, native
from phalanx.trainer.precision.nvfp4 import Nvfp4
from phalanx.trainer.precision.per_tensor import Current, PerTensor
from phalanx.trainer.precision.product import MatrixCut, Multiplier, Products, plain
from phalanx.trainer.precision.sampled import ProductSampler, SampledPlain

RECIPES = {
    "fp8": "FP8, delayed scaling",
    "fp8-current": "FP8, current scaling",
    "fp8-block": "FP8, a scale for each 1 x 128 or 128 x 128",
    "mxfp8": "MXFP8, a scale for each 32",
    "nvfp4": "NVFP4, a scale for each 16 and one for all",
}

_Groups = tuple[tuple[Group, ...], tuple[Group, ...], tuple[Group, ...]]


@dataclass(frozen=True)
class Arithmetic:
    """How the projections of one rank multiply.

    Attributes:
        products: for each of them.
        history: what delayed scaling remembers; empty in every other recipe.
        description: the choice, in a line for the user; empty where nothing was chosen.
        sampler: looks at products now and then; at none of a recipe of few bits.
    """

    products: Products
    history: AmaxHistory
    description: str
    sampler: ProductSampler = field(default_factory=ProductSampler)


def choose(precision: Dtypes, mesh: Mesh, sampled_every: int | None = None) -> Arithmetic:
    """What the run's precision asks for, by the kernels that this device has.

    Args:
        precision: says the recipe, and the dtype of results.
        mesh: the groups over which operands are cut and batches are spread, and the device.
        sampled_every: steps between two of which a product is held against its checksum; 0 for
            none unless it is asked for, None where it cannot be.
    """
    history = AmaxHistory([mesh.tensor, mesh.data, mesh.pipeline_replicas], mesh.device)
    if not precision.recipe:
        if sampled_every is None:
            return Arithmetic(plain, history, "")
        sampler = ProductSampler(sampled_every, seed=mesh.layout.rank_at(mesh.at))
        return Arithmetic(lambda name, _: SampledPlain(name, sampler), history, "", sampler)
    per_tensor = precision.recipe in ("fp8", "fp8-current")
    fast = per_tensor and has_native_products(mesh.device) and precision.rest != "fp64"
    multiply = native(precision.compute) if fast else emulated(precision.compute)
    parts = _Parts(mesh)
    makers: dict[str, Callable[[str, MatrixCut], Multiplier]] = {
        "fp8": lambda name, _: PerTensor(*history.of(name), multiply),
        "fp8-current": lambda _, cut: PerTensor(*_currents(parts.of(cut)), multiply),
        "fp8-block": lambda *_: Blocks(128, True, torch.float32, precision.compute),
        "mxfp8": lambda *_: Blocks(32, False, torch.float8_e8m0fnu, precision.compute),
        "nvfp4": lambda _, cut: Nvfp4(*parts.of(cut), precision.compute),
    }
    return Arithmetic(makers[precision.recipe], history, _describe(precision, native=fast))


def _currents(groups: _Groups) -> tuple[Current, Current, Current]:
    of_input, of_weight, of_gradient = groups
    return Current(of_input), Current(of_weight), Current(of_gradient)


def _describe(precision: Dtypes, *, native: bool) -> str:
    how = "by torch._scaled_mm" if native else "emulated exactly"
    return f"{RECIPES[precision.recipe]}, {how}; {precision.rest} elsewhere"


@dataclass(frozen=True)
class _Parts:
    """Over which ranks the operands of a projection are cut."""

    mesh: Mesh

    def of(self, cut: MatrixCut) -> _Groups:
        """For the input, the matrix and the output's gradient."""
        along_tp, along_cp = _several(self.mesh.tensor), _several(self.mesh.context)
        tokens = (*along_cp, *(along_tp if self.mesh.layout.sequence_parallel else ()))
        match cut:
            case "out":
                return tokens, along_tp, (*along_cp, *along_tp)
            case "in":
                return (*along_cp, *along_tp), along_tp, along_cp
            case "whole":
                return tokens, (), tokens


def _several(group: Group) -> tuple[Group, ...]:
    return (group,) if group.size > 1 else ()
