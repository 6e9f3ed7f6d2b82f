"""What a checkpoint holds of a run, and how a run takes it up again under any layout."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.trainer.checkpoint import Checkpoint, Piece
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.engine.optimizer import Optimizer
from phalanx.trainer.engine.unit import Slot, Unit
from phalanx.trainer.precision.history import KINDS, LENGTH

AMAX = "amax"


def progress(engine: Engine, step: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is not a tensor: how far the run is, and what decides what comes next.

    The sample order, dropout and initial weights are functions of the seed and the step, so no
    generator's state has to be kept.

    Args:
        engine: of rank 0.
        step: how many are done.
        identity: what decides which tokens come next (see continuity.py).
    """
    return {
        **identity,
        "step": step,
        "updates": engine.optimizer.updates,
        "amax_steps": engine.arithmetic.history.steps,
        "loss_scale": [engine.loss_scale.value, engine.loss_scale.clean],
        "spikes": engine.spikes.state(),
        "layout": str(engine.run.layout),
    }


def own_pieces(engine: Engine) -> list[Piece]:
    """What this rank saves: over all ranks, each element of each tensor once."""
    pieces: list[Piece] = []
    for sharded in engine.units:
        unit = sharded.unit
        fields = {"weight": unit.master, **engine.optimizer.moments(unit)}
        for slot, start, stop in unit.own_pieces():
            pieces += _pieces(unit, slot, (start, stop), fields)
    mesh = engine.mesh
    first = mesh.data.index == mesh.tensor.index == mesh.pipeline_replicas.index == 0
    return [*pieces, *_biases(engine), *_amaxes(engine)] if first else pieces


def named_tensors(engine: Engine) -> dict[str, Tensor]:
    """What this rank saves, by `field:name`; views, so that what is written there takes effect."""
    return {f"{piece.field}:{piece.name}": piece.data for piece in own_pieces(engine)}


def _biases(engine: Engine) -> Iterator[Piece]:
    """What evens out the load of experts: whole on every rank that has the layer."""
    for router in engine.balancer.routers:
        shape = tuple(router.bias.shape)
        yield Piece(
            name=f"{router.prefix}.bias",
            field="weight",
            shape=shape,
            offsets=(0,),
            sizes=shape,
            start=0,
            stop=shape[0],
            data=router.bias,
        )


def _amaxes(engine: Engine) -> Iterator[Piece]:
    """What delayed scaling remembers: the same on the ranks that share a stage."""
    history = engine.arithmetic.history
    for name in history.names:
        yield _amax_piece(name, history.of_name(name).flatten())


def _amax_piece(name: str, data: Tensor) -> Piece:
    shape = (LENGTH, len(KINDS))
    return Piece(f"{name}.weight", AMAX, shape, (0, 0), shape, 0, len(data), data)


def restore(engine: Engine, checkpoint: Checkpoint) -> int:
    """Take up a checkpoint: weights, optimizer state, how far it was.

    Args:
        engine: of this rank, which takes it up in place; each rank of the mesh calls this.
        checkpoint: open; any layout may have written it.

    Returns:
        The step to go on with.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """
    state = checkpoint.state
    engine.optimizer.updates = int(state["updates"])
    if engine.loss_scale.dynamic and "loss_scale" in state:
        engine.loss_scale.value, engine.loss_scale.clean = state["loss_scale"]
    engine.spikes.restore(state.get("spikes", {}))
    _restore_amaxes(engine, checkpoint)
    for sharded in engine.units:
        unit = sharded.unit
        moments = _saved_moments(checkpoint, engine.optimizer, unit)
        checkpoint.read(_wanted(unit, {"weight": unit.master, **moments}))
        engine.optimizer.restore(unit, moments)
        sharded.all_gather_weights()
    checkpoint.read(_biases(engine))
    return int(state["step"])


def _restore_amaxes(engine: Engine, checkpoint: Checkpoint) -> None:
    """Go on with the scales of a run; one that had others, or none, calibrates first."""
    history = engine.arithmetic.history
    if not all(AMAX in checkpoint.fields(f"{name}.weight") for name in history.names):
        return
    for name in history.names:
        data = torch.empty(LENGTH * len(KINDS), device=engine.mesh.device)
        checkpoint.read([_amax_piece(name, data)])
        history.of_name(name).copy_(data.view(LENGTH, -1))
    history.take_up(int(checkpoint.state.get("amax_steps", 0)))


def _saved_moments(checkpoint: Checkpoint, optimizer: Optimizer, unit: Unit) -> dict[str, Tensor]:
    saved = checkpoint.fields(unit.slots[0].declaration.name)
    return {name: m for name, m in optimizer.no_moments(unit).items() if name in saved}


def _wanted(unit: Unit, fields: dict[str, Tensor]) -> Iterator[Piece]:
    for slot, start, stop in unit.pieces(unit.low, unit.high):
        yield from _pieces(unit, slot, (start, stop), fields)


def _pieces(
    unit: Unit, slot: Slot, span: tuple[int, int], fields: dict[str, Tensor]
) -> Iterator[Piece]:
    """One stretch of the unit's vector in every field; the data are views."""
    start, stop = span
    for field, values in fields.items():
        yield Piece(
            name=slot.declaration.name,
            field=field,
            shape=slot.declaration.shape,
            offsets=slot.box.offsets,
            sizes=slot.box.sizes,
            start=start - slot.start,
            stop=stop - slot.start,
            data=values[start - unit.low : stop - unit.low],
        )
