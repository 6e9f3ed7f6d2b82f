"""What may leave the device, or be computed again, and what refuses it.

    offload       leaves the device                                         stays
    activations   all that forward saves for backward, block by block       one block at a time
    optimizer     master weights, moments, reduced gradients; the update    weights, gradients whole
    nvme          the same, in files, and the weights between their uses    two units at a time

Sources: Ren et al. 2021 (arXiv:2101.06840), section 3; Rajbhandari et al. 2021 (arXiv:2104.07857),
section 5.
"""

from phalanx.core.recompute import Recompute
from phalanx.cost.refusals.rule import Rule, Scope, keys
from phalanx.cost.table import Booleans, Table

TRAINED = ("core", "norms", "mlp", "activation", "operators")  # parts of a block
_WHOLE_OR_CORE = "use recompute=none, selective, full or full:k"


def _some_parts(recompute: Recompute) -> bool:
    """Whether parts of blocks are computed again, other than the attention core."""
    return not recompute.parts <= {"core"}


def _nvme_without_zero3(x: Table) -> Booleans:
    return x.offload.test(lambda o: o.nvme) & (x.sharers > 1) & (x.zero < 3)


RULES = (
    Rule(
        "the trainer does not recompute such parts",
        keys("recompute"),
        lambda x: x.recompute.test(lambda r: not r.parts <= set(TRAINED)),
        lambda run: (
            f"recompute={run.layout.recompute}: the trainer recomputes whole blocks, or of their "
            f"parts {', '.join(TRAINED)}; other frameworks can be priced with the rest"
        ),
        Scope.OURS,
    ),
    Rule(
        "low-precision products keep their inputs",
        keys("recompute precision"),
        lambda x: x.recompute.test(_some_parts) & bool(x.precision.recipe),
        lambda run: (
            f"recompute={run.layout.recompute} with precision={run.layout.precision}: its "
            f"products keep their inputs in low precision; {_WHOLE_OR_CORE}"
        ),
        Scope.OURS,
    ),
    Rule(
        "what a compiled block saves is up to the compiler",
        keys("recompute compile"),
        lambda x: x.recompute.test(_some_parts) & x.compile,
        lambda run: (
            f"recompute={run.layout.recompute} with compile=on: what a fused block saves is up to "
            f"the compiler; {_WHOLE_OR_CORE}, or compile=off"
        ),
        Scope.OURS,
    ),
    Rule(
        "nvme lets go of weights that the ZeRO stage keeps whole",
        keys("offload zero shard cp"),
        _nvme_without_zero3,
        lambda run: (
            f"offload=nvme lets go of weights, and zero={run.layout.zero} keeps them whole on "
            f"each of {run.layout.sharers} ranks; use zero=3, or offload=optimizer"
        ),
        Scope.OURS,
    ),
    Rule(
        "an optimistic update copies state that has left the device",
        keys("offload optimistic"),
        lambda x: x.offload.test(lambda o: o.state) & x.optimistic,
        lambda run: (
            f"optimistic=on copies the state that offload={run.layout.offload} has no room for; "
            "use optimistic=off, or offload=activations"
        ),
        Scope.OURS,
    ),
    Rule(
        "reshard=off without ZeRO-3",
        keys("reshard zero"),
        lambda x: ~x.reshard & (x.zero != 3),
        lambda run: (
            f"reshard=off keeps gathered weights, and zero={run.layout.zero} gathers none for a "
            "forward; use zero=3, or reshard=on"
        ),
    ),
    Rule(
        "compiled blocks do not offload their activations",
        keys("offload compile"),
        lambda x: x.offload.test(lambda o: o.activations) & x.compile,
        lambda run: (
            "offload=activations with compile=on: what a fused block saves is up to the compiler; "
            "use compile=off, or recompute=full"
        ),
        Scope.OURS,
    ),
)
