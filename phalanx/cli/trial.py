"""What `phalanx train --dry-run` checks and shows: everything but the training."""

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from phalanx.cli.origin import Origin
from phalanx.core.run import Run
from phalanx.core.units import show_bytes, show_count
from phalanx.schedules.layouts import layers_of_stages
from phalanx.trainer.run import limits
from phalanx.trainer.run.continuity import (
    changes,
    identity,
    learning_rate_jump,
    refuse_changes,
    require_progress,
    require_steps,
)
from phalanx.trainer.run.room import Room, refuse_too_large
from phalanx.trainer.run.text import open_text


def refuse_untrainable(run: Run, local_ranks: int) -> Room:
    """Stop at what cannot be trained, before anything is started.

    Args:
        run: what would be trained.
        local_ranks: how many of its ranks are on this machine.

    Returns:
        What it needs of memory, and what there is.

    Raises:
        RefusedError: it cannot be cut so, needs what the trainer does not have, or more memory.
        DataError: the corpus cannot be read, or is too short.
        UsageError: the documents of the corpus are to be kept apart and cannot be told.
    """
    limits.refuse_untrainable(run)
    open_text(run)
    return refuse_too_large(run, local_ranks)


def describe_run(run: Run, room: Room) -> dict[str, Any]:
    """The facts of a run that can be told without starting it.

    Args:
        run: every value, resolved.
        room: bytes that the run needs of this machine, and those that are free.

    Returns:
        Fields of the document of a dry run, see `docs/json.md`.

    Raises:
        DataError: the corpus cannot be read, or is too short.
        UsageError: the documents of the corpus are to be kept apart and cannot be told.
    """
    corpus = open_text(run).training.corpus
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
        "needed_bytes": round(room.needed),
        "free_bytes": round(room.free),
        "notes": _notes(run),
    }


def _notes(run: Run) -> list[str]:
    """What the start would tell besides."""
    if not run.weights:
        return []
    from phalanx.trainer.model.init import notes_on_weights

    return notes_on_weights(run.weights)


def describe_resume(run: Run, origin: Origin) -> dict[str, Any]:
    """What would be gone on from, and what is another than it was; nothing for a new run.

    The checkpoint is believed here; the start reads every byte of it, and may take the one before.

    Args:
        run: every value, resolved.
        origin: where it starts from.

    Returns:
        `resumes`, a path or None, and `notes`, a line for every value that has changed.

    Raises:
        RefusedError: the run would not see the samples that come next.
        UsageError: it ends before the checkpoint.
        CheckpointError: the checkpoint's manifest is damaged, or says nothing of a run.
    """
    if origin.resume is None:
        return {}
    from phalanx.trainer.checkpoint.manifest import DamagedError, read_manifest
    from phalanx.trainer.checkpoint.names import steps

    path = origin.runs / origin.name
    path = path if origin.resume.checkpoint == "auto" else Path(origin.resume.checkpoint)
    if (path / "run.toml").exists():
        path = next((found for _, found in steps(path / "checkpoints")), path)
        if (path / "run.toml").exists():
            return {"resumes": None, "notes": ["there is no checkpoint yet: it starts anew"]}
    try:
        manifest = read_manifest(path)
        require_progress(manifest)
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}; the start would not take it") from error
    state = manifest.state
    found = changes(state, identity(run, open_text(run).corpus))
    if not origin.resume.may_differ:
        refuse_changes(found, str(path))
    lines = (*map(str, found), learning_rate_jump(state, run.recipe))
    done = require_steps(run.recipe, int(state["step"]))
    return {"resumes": str(path), "notes": [line for line in (*lines, done) if line]}


def show_run(run: Run, facts: dict[str, Any]) -> RenderableType:
    """The facts for a person.

    Args:
        run: every value, resolved.
        facts: of `describe_run` and, if it goes on from something, of `describe_resume`.
    """
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
        "memory": f"at least {show_bytes(facts['needed_bytes'], binary=True)} of "
        f"{show_bytes(facts['free_bytes'], binary=True)} that are free",
        "refused": "nothing: this run can start",
    }
    if facts.get("resumes"):
        rows["resumes"] = facts["resumes"]
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    for line in facts.get("notes", ()):
        table.add_row("note", line)
    return table
