"""What a session came to: the last validation, a sample, the summary."""

import math
import shlex
import statistics

from phalanx.core.errors import PhalanxError
from phalanx.data.shards import tokenizer_of
from phalanx.data.tokenizers import Tokenizer, open_tokenizer
from phalanx.schedules.layouts import is_asynchronous
from phalanx.trainer import faults
from phalanx.trainer.checkpoint.names import steps as committed
from phalanx.trainer.run.generate import generate
from phalanx.trainer.run.goodput import Goodput
from phalanx.trainer.run.meter import time_split
from phalanx.trainer.run.report import Summary
from phalanx.trainer.run.session import Session
from phalanx.trainer.run.validation import validate

_MOST_AVERAGED = 5  # steps at either end of a session


def finish(session: Session, first: int, done: int, *, interrupted: bool) -> Summary:
    """Validate, write a sample, wait for the last checkpoint; what the session came to.

    Args:
        session: of this rank; every rank calls it.
        first: the first step of the session.
        done: steps done in all.
        interrupted: it was asked to stop before the last one.
    """
    stopped = interrupted or validate(session, done)
    faults.point("end", step=done)
    sample = "" if stopped else _sample(session)
    if session.saver:
        with session.meter.apart("checkpoints", session.engine.mesh.ledger):
            session.saver.wait()
    run, meter = session.run, session.meter
    rate = meter.tokens_per_second if meter.seconds else 0.0
    mfu, hfu = meter.utilization(rate)
    measured = [v.loss for v in meter.validations if v.step == done]
    few = max(1, min(_MOST_AVERAGED, len(meter.losses) // 4))
    spent = session.directory.goodput() if session.directory else Goodput(0.0, {})
    saving = meter.between.get("checkpoints", 0.0)
    return Summary(
        name=session.directory.name if session.directory else "",
        directory=str(session.directory.path) if session.directory else "",
        layout=str(run.layout),
        parameters=run.model.params(),
        first_step=first,
        last_step=done,
        steps=run.recipe.last_step,
        interrupted=interrupted,
        first_loss=statistics.fmean(meter.losses[:few] or [math.nan]),
        last_loss=statistics.fmean(meter.losses[-few:] or [math.nan]),
        averaged_steps=few,
        losses=tuple(meter.losses),
        validation_loss=measured[-1] if measured else None,
        validations=tuple(meter.validations),
        bytes_per_token=session.corpus.bytes_per_token,
        tokens=len(meter.losses) * run.recipe.tokens_per_step,
        seconds=sum(meter.seconds) + sum(meter.between.values()),
        tokens_per_second=rate,
        flops_per_second=rate * meter.flops_per_token,
        mfu=mfu,
        hfu=hfu,
        convention=meter.convention,
        time_split=time_split(session.engine, meter),
        goodput=spent.share,
        lost_seconds=spent.lost,
        restart_seconds=statistics.fmean(spent.restarts) if spent.restarts else None,
        checkpoint_write_seconds=saving / meter.saves if meter.saves else None,
        stragglers=tuple(session.slow),
        peak_bytes=meter.memory,
        checkpoints=_checkpoints(session),
        sample=sample,
        proof=session.proof,
        next_steps=_next_steps(session, interrupted=interrupted),
    )


def _checkpoints(session: Session) -> tuple[str, ...]:
    """Paths of the committed checkpoints, oldest first."""
    if session.directory is None:
        return ()
    return tuple(str(path) for _, path in reversed(committed(session.directory.checkpoints)))


def _sample(session: Session) -> str:
    """A little text, where it is known how ids become text."""
    count, reads = session.run.recipe.sample_tokens, _tokenizer(session)
    if reads is None or not count:
        return ""
    prompt = [ord(c) for c in "def "]
    if reads.kind != "bytes":  # as the first document begins
        prompt = session.corpus.tokens[:8].tolist()
    tokens = generate(session.engine, prompt, count, stop=session.worker.stop)
    return reads.engine.decode([t for t in (*prompt, *tokens) if 0 <= t < reads.vocab]).replace(
        "\0", ""
    )


def _tokenizer(session: Session) -> Tokenizer | None:
    """What made the ids of the corpus; None where nobody knows, or its library is missing."""
    if session.corpus.is_text:
        return open_tokenizer("bytes")
    try:
        return tokenizer_of(session.corpus.folder) if session.corpus.folder else None
    except PhalanxError:
        return None


def _next_steps(session: Session, *, interrupted: bool) -> tuple[tuple[str, str], ...]:
    """Commands that do what they say as they stand, with this run's own model and layout."""
    if not session.directory:
        return ()
    run, directory = session.run, session.directory
    home, file = shlex.quote(str(directory.path)), shlex.quote(str(directory.run_file))
    steps = []
    if interrupted:
        steps.append((f"phalanx train --resume {home}", "go on where this stopped"))
    # stale gradients differ from one device by design, and bf16 weights alone have no fp64
    if not is_asynchronous(run.layout) and run.recipe.master_weights == "fp32":
        prove = f"phalanx train {file} --prove 1 --set recipe.stop_at=1"
        steps.append((prove, "prove this layout equal to one device"))
    if not interrupted:
        steps.append((f"phalanx train {file} --data FOLDER", "learn your own text"))
    return tuple(steps)
