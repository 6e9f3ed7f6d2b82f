"""Text from a trained model, and how well it foretells text: `phalanx generate` and `eval`."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.api.runfile import load_run
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.run import Data, Run
from phalanx.data.batches import HeldOutStream, SampleStream
from phalanx.data.corpus import Corpus, open_corpus
from phalanx.data.tokenize import Wanted, ids_of, tokenize
from phalanx.data.tokenizers import Tokenizer
from phalanx.trainer.run.launch import launch, require_torch
from phalanx.trainer.run.limits import refuse_untrainable
from phalanx.trainer.run.trained import Trained, as_used, build_trained, find_trained

if TYPE_CHECKING:
    from phalanx.trainer.run.worker import Worker

__all__ = ["Continuation", "Evaluation", "evaluate", "generate"]

SCHEMA = 1
_EVERYTHING = 1 << 40  # batches


@dataclass(frozen=True)
class Continuation:
    """What a model wrote.

    Attributes:
        prompt: it continued.
        text: that it added.
        ids: the same as tokens.
        ended: by the token that ends a text, not by its length.
    """

    prompt: str
    text: str
    ids: list[int]
    ended: bool

    def to_dict(self) -> dict[str, Any]:
        """One element of what `phalanx generate --json` prints."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """How well a model foretells a text.

    Attributes:
        model: which.
        corpus: the text.
        nats: per token: the mean loss.
        tokens: that were foretold.
        bytes_per_token: of the text; None where it is not known.
    """

    model: str
    corpus: str
    nats: float
    tokens: int
    bytes_per_token: float | None

    @property
    def perplexity(self) -> float:
        """Exp of the nats per token."""
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float | None:
        """The same whatever the tokenizer; None where nobody knows the bytes."""
        if self.bytes_per_token is None:
            return None
        return self.nats / math.log(2) / self.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """What `phalanx eval --json` prints."""
        derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"schema": SCHEMA, **asdict(self), **derived}


class ModelJob(NamedTuple):
    """What every rank is handed.

    Attributes:
        trained: the model.
        run: how it is cut.
        out: a file for what comes of it.
    """

    trained: Trained
    run: Run
    out: Path


def generate(
    model: str | Path,
    prompts: Sequence[str],
    count: int = 128,
    *,
    layout: str = "dp=1",
    tokenizer: str = "",
    **sampling: Any,
) -> list[Continuation]:
    """Let a trained model continue texts.

    Args:
        model: a run, one of its checkpoints, or a folder that Transformers loads.
        prompts: to continue; texts of one length are written side by side.
        count: tokens to add to each at most.
        layout: how the model is cut; its ranks are started on this machine.
        tokenizer: a folder or a file; empty for the model's own.
        **sampling: `temperature` (0 takes the likeliest), `top_k`, `top_p`, `seed`, `end`.

    Raises:
        UsageError: there is no such model, a prompt is empty, or no tokenizer is known.
        RefusedError: the layout cannot cut the model.
        PhalanxError: torch or a library is missing.
    """
    from phalanx.trainer.run.generate import Sampling

    trained, cut = _opened(model, layout)
    reads = _tokenizer(trained, tokenizer)
    begin = [reads.begin] if reads.begin is not None else []
    ids = [[*begin, *ids_of(reads, prompt).tolist()] for prompt in prompts]
    for prompt, found in zip(prompts, ids, strict=True):
        if not found:
            raise UsageError(f"the prompt {prompt!r} has no token; give at least one")
        _require_room(trained, reads, found, count)
    run = as_used(trained, cut, max(map(len, ids)) + count, cut.dp * cut.mb)
    refuse_untrainable(run)
    end = reads.end if reads.end is not None and reads.kind != "bytes" else -1
    chosen = Sampling(**{"end": end, **sampling})
    written = _on_ranks(generate_on_rank, ModelJob(trained, run, Path()), (ids, count, chosen))
    return [
        Continuation(
            prompt=prompt,
            text=reads.engine.decode([i for i in added if i != chosen.end]),
            ids=added,
            ended=added[-1:] == [chosen.end],
        )
        for prompt, added in zip(prompts, written, strict=True)
    ]


def evaluate(
    model: str | Path,
    data: str | Path,
    *,
    layout: str = "dp=1",
    seq: int = 0,
    batches: int = 0,
    keys: dict[str, Any] | None = None,
) -> Evaluation:
    """Measure how well a trained model foretells a text: the mean loss over all of its tokens.

    Args:
        model: a run, one of its checkpoints, or a folder that Transformers loads.
        data: whatever `data.path` can be. Text is tokenized as the model reads it.
        layout: how the model is cut; its ranks are started on this machine.
        seq: tokens per window; 0 for those that the model was trained on.
        batches: of 8 windows, at most; 0 for all.
        keys: other keys of `[data]`.

    Raises:
        UsageError: there is no such model or text.
        DataError: the text cannot be read, or is shorter than a window.
        RefusedError: the layout cannot cut the model.
    """
    trained, cut = _opened(model, layout)
    seq = seq or (trained.run.recipe.seq if trained.checkpoint else 1024)
    run = as_used(trained, cut, seq, 8 * cut.dp * cut.mb)
    refuse_untrainable(run)
    with tempfile.TemporaryDirectory() as folder:
        path = _readable(trained, Path(data), Path(folder))
        opened = Data(path=str(path.absolute()), **(keys or {}))
        corpus = open_corpus(opened, run.model.vocab)
        nats, tokens = _on_ranks(
            evaluate_on_rank, ModelJob(trained, run, Path()), (opened, batches or _EVERYTHING)
        )
    known = corpus.bytes_per_token == corpus.bytes_per_token
    each = corpus.bytes_per_token if known else None
    return Evaluation(trained.name, str(data), nats / max(tokens, 1), tokens, each)


def _opened(model: str | Path, layout: str) -> tuple[Trained, Layout]:
    require_torch()
    return find_trained(Path(model).expanduser(), load_run), Layout.parse(layout)


def _tokenizer(trained: Trained, said: str) -> Tokenizer:
    found = trained.tokenizer(said)
    if found is None:
        raise UsageError(
            f"{trained.name} learned ids of a tokenizer that is not known; give --tokenizer DIR"
        )
    if found.vocab > trained.run.model.vocab:
        raise UsageError(
            f"{found.name} has {found.vocab:,} ids, and {trained.name} knows "
            f"{trained.run.model.vocab:,}; give the tokenizer that it learned with"
        )
    return found


def _require_room(trained: Trained, reads: Tokenizer, ids: list[int], count: int) -> None:
    shape = trained.run.model
    if shape.positions == "learned" and len(ids) >= shape.max_positions:
        raise UsageError(
            f"a prompt has {len(ids):,} tokens, and the model {shape.max_positions:,} positions; "
            "give a shorter one"
        )


def _readable(trained: Trained, data: Path, folder: Path) -> Path:
    """Token ids as they are; text and records as the model reads them."""
    from phalanx.data.shards import is_tokens
    from phalanx.data.text import TOKENS

    if not data.exists() or data.suffix.lower() in TOKENS or is_tokens(data):
        return data
    reads = _tokenizer(trained, "")
    said = "bytes" if reads.path is None else str(reads.path)
    end = "none" if reads.end is None else str(reads.end)
    tokenize(Wanted(source=data, tokenizer=said, out=folder / "tokens", end=end), 1)
    return folder / "tokens"


def _on_ranks(entry: Any, job: ModelJob, args: tuple[Any, ...]) -> Any:
    """Start the ranks, and bring home what rank 0 has written."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launch(entry, (job._replace(out=out), *args), job.run.layout.ranks)
        return json.loads(out.read_text(encoding="utf-8"))


