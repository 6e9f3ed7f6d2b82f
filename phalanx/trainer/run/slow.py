"""What a run does about a rank that is slow: tells it, or saves and stops."""

from phalanx.trainer.run.session import Session


def heed_stragglers(session: Session, done: int, data: float) -> bool:
    """Compare the own times of ranks; every rank calls it, once a step.

    Args:
        session: of this rank.
        done: steps, with this one.
        data: seconds of the step that this rank waited for its next batch.

    Returns:
        Whether the run is to stop, the same on every rank.
    """
    policy = session.run.recipe.straggler
    if policy == "off":
        return False
    found = session.stragglers.end(data)
    for one in found:
        stops = "; saved and stopped, since recipe.straggler=stop" if policy == "stop" else ""
        session.slow.append(str(one))
        session.events.tell(
            "straggler", f"{one}{stops}", step=done, rank=one.rank, cause=one.cause, share=one.share
        )
    return bool(found) and policy == "stop"
