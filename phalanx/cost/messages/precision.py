"""Low precision: the largest values that ranks tell each other. Its twin is trainer/precision/.

Sends, for scales that belong to more than one rank's part of a tensor:

    recipe        when                                 over
    fp8           once a step, all of them             tp; dp and cp; pp replicas (DualPipe)
    fp8-current   at every product, one number each    tp, cp: where the tensor is cut
    nvfp4         the same                             tp, cp
    fp8-block, mxfp8: nothing, their scales are a rank's own

What the inputs of products take on their way stands in `cost.precision.operand_bytes`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from phalanx.core.message import Axis
from phalanx.core.operator import UNITS, MatrixProduct, Operator, UnitName
from phalanx.cost.messages.unit import Among, Pass, Setting, UnitMessage
from phalanx.cost.table import Booleans, Integers

AMAX = 4  # bytes of a largest value
KINDS = 3  # of tensors of a projection: input, matrix, gradient of the output


def messages(setting: Setting) -> Iterator[UnitMessage]:
    """What the products of each block send, once their scales are calibrated."""
    match setting.table.precision.recipe:
        case "fp8":
            yield from _delayed(setting)
        case "fp8-current" | "nvfp4":
            yield from _current(setting)


def _delayed(setting: Setting) -> Iterator[UnitMessage]:
    """The largest values of a whole step, for the scales of the next."""
    table = setting.table
    kinds: tuple[tuple[Axis, Among, Booleans], ...] = (
        ("tensor", "tp", table.tp > 1),
        ("data", "dp", table.dp * table.cp > 1),
        ("pipeline", "pp replicas", setting.held.copies > 1),
    )
    for unit in UNITS:
        matrices = sum(sum(operator.scaled) for operator in setting.model.of(unit))
        for axis, among, rows in kinds:
            yield UnitMessage(
                axis=axis,
                among=among,
                collective="all_reduce",
                purpose="amax",
                bytes=np.full_like(table.tp, AMAX * KINDS * matrices),
                times=np.where(rows, 1, 0) * (matrices > 0),
                when="step",
                unit=unit,
                together=True,
            )


class _Times(NamedTuple):
    """Messages around the products of one input, in forward and backward."""

    forward: Integers
    backward: Integers


def _current(setting: Setting) -> Iterator[UnitMessage]:
    """The largest value of each tensor that is cut, as it comes."""
    table = setting.table
    one = np.ones_like(table.tp)
    for unit in UNITS:
        for operator in setting.model.of(unit):
            for matrices in operator.scaled:
                over_tp = _over_tp(operator, matrices, table.sp * one)
                yield from _each(setting, unit, ("tensor", "tp", table.tp > 1), over_tp)
                over_cp = _Times(one, matrices * one)
                yield from _each(setting, unit, ("context", "cp", table.cp > 1), over_cp)


def _each(
    setting: Setting, unit: UnitName, over: tuple[Axis, Among, Booleans], times: _Times
) -> Iterator[UnitMessage]:
    """One number for each message, in all passes."""
    axis, among, rows = over
    passes: tuple[tuple[Pass, Integers], ...] = (
        ("forward", times.forward),
        ("recompute", times.forward * setting.by_segment),
        ("input gradient", times.backward),
    )
    for when, count in passes:
        yield UnitMessage(
            axis=axis,
            among=among,
            collective="all_reduce",
            purpose="amax",
            bytes=np.full_like(count, AMAX),
            times=np.where(rows, count, 0),
            when=when,
            unit=unit,
        )


def _over_tp(operator: Operator, matrices: int, sp: Integers) -> _Times:
    """Of an input and its matrices, those that are cut, and of gradients of outputs."""
    computes = operator.computes
    if isinstance(computes, MatrixProduct) and computes.inner.cut:
        return _Times(matrices + np.ones_like(sp), np.zeros_like(sp))
    if isinstance(computes, MatrixProduct) and any(width.cut for width in computes.out):
        return _Times(matrices + sp, matrices * np.ones_like(sp))
    return _Times(sp, matrices * sp)
