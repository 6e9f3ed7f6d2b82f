"""What `phalanx train --dry-run` checks and shows: everything but the training."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from phalanx.core.run import Run
from phalanx.core.units import show_count
from phalanx.data.batches import SampleStream
from phalanx.data.corpus import open_corpus
from phalanx.schedules.layouts import layers_of_stages
from phalanx.trainer.run import limits


def refuse_untrainable(run: Run) -> None:
    """Stop at what cannot be trained, before anything is started.

    Raises:
        RefusedError: it cannot be cut so, or needs what the trainer does not have.
        DataError: the corpus cannot be read, or is too short.
        UsageError: the documents of the corpus are to be kept apart and cannot be told.
    """
    limits.refuse_untrainable(run)
    _open_text(run)


def _open_text(run: Run) -> SampleStream:
    """The text to learn from, without what is held out, cut into sequences."""
    recipe = run.recipe
    corpus = open_corpus(run.data, run.model.vocab)
    training, _ = corpus.split(run.data.validation, recipe.seq)
    return SampleStream(
        training,
        seq=recipe.seq,
        batch=recipe.batch,
        seed=recipe.seed,
        document_mask=run.data.document_mask,
    )


def describe_run(run: Run) -> dict[str, Any]:
    """The facts of a run that can be told without starting it."""
    corpus = _open_text(run).corpus
    recipe, layout = run.recipe, run.layout
    return {
        "layout": str(layout),
        "ranks": layout.ranks,
        "stages": list(layers_of_stages(layout, run.model.layers)),
        "micro_batches": run.micro_batches,
        "parameters": run.model.params(),
        "tokens_per_step": recipe.tokens_per_step,
        "steps": recipe.last_step,
        "tokens": recipe.tokens_per_step * recipe.last_step,
        "corpus": corpus.name,
        "corpus_tokens": len(corpus),
    }


def show_run(run: Run, facts: dict[str, Any]) -> RenderableType:
    """The facts for a person."""
    recipe, layout = run.recipe, run.layout
    rounds = facts["tokens"] / max(facts["corpus_tokens"], 1)
    rows = {
        "layout": f"{layout}: {layout.ranks} ranks",
        "stages": f"{'+'.join(map(str, facts['stages']))} layers, schedule {layout.schedule}",
        "step": f"{recipe.batch} x {recipe.seq} = {recipe.tokens_per_step:,} tokens, in "
        f"{facts['micro_batches']} micro-batches of {layout.mb} on each of {layout.dp} dp ranks",
        "model": f"{show_count(facts['parameters'])} parameters"
        + (f", starting from {run.weights}" if run.weights else ""),
        "text": f"{facts['corpus']}: {show_count(facts['corpus_tokens'])} tokens",
        "length": f"{facts['steps']:,} steps, {show_count(facts['tokens'])} tokens, "
        f"{rounds:.2g} times the text",
        "refused": "nothing: this run can start",
    }
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    return table
