"""What makes a resumed run the same run: where something is another, it is refused or told by name.

Which tokens come next follows from the seed, the sizes of a batch and the corpus, and which of them
are held out from `data.validation`. A checkpoint remembers all of it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.core.errors import PhalanxError, RefusedError, UsageError
from phalanx.core.run import Recipe, Run
from phalanx.data.corpus import Corpus
from phalanx.data.skips import Skips
from phalanx.trainer.checkpoint.index import whole
from phalanx.trainer.checkpoint.manifest import DamagedError, Manifest, shorter
from phalanx.trainer.guard.spikes import SpikeDetector

SCHEDULE = (
    "steps",
    "learning_rate",
    "min_learning_rate",
    "warmup",
    "decay",
    "decay_from",
    "decay_from_rate",
)
_SMALL_JUMP = 0.01  # of the learning rate


class Resume(NamedTuple):
    """What to go on from.

    Attributes:
        checkpoint: the path of one, or of a run, for its newest; "auto" for the newest of the run
            in whose folder is written. Only one that can be trusted is taken.
        may_differ: data, batch and seed may be others than they were: then it is told, and
            otherwise refused.
        restarted: the run has begun already, and a rank has died: checkpoints of its own come
            first. An empty `checkpoint` then means that it had begun anew.
    """

    checkpoint: str = "auto"
    may_differ: bool = False
    restarted: bool = False


class _Kept(NamedTuple):
    key: str
    means: str


_KEPT = {
    "corpus": _Kept("the corpus", "other text is learned from, from where this one was"),
    "token_dtype": _Kept("data.token_dtype", "the same bytes are other ids"),
    "offset": _Kept("data.offset", "the same bytes are other ids"),
    "separator": _Kept("data.separator", "documents end elsewhere"),
    "document_mask": _Kept("data.document_mask", "tokens see other tokens"),
    "validation": _Kept("data.validation", "what is held out now may have been learned from"),
    "seed": _Kept("recipe.seed", "samples come in another order, and some come twice"),
    "seq": _Kept("recipe.seq", "samples are cut elsewhere, and some come twice"),
    "batch": _Kept("recipe.batch", "samples are skipped, or come twice"),
}


class Change(NamedTuple):
    """Something that decides which tokens are learned, and is not what it was.

    Attributes:
        key: of the run file.
        before, now: its values.
        means: what follows.
    """

    key: str
    before: Any
    now: Any
    means: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before} and is {self.now}: {self.means}"


def identity(run: Run, corpus: Corpus) -> dict[str, Any]:
    """What decides which tokens come next, and the learning rate; a checkpoint keeps it.

    Args:
        run: resolved.
        corpus: the whole of it, with what is held out.
    """
    recipe, data = run.recipe, run.data
    return {
        "corpus": corpus.fingerprint,
        "corpus_name": corpus.name,
        "token_dtype": corpus.token_dtype,
        "offset": data.offset,
        "separator": data.separator,
        "document_mask": data.document_mask,
        "validation": data.validation,
        "seed": recipe.seed,
        "seq": recipe.seq,
        "batch": recipe.batch,
        "schedule": {key: getattr(recipe, key) for key in SCHEDULE},
    }


def require_progress(manifest: Manifest) -> None:
    """Refuse a checkpoint that does not say how far a run was, before anything of it is used.

    Raises:
        DamagedError: something is missing in its state, or contradicts its step.
    """
    state = manifest.state
    try:
        counts = [whole(state[key]) for key in ("step", "updates")]
        counts += [whole(state[key]) for key in ("amax_steps",) if key in state]
        value, clean = state.get("loss_scale", (1.0, 0))
        schedule = state.get("schedule")
        if min(counts) < 0 or whole(clean) < 0 or not 0.0 < float(value) < math.inf:
            raise ValueError(f"{counts} and a loss scale of {value}")
        Skips.from_json(state.get("skips", ()))
        SpikeDetector(Recipe()).restore(state.get("spikes", {}))
        if schedule is not None:
            replace(Recipe(), **{key: schedule[key] for key in SCHEDULE})
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        PhalanxError,
    ) as error:
        raise DamagedError(f"the state of the run in it: {shorter(repr(error))}") from error


def changes(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What is another than it was.

    Args:
        state: of a checkpoint; what it does not say is taken to be the same.
        now: the identity of the run that goes on from it.
    """
    found = []
    for name, (key, means) in _KEPT.items():
        if name in state and name in now and state[name] != now[name]:
            shown = "corpus_name" if name == "corpus" else name
            found.append(Change(key, state.get(shown, "another"), now[shown], means))
    return found


def refuse_changes(found: list[Change], checkpoint: str) -> None:
    """Stop if anything is another.

    Args:
        found: by `changes`.
        checkpoint: its path, for the command that makes another run of it.

    Raises:
        RefusedError: naming the first, and the ways out.
    """
    if found:
        raise RefusedError(
            f"{found[0]}; resume with the same, make a run of its own with --from {checkpoint} "
            "--name NAME, or go on all the same with --force"
        )


def require_steps(recipe: Recipe, first: int) -> str:
    """Refuse to go back; a job that is started again once all is done has nothing to do.

    Args:
        recipe: of the run that goes on.
        first: the step that it goes on with.

    Returns:
        One line if nothing is left to do, else nothing.

    Raises:
        UsageError: the run ends before that step.
    """
    last = recipe.last_step
    key = "recipe.steps" if last == recipe.steps else "recipe.stop_at"
    if first > last:
        raise UsageError(
            f"the checkpoint is of step {first}, and {key}={last} ends before it; "
            f"use {key} above {first}, or start from an older checkpoint under another --name"
        )
    return f"all {last} steps are done; more need {key} above {last}" if first == last else ""


def learning_rate_jump(state: Mapping[str, Any], recipe: Recipe) -> str:
    """One line if the learning rate does not go on where it was; empty if it does.

    Args:
        state: of a checkpoint.
        recipe: of the run that goes on from it.
    """
    if "schedule" not in state:
        return ""
    step, schedule = int(state["step"]), state["schedule"]
    before = replace(recipe, **schedule).learning_rate_at(step)
    now = recipe.learning_rate_at(step)
    if abs(now - before) <= _SMALL_JUMP * max(now, before):
        return ""
    causes = [
        f"recipe.{key} was {schedule[key]} and is {getattr(recipe, key)}"
        for key in SCHEDULE
        if schedule[key] != getattr(recipe, key)
    ]
    line = f"the learning rate goes from {before:.3g} to {now:.3g}, since {', '.join(causes)}"
    share = before / recipe.learning_rate if recipe.learning_rate else 1.0
    if step < recipe.warmup or share > 1:
        return line
    smooth = f"--set recipe.decay_from={step} --set recipe.decay_from_rate={share:.4g}"
    return f"{line}; it goes on smoothly with {smooth}"
