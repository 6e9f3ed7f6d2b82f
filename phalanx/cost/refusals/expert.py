"""What the expert axis refuses: experts, or ranks to share them, that ep does not divide."""

from phalanx.core.errors import divisors, shorten
from phalanx.core.run import Run
from phalanx.cost.refusals.rule import Rule, Scope, keys


def _says_ranks(run: Run) -> str:
    layout, experts = run.layout, run.model.experts
    ranks = layout.sharers
    fits = [e for e in divisors(ranks) if experts % e == 0]
    return (
        f"ep={layout.ep} must divide {experts} experts and the {ranks} ranks that share "
        f"a copy (shard x cp); ep can be {shorten(fits)}"
    )


def _says_experts(run: Run) -> str:
    experts = run.model.experts
    return (
        f"{experts} experts cannot be split over ep={run.layout.ep}; "
        f"ep can be {shorten(divisors(experts))}"
    )


def _says_borrowed(run: Run) -> str:
    layout = run.layout
    ranks = layout.dp * layout.cp * layout.tp
    return (
        f"ep={layout.ep} must divide dp x cp x tp = {ranks}; ep can be {shorten(divisors(ranks))}"
    )


RULES = (
    Rule(
        "experts have no biases",
        keys(""),
        lambda x: (x.tp >= 1) & bool(x.model.is_moe and x.model.bias),
        lambda run: "experts have no biases here; use model.bias=false",
        Scope.OURS,
    ),
    Rule(
        "the model has no experts",
        keys("ep"),
        lambda x: (x.ep > 1) & (not x.model.is_moe),
        lambda run: f"ep={run.layout.ep}, but {run.model.name} has no experts; use ep=1",
    ),
    Rule(
        "ep does not divide the experts, or the ranks that share them",
        keys("dp cp ep shard"),
        lambda x: (x.ep > 1) & ((x.sharers % x.ep != 0) | (x.model.experts % x.ep != 0)),
        _says_ranks,
        Scope.OURS,
    ),
    Rule(
        "ep does not divide the experts",
        keys("ep"),
        lambda x: x.model.experts % x.ep != 0,
        _says_experts,
        Scope.OTHERS,
    ),
    Rule(
        "ep does not divide the ranks that share the experts",
        keys("dp cp tp ep"),
        lambda x: x.dp * x.cp * x.tp % x.ep != 0,
        _says_borrowed,
        Scope.OTHERS,  # they borrow ranks of tp as well
    ),
)
