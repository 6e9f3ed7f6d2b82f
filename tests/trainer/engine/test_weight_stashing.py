"""PipeDream against its own definition: each stage goes ahead with weights of its own age."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import RefusedError
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.cost.messages import rank_messages
from phalanx.cost.refusals import refuse
from phalanx.data.batches import Stream
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.low_precision import Emulation
from phalanx.oracle.pool import RankPool
from phalanx.oracle.reference import _loss, _Model, _optimizer
from phalanx.oracle.verify import Case, verify
from phalanx.schedules.build import build
from phalanx.schedules.layouts import layers_of_stages, num_stages
from phalanx.schedules.pipedream import stashed_weights, weight_delays
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.pipedream import WeightStashing
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.model.init import init_source
from phalanx.trainer.model.inventory import declarations
from phalanx.trainer.parallel.mesh import build_mesh

Weights = dict[str, Tensor]
CPU = torch.device("cpu")


def stage_of(name: str, run: Run) -> int:
    """The stage that holds a parameter."""
    last = num_stages(run.layout) - 1
    if not name.startswith("blocks"):
        return 0 if name.startswith(("embedding", "positions")) else last
    layer, sizes = int(name.split(".")[1]), layers_of_stages(run.layout, run.model.layers)
    return next(s for s in range(last + 1) if layer < sum(sizes[: s + 1]))


class Simulation:
    """The definition, on one process: no pipeline, but every version of all weights."""

    def __init__(self, run: Run) -> None:
        self.run, source = run, init_source(run)
        self.declared = {d.name: d for d in declarations(run.model)}
        self.weights = {
            name: source(d, d.box()).double().requires_grad_() for name, d in self.declared.items()
        }
        self.optimizer = _optimizer(run.recipe, self.declared, self.weights)
        self.none = Emulation(None, run.layout.mb)

    def step(self, step: int, stream: Stream) -> float:
        """One update per micro-batch, each at weights as old as the rows of its stages say."""
        layout, m = self.run.layout, self.run.micro_batches
        delays = [weight_delays(row) for row in build("pipedream", layout.pp, m).rows]
        versions, losses = [self._now()], []
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.recipe.learning_rate_at(step)
        for i in range(m):
            used = {
                name: versions[i - delays[stage_of(name, self.run)][i]][name].requires_grad_()
                for name in self.declared
            }
            batch = stream.batch(step, list(self._samples(i)))
            loss, _ = _loss(
                _Model(self.run.model, self.run.recipe, used, step, self.none, {}), batch
            )
            grads = torch.autograd.grad(loss, list(used.values()))
            for weight, grad in zip(self.weights.values(), grads, strict=True):
                weight.grad = grad
            self.optimizer.step()
            versions.append(self._now())
            losses.append(loss.item())
        return sum(losses) / m

    def _now(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _samples(self, i: int) -> Iterator[int]:
        """Micro-batch i of every data-parallel rank."""
        layout, batch = self.run.layout, self.run.recipe.batch
        for dp in range(layout.dp):
            first = dp * batch // layout.dp + i * layout.mb
            yield from range(first, first + layout.mb)


def simulated(run: Run, steps: int) -> tuple[list[float], Weights]:
    """Losses and last weights of the definition."""
    simulation, stream = Simulation(run), Case(run).stream()
    losses = [simulation.step(step, stream) for step in range(steps)]
    return losses, simulation._now()


def trained(run: Run, steps: int) -> tuple[list[float], Weights, int, list[Message]]:
    """Losses, this rank's last weights, versions that it still stashes, and what it sent last."""
    engine = build_engine(run, build_mesh(run.layout, CPU))
    stream, losses = Case(run).stream(), []
    for step in range(steps):
        engine.mesh.ledger.clear()
        losses.append(train_step(engine, step, stream.batch(step, engine.positions())).loss)
    sent, weights = engine.mesh.ledger.messages(), {}
    for sharded in engine.units:
        sharded.acquire()
        for slot in sharded.unit.slots:
            values = sharded.unit.weights[slot.start : slot.stop]
            weights[slot.declaration.name] = values.view(slot.box.sizes).clone()
    assert isinstance(engine.rule, WeightStashing)
    return losses, weights, engine.rule.stashed, sent


def run_of(layout: str, *features: str) -> Run:
    return CaseSpec(f"{layout} schedule=pipedream", ("no-clip", *features)).case().run


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "features"),
    [
        ("pp=2", ()),
        ("pp=4 mb=2", ("gpt",)),
        ("pp=3 recompute=full", ("sgd",)),
        ("dp=2 pp=2 zero=1", ("odd",)),
        ("dp=2 pp=2 zero=0 mb=2", ()),
    ],
)
def test_updates_are_as_stale_as_the_definition_says(
    ranks: RankPool, layout: str, features: tuple[str, ...]
) -> None:
    run = run_of(layout, *features)
    (true,) = ranks.run(1, simulated, run, 2)
    for losses, weights, stashed, _ in ranks.run(run.layout.ranks, trained, run, 2):
        assert losses == pytest.approx(true[0], rel=1e-10)
        for name, mine in weights.items():
            torch.testing.assert_close(mine, true[1][name], rtol=1e-9, atol=1e-12)
        assert stashed == 0


@pytest.mark.ranks
def test_the_definition_is_not_the_update_of_one_device(ranks: RankPool) -> None:
    """So the comparison above would notice if the weights were never stale."""
    stale = run_of("pp=4 mb=2")
    fresh = replace(stale, layout=replace(stale.layout, pp=1))
    (one,), (other,) = (ranks.run(1, simulated, run, 1) for run in (stale, fresh))
    name = "blocks.0.mlp.up.weight"
    assert not torch.allclose(one[1][name], other[1][name], rtol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["dp=2 pp=2 zero=1", "dp=2 pp=2 zero=0", "pp=2 tp=2"])
def test_every_message_is_predicted_to_the_byte(ranks: RankPool, layout: str) -> None:
    run = run_of(layout)
    for rank, (_, _, _, sent) in enumerate(ranks.run(run.layout.ranks, trained, run, 1)):
        assert sent == rank_messages(run, run.layout.coordinates(rank))


def test_the_first_rank_stashes_the_most() -> None:
    assert [stashed_weights(row) for row in build("pipedream", 4, 9).rows] == [4, 3, 2, 1]


def test_an_update_that_differs_by_design_is_not_verified(ranks: RankPool) -> None:
    with pytest.raises(RefusedError, match="stale by design; train with it"):
        verify(ranks, Case(run_of("pp=2")))


@pytest.mark.parametrize(
    ("layout", "features", "reason"),
    [
        ("pp=2", (), "recipe.clip=0.5 needs the norm of all stages; use recipe.clip=0"),
        ("pp=2 optimistic=on", ("no-clip",), "use optimistic=off"),
        ("dp=2 zero=3", ("no-clip",), "zero=3 lets go of what it stashes; use zero=1"),
        ("pp=2", ("no-clip", "tied"), "use model.tied=false"),
        ("pp=2", ("no-clip", "experts"), "use model.experts=0"),
        ("pp=2 precision=fp16", ("no-clip",), "use precision=bf16"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(
    layout: str, features: tuple[str, ...], reason: str
) -> None:
    run = CaseSpec(f"{layout} schedule=pipedream", features).case().run
    with pytest.raises(RefusedError, match=reason):
        refuse(run)