def generate_on_rank(
    worker: "Worker", job: ModelJob, prompts: list[list[int]], count: int, sampling: Any
) -> int:
    """What each rank does: texts of one length side by side.

    Args:
        worker: this process, joined with the others.
        job: what every rank is handed.
        prompts: token ids.
        count: tokens to add at most.
        sampling: how they are chosen.
    """
    from phalanx.trainer.run.generate import generate_batch

    engine = build_trained(worker, job.trained, job.run)
    written: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        batch = [prompts[i] for i in places]
        found = generate_batch(engine, batch, count, sampling, worker.stop)
        written.update(zip(places, found, strict=True))
    if worker.rank == 0:
        job.out.write_text(json.dumps([written[i] for i in range(len(prompts))]))
    return 0


def evaluate_on_rank(worker: "Worker", job: ModelJob, data: Data, batches: int) -> int:
    """What each rank does: its part of every window's loss.

    Args:
        worker: this process, joined with the others.
        job: what every rank is handed.
        data: the text.
        batches: at most.
    """
    from phalanx.trainer.engine.step import evaluate as evaluate_batch

    engine = build_trained(worker, job.trained, job.run)
    stream = _windows(engine.run, open_corpus(data, engine.run.model.vocab), batches)
    run, layout = engine.run, engine.run.layout
    executor = engine.forward_executor(run.micro_batches, layout.mb, engine.executor_seq)
    nats, tokens = 0.0, 0
    for number in range(stream.num_batches):
        part = evaluate_batch(engine, executor, stream.batch(number, engine.positions()))
        nats, tokens = nats + part.nats, tokens + part.tokens
    if worker.rank == 0:
        job.out.write_text(json.dumps([nats, tokens]))
    return 0


def _windows(run: Run, corpus: Corpus, batches: int) -> HeldOutStream:
    samples = SampleStream(corpus, seq=run.recipe.seq, batch=run.recipe.batch, seed=0)
    return HeldOutStream(samples, batches)
