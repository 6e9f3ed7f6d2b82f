"""manifest.json: what a checkpoint holds and what its files must read back as, itself included.

The last line is the sha256 of every byte before it, so a manifest knows when it was damaged.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.disk import Written, open_plain
from phalanx.trainer.checkpoint.index import Stored, matching, whole
from phalanx.trainer.checkpoint.names import MANIFEST, SHARD

SCHEMA = 1
MOST_BYTES = 1 << 30  # of a manifest; that of 16,384 ranks has a tenth of it

_TAIL = b'"sha256": "%s"\n}\n'
_TAIL_BYTES = len(_TAIL % (b"0" * 64))
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 300  # letters of what is wrong


class DamagedError(CheckpointError):
    """The checkpoint is not what was written; an older one may be."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds.

    Attributes:
        step: after how many optimizer steps it was taken.
        state: the small things that a run needs to go on: data position, seed, layout, ...
        files: size and sha256 of every shard, by file name.
        stored: which tensor of which file holds which elements.
    """

    step: int
    state: dict[str, Any]
    files: dict[str, Written]
    stored: tuple[Stored, ...]

    def encode(self) -> bytes:
        """The bytes of manifest.json, one file or piece a line."""
        files = (
            f"{json.dumps(name)}: {json.dumps(file._asdict())}" for name, file in self.files.items()
        )
        body = (
            f'{{\n"schema": {SCHEMA},\n"step": {self.step},\n"state": {encode_state(self.state)},\n'
            f'"files": {{\n{_lines(files)}\n}},\n'
            f'"pieces": [\n{_lines(json.dumps(s.to_json()) for s in self.stored)}\n],\n'
        ).encode()
        return body + _TAIL % hashlib.sha256(body).hexdigest().encode()

    @classmethod
    def decode(cls, text: bytes) -> "Manifest":
        """Read what `encode` wrote.

        Raises:
            DamagedError: not one byte may differ from what was written.
            CheckpointError: it is intact, but from another version of Phalanx.
        """
        body, tail = text[:-_TAIL_BYTES], text[-_TAIL_BYTES:]
        if tail != _TAIL % hashlib.sha256(body).hexdigest().encode():
            raise DamagedError(f"{MANIFEST} does not match its own checksum")
        try:
            table = strict_json(text)
            if table["schema"] == SCHEMA:
                return cls._from_json(table)
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{MANIFEST} is malformed: {shorter(repr(error))}") from error
        raise CheckpointError(
            f"{MANIFEST} has schema {shorter(str(table['schema']))}; this version of Phalanx reads "
            f"{SCHEMA}. Use the version that wrote it"
        )

    @classmethod
    def _from_json(cls, table: Mapping[str, Any]) -> "Manifest":
        files = {
            name: Written(whole(file["bytes"]), matching(_SHA256, file["sha256"]))
            for name, file in table["files"].items()
        }
        stored = tuple(Stored.from_json(row) for row in table["pieces"])
        for name in {*files, *(entry.file for entry in stored)}:
            if name not in files or not SHARD.fullmatch(name):
                raise ValueError(f"file {name!r}")
        step, state = whole(table["step"]), table["state"]
        if not isinstance(state, dict):
            raise TypeError("state is no table")
        if not 0 <= step < 10**18 or state.get("step", step) != step:
            raise ValueError(f"step {step}, and {state.get('step')} in state")
        return cls(step, state, files, stored)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`.

    Raises:
        DamagedError: it is missing or was changed.
        CheckpointError: it is from another version of Phalanx, or may not be read.
    """
    try:
        with open_plain(path / MANIFEST) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise DamagedError(f"{MANIFEST} has {size:,} bytes; no manifest is as large")
            return Manifest.decode(file.readall())
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError) -> CheckpointError:
    """What a failed read means: no permission says nothing about the data, all else is damage."""
    name = Path(str(error.filename)).name
    if isinstance(error, PermissionError):
        return CheckpointError(f"cannot read {error.filename}; give this user the right to")
    if isinstance(error, FileNotFoundError):
        return DamagedError(f"{name} is missing")
    return DamagedError(f"{name} cannot be read ({error.strerror})")


def strict_json(text: bytes) -> Any:
    """Read JSON that one of our files holds: finite numbers only, and no deep nesting.

    Raises:
        ValueError: it is something else.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def shorter(text: str) -> str:
    """A text of which a message shows no more than a line can hold."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encode_state(state: Mapping[str, Any]) -> str:
    """The state as one line of JSON that reads back as the same values.

    Raises:
        CheckpointError: naming the first key whose value would not.
    """
    for key, value in state.items():
        try:
            same = json.loads(json.dumps({key: value}, allow_nan=False)) == {key: value}
        except (TypeError, ValueError):
            same = False
        if not same:
            raise CheckpointError(
                f"the state to be saved has {key!r} = {value!r}, which JSON does not give back; "
                f"use texts, finite numbers, true, false, None, lists, and tables with text keys"
            )
    return json.dumps(state)


def _lines(rows: Iterable[str]) -> str:
    return ",\n".join(rows)
