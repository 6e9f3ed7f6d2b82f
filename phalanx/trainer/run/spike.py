"""What a run does about a spike: tells it, has skipped it already, or goes back before it."""

import math

from phalanx.trainer.engine.step import StepResult
from phalanx.trainer.run.go_back import Back
from phalanx.trainer.run.session import Session

MOST_ROLLBACKS = 3  # without getting beyond the window of the first: then the text is not the cause


def heed_spike(session: Session, done: int, result: StepResult) -> Back | None:
    """Look at a step, on every rank alike: what is compared has been reduced.

    Args:
        session: of this rank.
        done: steps, with this one.
        result: of the step.

    Returns:
        Where to go back to, if the recipe says so.
    """
    finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    if not finite and result.loss_scale > 1:  # it falls; that is how fp16 finds its scale
        return None
    recipe, spikes = session.run.recipe, session.engine.spikes
    found = spikes.note(result.loss, result.grad_norm)
    if found is None:
        return None
    text = f"step {done}: {found}"
    before = session.rolled_back[-MOST_ROLLBACKS:]
    stuck = len(before) == MOST_ROLLBACKS and done <= before[0] + recipe.spike_window
    if recipe.spike == "rollback" and session.saver and not stuck:
        session.rolled_back.append(done)
        return Back(text, "spike", recipe.spike_window)
    if recipe.spike == "skip" and result.skipped:
        text += "; its update is skipped"
    elif stuck:
        text += f"; {MOST_ROLLBACKS} rollbacks have not helped, so the run goes on"
    session.events.tell(
        "spike", text, step=done, value=_shown(found.value), median=_shown(found.median)
    )
    return None


def _shown(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
