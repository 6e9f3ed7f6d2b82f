"""What a layout decides where rounding may tip the balance: who is routed where, what overflows.

A token between two equally good experts goes to either, and everything behind it differs. So the
reference follows the layout's decisions, and whether rounding explains them is checked apart.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.oracle.reference import Decisions, ReferenceStep, choose_experts
from phalanx.oracle.rounding import DRAWS, Noise
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.model.batch import MicroBatch


class Route(NamedTuple):
    """Where the tokens of one micro-batch went in one layer.

    Attributes:
        step: from 0.
        name: of the router's bias.
        samples: int64 [b], place of each sequence in the global batch.
        places: int64 [s/c], where in its sequence each token stands; padding lies beyond its end.
        chosen: int64 [s/c, b, K].
    """

    step: int
    name: str
    samples: Tensor
    places: Tensor
    chosen: Tensor


class RankDecisions(NamedTuple):
    """What one rank saw of the decisions of its layout.

    Attributes:
        routes: where its tokens went, micro-batch by micro-batch.
        skipped: of every step, whether it was skipped.
    """

    routes: list[Route]
    skipped: tuple[bool, ...]


def watch_routes(engine: Engine) -> list[Route]:
    """A list that fills as the engine's routers choose."""
    routes: list[Route] = []

    def note(name: str, batch: MicroBatch, chosen: Tensor) -> None:
        routes.append(Route(batch.step, name, batch.samples, batch.places, chosen))

    for router in engine.balancer.routers:
        router.watch = partial(note, f"{router.prefix}.bias")
    return routes


def joined(run: Run, told: Sequence[RankDecisions]) -> Decisions:
    """The decisions of all ranks, by global place.

    Args:
        run: of it the sizes of the global batch, and K.
        told: by every rank. Ranks that saw the same tokens have routed them alike; every rank has
            skipped the same steps.
    """
    sizes = (run.recipe.batch, run.recipe.seq, run.model.top_k)
    routes: dict[tuple[int, str], Tensor] = {}
    for route in (route for rank in told for route in rank.routes):
        whole = routes.setdefault((route.step, route.name), torch.zeros(sizes, dtype=torch.int64))
        real = route.places < run.recipe.seq
        rows, columns = route.samples.unsqueeze(1), route.places[real].unsqueeze(0)
        whole[rows, columns] = route.chosen[real].transpose(0, 1)
    return Decisions(routes, told[0].skipped)


def implausible_routes(
    shape: ModelShape, steps: Sequence[ReferenceStep], noise: Sequence[Noise], decisions: Decisions
) -> list[str]:
    """Where tokens went to experts that no rounding makes the best, one line each.

    The reference, were the scores of the chosen experts better by what rounding explains, would
    choose the same.

    Args:
        shape: of it how experts are chosen.
        steps: of the reference, which followed the decisions; routes of later steps are not judged.
        noise: what rounding explains of each step, at least as many.
        decisions: of the layout.
    """
    complaints = []
    for (step, name), chosen in decisions.routes.items():
        if step >= len(steps):
            continue
        scores = steps[step].scores[name]
        visits = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        margin = 4 * shape.group_best * noise[step].scores[name]
        wrong = int((choose_experts(shape, scores + margin * visits) != visits).any(-1).sum())
        if wrong:
            router = name.removesuffix(".bias")
            complaints.append(
                f"step {step + 1}: {router} sends {wrong} of {visits[..., 0].numel()} tokens to "
                f"experts that are not the best, by more than rounding explains ({margin:.1e})"
            )
    return complaints


def first_in_doubt(
    steps: Sequence[ReferenceStep], noise: Sequence[Noise], decisions: Decisions
) -> tuple[int, list[str]]:
    """The first step that the layout skipped and one device would not, or the other way.

    Args:
        steps: of the reference.
        noise: of each, of which the draws that overflowed count.
        decisions: of the layout, for as many steps.

    Returns:
        Its index, or the number of steps: what comes from there on cannot be compared; and a
        complaint, where no draw of the reference does as the layout did.
    """
    for i, (step, one, skipped) in enumerate(zip(steps, noise, decisions.skipped, strict=True)):
        if step.finite != skipped:
            continue
        agree = one.overflows if skipped else DRAWS - one.overflows
        words = ("was skipped", "does not overflow") if skipped else ("moved", "overflows")
        complaint = f"step {i + 1}: {words[0]}, and on one device it {words[1]}"
        return i, [] if agree else [complaint]
    return len(steps), []
