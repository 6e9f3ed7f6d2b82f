"""What may leave the device, and what it refuses. Its twin is phalanx/trainer/engine/offload.py.

    offload       leaves the device                                         stays
    activations   all that forward keeps for backward, block by block       one block at a time
    optimizer     master weights, moments, reduced gradients; the update    weights, gradients whole
    nvme          the same, in files, and the weights between their uses    two units at a time

Sources: Ren et al. 2021 (arXiv:2101.06840), section 3; Rajbhandari et al. 2021 (arXiv:2104.07857),
section 5.
"""

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.schedules.layouts import is_asynchronous

STATE = frozenset({"optimizer", "nvme"})


def refuse(run: Run) -> None:
    """Raise RefusedError where what leaves the device is needed there."""
    layout = run.layout
    if layout.offload.nvme and layout.sharers > 1 and layout.zero < 3:
        raise RefusedError(
            f"offload=nvme lets go of weights, and zero={layout.zero} keeps them whole on each of "
            f"{layout.sharers} ranks; use zero=3, or offload=optimizer"
        )
    if layout.optimistic and layout.offload.state:
        raise RefusedError(
            f"optimistic=on copies the state that offload={layout.offload} has no room for; use "
            "optimistic=off, or offload=activations"
        )
    if is_asynchronous(layout) and (layout.offload or not layout.reshard):
        raise RefusedError(
            f"schedule={layout.schedule} stashes weights on the device, and moves them at every "
            "micro-batch; use schedule=1f1b, or offload=none reshard=on"
        )
    if not layout.reshard and layout.zero != 3:
        raise RefusedError(
            f"reshard=off keeps gathered weights, and zero={layout.zero} gathers none for a "
            "forward; use zero=3, or reshard=on"
        )
    if layout.compile and layout.offload.activations:
        raise RefusedError(
            "offload=activations with compile=on: what a fused block keeps is up to the compiler; "
            "use compile=off, or recompute=full"
        )
