"""The update: one global norm, clipping, and AdamW on this rank's part of the master weights."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.core.run import Recipe
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.data import ShardedUnit
from phalanx.trainer.precision.fused import FusedAdamW
from phalanx.trainer.precision.narrow import MOMENT_DTYPES, NarrowAdamW, Stretch

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW or SGD over the stretches of master weights that this rank keeps.

    Weight decay is decoupled (Loshchilov and Hutter 2017, arXiv:1711.05101) and applies to
    matrices only.

    Attributes:
        updates: how often the weights have moved; the learning rate follows it, so that a
            skipped step does not advance the schedule.
        updates_per_step: how many of them have the learning rate of one step.
        of: the optimizer of each unit.
    """

    def __init__(
        self, recipe: Recipe, units: Sequence[ShardedUnit], updates_per_step: int = 1
    ) -> None:
        self.recipe = recipe
        self.updates = 0
        self.updates_per_step = updates_per_step
        self.units = list(units)
        self.of = {sharded: UnitOptimizer(recipe, sharded) for sharded in self.units}

    @property
    def learning_rate(self) -> float:
        """What the next update will use."""
        return self.recipe.learning_rate_at(self.updates // self.updates_per_step)

    def step(self) -> None:
        """Move the master weights, and let every rank know the new ones.

        Unit by unit: while one is updated, the new weights of the one before are on their way, and
        what lives elsewhere is fetched one unit ahead.
        """
        for unit, following in zip(self.units, [*self.units[1:], None], strict=True):
            if following is not None:
                self.of[following].expect()
            self.of[unit].move(self.learning_rate)
            unit.all_gather_weights()
            self.of[unit].rest()
        self.updates += 1

    def attempt(self) -> Callable[[], None]:
        """Move the master weights before it is known whether they should, and tell no other rank.

        The paper reverses the arithmetic of the update; copies of weights and moments cost memory
        instead, and bring back the same bits.

        Returns:
            What rolls it back. Else `confirm` has to follow.

        Source: Qi et al. 2024 (arXiv:2401.10241), section 4.
        """
        undo = [of.remember() for of in self.of.values()]
        for of in self.of.values():
            of.move(self.learning_rate)

        def roll_back() -> None:
            for one in undo:
                one()

        return roll_back

    def confirm(self) -> None:
        """The master weights stay as they moved: let every rank know."""
        self.updates += 1
        for unit in self.units:
            unit.all_gather_weights()

    def moments(self, unit: Unit) -> dict[str, Tensor]:
        """The optimizer's state of one unit, each as long as `unit.master`; empty for SGD."""
        return next(of.moments for sharded, of in self.of.items() if sharded.unit is unit)

    def no_moments(self, unit: Unit) -> dict[str, Tensor]:
        """The state of one unit before the first update."""
        dtype = MOMENT_DTYPES[self.recipe.moments] or unit.grad.dtype
        return {name: torch.zeros_like(unit.grad, dtype=dtype) for name in MOMENTS}

    def restore(self, unit: Unit, moments: dict[str, Tensor]) -> None:
        """Set the state of one unit, as `moments` gave it after `updates` updates.

        Args:
            unit: of this rank.
            moments: by name, each as long as `unit.master`; they are copied. Without any, the state
                counts as that of no update.
        """
        of = next(of for sharded, of in self.of.items() if sharded.unit is unit)
        for name, values in moments.items():
            of.moments[name].copy_(values)
        of.count(self.updates if moments else 0)


class UnitOptimizer:
    """The optimizer of one unit, whose state lives where its master weights do.

    Attributes:
        moments: by name, each like `unit.master`; none for SGD.
        torch: does the arithmetic; None where a rank has only padding.
    """

    def __init__(self, recipe: Recipe, sharded: ShardedUnit) -> None:
        unit, self.memory = sharded.unit, sharded.memory
        self.unit, self.moments = unit, dict[str, Tensor]()
        if recipe.optimizer != "sgd":
            dtype = MOMENT_DTYPES[recipe.moments] or unit.grad.dtype
            self.moments = {name: self.memory.zeros(len(unit.master), dtype) for name in MOMENTS}
        self._stretches = [
            Stretch(unit, start, stop, unit.master[start:stop], decays)
            for start, stop, decays in unit.optimizer_ranges()
        ]
        wide = (recipe.master_weights, recipe.moments) == ("fp32", "fp32")
        make = _wide if wide else NarrowAdamW
        self.torch = make(recipe, self._stretches) if self._stretches else None
        self.count(0)

    def count(self, updates: int) -> None:
        """Let torch know our moments, and how many updates made them."""
        if self.torch is None or not self.moments:
            return
        for _, start, stop, part, _ in self._stretches:
            state = {name: values[start:stop] for name, values in self.moments.items()}
            steps = torch.tensor(float(updates), device=part.device)
            self.torch.state[part] = {"step": steps, **state}

    def move(self, rate: float) -> None:
        """Move the master weights of this unit."""
        if self.torch is not None:
            for group in self.torch.param_groups:
                group["lr"] = rate
            self.torch.step()

    def remember(self) -> Callable[[], None]:
        """Copy weights and state; calling the result brings back the same bits."""
        now = [self.unit.master, *self.moments.values()]
        state = self.torch.state.values() if self.torch is not None else ()
        now += [x["step"] for x in state if "step" in x]
        before = [x.clone() for x in now]

        def roll_back() -> None:
            for x, was in zip(now, before, strict=True):
                x.copy_(was)

        return roll_back

    def expect(self) -> None:
        """The unit comes next."""
        self.memory.expect(self.unit.master, self.unit.grad, *self.moments.values())

    def rest(self) -> None:
        """The unit is done."""
        self.memory.rest(self.unit.master, self.unit.grad, *self.moments.values())


def _wide(recipe: Recipe, stretches: Sequence[Stretch]) -> "torch.optim.Optimizer | FusedAdamW":
    if recipe.optimizer != "sgd":
        return FusedAdamW(recipe, stretches)
    groups: dict[bool, list[Tensor]] = {False: [], True: []}
    for stretch in stretches:
        stretch.part.grad = stretch.grad
        groups[stretch.decays].append(stretch.part)
    params = [
        {"params": parts, "weight_decay": recipe.weight_decay if decays else 0.0}
        for decays, parts in groups.items()
        if parts
    ]
    return torch.optim.SGD(params, lr=recipe.learning_rate)


PendingScalar = Callable[[], float]  # a number on its way; calling it waits until it is here


def global_norm(units: Sequence[ShardedUnit], world: Group, kind: float) -> float:
    """Norm of the gradient of the whole model, each element counted once; the same on every rank.

    Args:
        units: of this rank, their gradients reduced.
        world: all ranks.
        kind: 2, or inf for the largest element.
    """
    return pending_norm(units, world, kind)[1]()


def pending_norm(
    units: Sequence[ShardedUnit], world: Group, kind: float
) -> tuple[float, PendingScalar]:
    """This rank's share of the global norm, and the norm itself, on its way.

    Args:
        units: of this rank, at least one, their gradients reduced.
        world: all ranks; each of them calls this.
        kind: 2, or inf for the largest element.

    Returns:
        Both before clipping; inf where an element is nan or infinite.
    """
    norms = [
        torch.linalg.vector_norm(grad[mine.start : mine.stop], kind).double()
        for u in units
        for grad in u.gradients()
        for mine in u.unit.own_ranges()
    ]
    device = units[0].unit.grad.device
    total = torch.zeros(1, dtype=torch.float64, device=device)
    if norms and math.isinf(kind):
        total += torch.stack(norms).amax()
    elif norms:
        total += torch.stack(norms).square().sum()
    total.nan_to_num_(nan=math.inf, posinf=math.inf)  # a maximum of messages may lose a nan

    def norm() -> float:
        return total.item() if math.isinf(kind) else math.sqrt(total.item())

    share = norm()
    pending = world.all_reduce(total, "gradient norm", largest=math.isinf(kind))

    def arrived() -> float:
        pending.wait()
        return norm()

    return share, arrived


def clip(units: Sequence[ShardedUnit], norm: float, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`; 0 clips nothing.

    Source: Pascanu et al. 2012 (arXiv:1211.5063), section 3.2.

    Args:
        units: of this rank; their reduced gradients are changed in place.
        norm: of the gradient of the whole model, finite.
        limit: the largest norm that stays.
    """
    if limit and norm > limit:
        for unit in units:
            for grad in unit.gradients():
                grad.mul_(limit / norm)
