"""Proves a run before it starts: its own model, text and layout, against one device."""

from dataclasses import replace

from phalanx.core.errors import PhalanxError
from phalanx.core.run import Run
from phalanx.data.batches import SampleStream, Stream
from phalanx.data.corpus import open_corpus
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case, verify


class DiffersError(PhalanxError):
    """The layout does not take the update that one device would take."""

    exit_code = 4


class OwnText(Case):
    """A case that sees the run's own batches instead of made-up ones."""

    def stream(self) -> Stream:
        """The batches that training will see first."""
        run = self.run
        corpus, _ = open_corpus(run.data, run.model.vocab).split(
            run.data.validation, run.recipe.seq
        )
        return SampleStream(
            corpus,
            seq=run.recipe.seq,
            batch=run.recipe.batch,
            seed=run.recipe.seed,
            document_mask=run.data.document_mask,
        )


def prove(run: Run, steps: int) -> str:
    """Take the first steps of a run twice: under its layout, and on one device.

    Everything is in fp64, but for what a recipe rounds to low precision.

    Args:
        run: on at most as many ranks as this machine should start.
        steps: how many.

    Returns:
        One line that says how far apart they are.

    Raises:
        DiffersError: further than rounding can explain.
    """
    exact = run.layout.precision.reference
    case = OwnText(run=replace(run, layout=replace(run.layout, precision=exact)), steps=steps)
    with RankPool(run.layout.ranks) as pool:
        outcome = verify(pool, case)
    if not outcome.passed:
        raise DiffersError(f"{run.layout} is not equal to one device: {outcome.complaints[0]}")
    errors = ", ".join(f"{name} {error:.0e}" for name, error in outcome.errors.items())
    plural = "s" if steps > 1 else ""
    return (
        f"{steps} step{plural} in {exact} under {run.layout} equal one device: {errors} "
        f"({outcome.seconds:.0f} s)"
    )
