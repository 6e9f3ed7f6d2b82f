"""The update: one global norm, clipping, and AdamW on this rank's part of the master weights."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.core.run import Recipe
from phalanx.train.comm import Group
from phalanx.train.parallel.data import ShardedUnit
from phalanx.train.precision.narrow import MOMENT_DTYPES, NarrowAdamW, Stretch
from phalanx.train.unit import Unit

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW or SGD over the stretches of master weights that this rank keeps.

    Weight decay is decoupled (Loshchilov and Hutter 2017, arXiv:1711.05101) and applies to
    matrices only.

    Attributes:
        updates: how often the weights have moved; the learning rate follows it, so that a
            skipped step does not advance the schedule.
        updates_per_step: how many of them have the learning rate of one step.
    """

    def __init__(self, recipe: Recipe, units: Sequence[ShardedUnit]) -> None:
        self.recipe = recipe
        self.updates = 0
        self.updates_per_step = 1
        self.units = list(units)
        stretches = [
            Stretch(unit, start, stop, unit.master[start:stop], decays)
            for unit in (sharded.unit for sharded in self.units)
            for start, stop, decays in unit.optimizer_runs()
        ]
        self._parts = [stretch[:4] for stretch in stretches]
        wide = (recipe.master_weights, recipe.moments) == ("fp32", "fp32")
        self._torch = (_torch_optimizer if wide else NarrowAdamW)(recipe, stretches)

    @property
    def learning_rate(self) -> float:
        """What the next update will use."""
        return self.recipe.learning_rate_at(self.updates // self.updates_per_step)

    def step(self) -> None:
        """Move the master weights, and let every rank know the new ones."""
        self._move()
        self.confirm()

    def attempt(self) -> Callable[[], None]:
        """Move the master weights before it is known whether they should, and tell no other rank.

        The paper reverses the arithmetic of the update; copies of weights and moments cost memory
        instead, and bring back the same bits.

        Returns:
            What takes it back. Else `confirm` has to follow.

        Source: Qi et al. 2024 (arXiv:2401.10241), section 4.
        """
        parts = [part for _, _, _, part in self._parts]
        state = self._torch.state
        masters = [part.clone() for part in parts]
        states = [{k: v.clone() for k, v in state.get(part, {}).items()} for part in parts]
        self._move()

        def take_back() -> None:
            for part, master, before in zip(parts, masters, states, strict=True):
                part.copy_(master)
                state[part] = before

        return take_back

    def confirm(self) -> None:
        """The master weights stay as they moved: let every rank know."""
        self.updates += 1
        for unit in self.units:
            unit.publish()

    def _move(self) -> None:
        for group in self._torch.param_groups:
            group["lr"] = self.learning_rate
        self._torch.step()

    def moments(self, unit: Unit) -> dict[str, Tensor]:
        """The optimizer's state of one unit, each as long as `unit.master`; empty for SGD."""
        if self.recipe.optimizer == "sgd":
            return {}
        whole = self.no_moments(unit)
        for owner, start, stop, part in self._parts:
            if owner is unit and part in self._torch.state:
                for name in MOMENTS:
                    whole[name][start:stop] = self._torch.state[part][name]
        return whole

    def no_moments(self, unit: Unit) -> dict[str, Tensor]:
        """The state of one unit before the first update."""
        dtype = MOMENT_DTYPES[self.recipe.moments] or unit.grad.dtype
        return {name: torch.zeros_like(unit.grad, dtype=dtype) for name in MOMENTS}

    def restore(self, unit: Unit, moments: dict[str, Tensor]) -> None:
        """Set the state of one unit, as `moments` gave it after `updates` updates."""
        for owner, start, stop, part in self._parts:
            if owner is unit and moments:
                steps = torch.tensor(float(self.updates), device=part.device)
                state = {"step": steps}
                state |= {name: moments[name][start:stop].clone() for name in MOMENTS}
                self._torch.state[part] = state


def _torch_optimizer(recipe: Recipe, stretches: Sequence[Stretch]) -> torch.optim.Optimizer:
    groups: dict[bool, list[Tensor]] = {False: [], True: []}
    for stretch in stretches:
        stretch.part.grad = stretch.grad
        groups[stretch.decays].append(stretch.part)
    params = [
        {"params": parts, "weight_decay": recipe.weight_decay if decays else 0.0}
        for decays, parts in groups.items()
        if parts
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(params, lr=recipe.learning_rate)
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(
        params, lr=recipe.learning_rate, betas=betas, eps=recipe.eps, fused=True
    )


Late = Callable[[], float]  # a number on its way; calling it waits until it is here


def global_norm(units: Sequence[ShardedUnit], world: Group, kind: float) -> float:
    """Norm of the gradient of the whole model, each element counted once; the same on every rank.

    Args:
        units: of this rank, their gradients reduced.
        world: all ranks.
        kind: 2, or inf for the largest element.
    """
    return late_norm(units, world, kind)[1]()


def late_norm(units: Sequence[ShardedUnit], world: Group, kind: float) -> tuple[float, Late]:
    """This rank's share of the global norm, and the norm itself, on its way."""
    parts = [u.unit.grad[run.start : run.stop] for u in units for run in u.unit.own_runs()]
    norms = [torch.linalg.vector_norm(part, kind).double() for part in parts]
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
    """
    if limit and norm > limit:
        for unit in units:
            unit.unit.grad.mul_(limit / norm)
