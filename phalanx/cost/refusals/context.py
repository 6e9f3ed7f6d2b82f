"""What the context axis refuses: heads that ranks cannot trade tokens for, uneven sequences."""

import numpy as np

from phalanx.core.errors import divisors, shorten
from phalanx.core.run import Run
from phalanx.cost.refusals.rule import Rule, Scope, keys
from phalanx.cost.table import Booleans, Table


def _ulysses(x: Table) -> Booleans:
    heads, kv_heads = x.model.heads // x.tp, np.maximum(x.model.kv_heads // x.tp, 1)
    uneven = (heads % x.cp != 0) | (kv_heads % x.cp != 0)
    trades = x.context.test(lambda kind: kind == "ulysses") & (x.cp > 1)
    result: Booleans = trades & uneven
    return result


def _says_ulysses(run: Run) -> str:
    layout, shape = run.layout, run.model
    heads, kv_heads = shape.heads // layout.tp, shape.kv_heads_of_rank(layout.tp)
    fits = [c for c in divisors(heads) if kv_heads % c == 0]
    return (
        f"context=ulysses cannot split {heads} heads and {kv_heads} kv heads of a tp rank over "
        f"cp={layout.cp}; cp can be {shorten(fits)}, or use context=ring"
    )


def _says_sequence(run: Run) -> str:
    seq = run.recipe.seq
    return (
        f"a sequence of {seq} tokens cannot be cut over cp={run.layout.cp}; "
        f"cp can be {shorten(divisors(seq))}"
    )


RULES = (
    Rule(
        "cp does not divide the heads that ulysses trades",
        keys("tp cp context"),
        _ulysses,
        _says_ulysses,
        Scope.OURS,
    ),
    Rule(
        "cp does not divide the sequence",
        keys("cp"),
        lambda x: x.recipe.seq % x.cp != 0,
        _says_sequence,
        Scope.OTHERS,  # ours pads sequences
    ),
)
