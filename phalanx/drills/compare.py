"""Whether a run that was injured came to what the undisturbed one came to, bit for bit."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.core.errors import PhalanxError
from phalanx.trainer.checkpoint import newest

_OF_A_START = ("fence",)  # parts of a checkpoint's state that differ from start to start


@dataclass(frozen=True)
class Fingerprint:
    """What a run came to.

    Attributes:
        tensors: sha256 over parameters, optimizer, biases and scales of the last checkpoint.
        state: all else in it: steps, updates, loss scale, and what decides which samples come.
        steps: those that the metrics hold, in order.
        losses: sha256 over loss, norm and learning rate of each, to the last bit.
    """

    tensors: str
    state: str
    steps: tuple[int, ...]
    losses: str

    def differences(self, other: "Fingerprint") -> list[str]:
        """What is another in the other run; nothing where both are the same."""
        names = {
            "tensors": "the last checkpoint's tensors",
            "state": "the last checkpoint's state",
            "steps": "the steps, each once",
            "losses": "the losses",
        }
        return [what for key, what in names.items() if getattr(self, key) != getattr(other, key)]


def fingerprint(run: Path) -> Fingerprint:
    """Read what a run came to.

    Args:
        run: its folder.

    Raises:
        PhalanxError: it has no checkpoint, or its newest one is damaged.
    """
    lines = [json.loads(line) for line in _lines(run / "metrics.jsonl")]
    checkpoint = newest(run / "checkpoints", _refuse)
    if checkpoint is None:
        raise PhalanxError(f"{run} has no checkpoint")
    digest = hashlib.sha256()
    with checkpoint:
        for name in sorted(checkpoint.names()):
            for field in sorted(checkpoint.fields(name)):
                tensor = checkpoint.tensor(name, field).contiguous()
                digest.update(f"{name} {field} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
        state = {k: v for k, v in checkpoint.state.items() if k not in _OF_A_START}
    return Fingerprint(
        tensors=digest.hexdigest(),
        state=json.dumps(state, sort_keys=True),
        steps=tuple(line["step"] for line in lines),
        losses=hashlib.sha256("\n".join(map(_bits, lines)).encode()).hexdigest(),
    )


def _bits(line: dict[str, Any]) -> str:
    values = (line["loss"], line["grad_norm"], line["lr"])
    return " ".join("null" if value is None else float(value).hex() for value in values)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from file


def _refuse(text: str) -> None:
    raise PhalanxError(text)
