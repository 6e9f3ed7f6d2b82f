"""The text of a run, as the trainer reads it: what is learned from, and what is held out."""

from pathlib import Path
from typing import NamedTuple

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.data.batches import HeldOutStream, SampleStream
from phalanx.data.corpus import NUM_BYTES, Corpus, open_corpus

TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


class RunText(NamedTuple):
    """A corpus, cut into sequences.

    Attributes:
        corpus: all of it.
        training: the sequences to learn from.
        held_out: the sequences to validate on; None where nothing is held out or validated.
    """

    corpus: Corpus
    training: SampleStream
    held_out: HeldOutStream | None


def open_text(run: Run) -> RunText:
    """Open what a run reads.

    Raises:
        DataError: the corpus cannot be read, is not what it is said to be, or is too short.
        UsageError: its documents are to be kept apart and cannot be told.
        RefusedError: it is text, and the model has a tokenizer that would have to read it.
    """
    corpus = open_corpus(run.data, run.model.vocab)
    _refuse_bytes_for_a_tokenizer(run, corpus)
    training, rest = corpus.split(run.data.validation, run.recipe.seq)
    wanted = run.recipe.evaluate_batches
    held_out = HeldOutStream(_stream(run, rest), wanted) if rest and wanted else None
    return RunText(corpus, _stream(run, training), held_out)


def _stream(run: Run, corpus: Corpus) -> SampleStream:
    return SampleStream(
        corpus,
        seq=run.recipe.seq,
        batch=run.recipe.batch,
        seed=run.recipe.seed,
        document_mask=run.data.document_mask,
    )


def _refuse_bytes_for_a_tokenizer(run: Run, corpus: Corpus) -> None:
    """Text is read as bytes, which are words of no model but one that was trained on bytes."""
    if not run.weights or not corpus.is_text or run.data.trust:
        return
    found = next((name for name in TOKENIZERS if (Path(run.weights) / name).exists()), "")
    if found or run.model.vocab != NUM_BYTES:
        reason = f"has a tokenizer ({found})" if found else f"knows {run.model.vocab} ids"
        raise RefusedError(
            f"the model in {run.weights} {reason}, and {corpus.name} would be read as bytes: give "
            "token ids made by its tokenizer (.npy, .bin), or data.trust=true where it was "
            "trained on bytes"
        )
