"""Model weights in and out: folders as Hugging Face Transformers writes and reads them.

A folder holds `config.json` and safetensors files, one or, with an index, several. Which tensor is
which is said in families.py.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.core.errors import CheckpointError, PhalanxError, RefusedError, UsageError
from phalanx.core.model import ModelShape
from phalanx.trainer.model.families import Family, Place, family_called, family_of
from phalanx.trainer.model.inventory import declarations
from phalanx.trainer.model.parameters import Box, Declaration

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000  # a larger model is written as several files

_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def import_hf(directory: Path) -> tuple[ModelShape, "Weights"]:
    """Open a folder: the shape of its model, and a reader of any part of its weights.

    Raises:
        UsageError: it is no such folder.
        RefusedError: the model is of a kind that is not trained here.
        CheckpointError: tensors are missing.
    """
    config = _read_json(directory / CONFIG)
    family = family_called(str(config.get("model_type")))
    shape = family.shape(config)
    return shape, Weights(directory, family, shape)


class Weights:
    """Reads any part of the weights of a folder, and nothing else of it.

    Called like `initial_values`, so that training can start from it.
    """

    def __init__(self, directory: Path, family: Family, shape: ModelShape) -> None:
        """Find each tensor's file.

        Raises:
            CheckpointError: tensors or files are missing.
        """
        self.directory, self.family = directory, family
        self._open: dict[str, Any] = {}
        self._files = self._index()
        wanted = {place.name for d in declarations(shape) for place in family.places(d)}
        missing = sorted(name for name in wanted if self._stored_name(name) not in self._files)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{directory} has no tensor {missing[0]}{more}; "
                f"a {family.architecture} has {len(wanted)} tensors"
            )

    def __call__(self, declaration: Declaration, box: Box) -> Tensor:
        """The values of one box of a parameter.

        Returns:
            float32 or float64, shape `box.sizes`, on the CPU.

        Raises:
            CheckpointError: the tensor has another shape than the model, or is not of floats.
        """
        places = self.family.places(declaration)
        if places[0].expert is None:
            return self._values(places[0], declaration.shape, box)
        one = Box(box.offsets[1:], box.sizes[1:])
        mine = places[box.offsets[0] : box.offsets[0] + box.sizes[0]]
        return torch.stack([self._values(place, declaration.shape[1:], one) for place in mine])

    def _values(self, place: Place, shape: tuple[int, ...], box: Box) -> Tensor:
        """A box of a tensor of ours that one of theirs holds."""
        stored = self._slice(place.name, place.whole(shape))
        first = (place.part * shape[0], *(0 for _ in shape[1:]))
        cut = tuple(
            slice(start + offset, start + offset + size)
            for start, offset, size in zip(first, box.offsets, box.sizes, strict=True)
        )
        values: Tensor = stored[cut[::-1]].t() if place.transposed else stored[cut]
        if values.dtype not in _READABLE:
            raise CheckpointError(
                f"{place.name} in {self.directory} is {values.dtype}; "
                "weights are read from float32, float64, bfloat16 and float16"
            )
        return values if values.dtype == torch.float64 else values.float()

    def _slice(self, name: str, expected: tuple[int, ...]) -> Any:
        stored_name = self._stored_name(name)
        stored = self._file(self._files[stored_name]).get_slice(stored_name)
        if tuple(stored.get_shape()) != expected:
            raise CheckpointError(
                f"{stored_name} in {self.directory} has shape {tuple(stored.get_shape())}; "
                f"by its {CONFIG} it has {expected}"
            )
        return stored

    def _stored_name(self, name: str) -> str:
        """The name in the files: a model saved without its head leaves out the first word."""
        return name if name in self._files else name.partition(".")[2]

    def _index(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.directory / INDEX).is_file():
            index = _read_json(self.directory / INDEX).get("weight_map", {})
            return {str(name): str(file) for name, file in index.items()}
        return dict.fromkeys(self._file(WEIGHTS).keys(), WEIGHTS)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.directory / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; a folder of weights has {CONFIG} and it")
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
        return self._open[name]


def export_hf(
    weight: Callable[[str], Tensor],
    shape: ModelShape,
    directory: Path,
    dtype: torch.dtype = torch.float32,
) -> Family:
    """Write a folder that Transformers loads; it appears complete or not at all.

    Args:
        weight: gives each whole parameter by its global name; called once for each.
        shape: of the model.
        directory: to make; it may exist only if it is empty.
        dtype: of the weights in the files.

    Returns:
        The architecture that loads it.

    Raises:
        RefusedError: no family of Transformers has a model of this shape; the folder is in use.
        PhalanxError: it cannot be written.
    """
    family = family_of(shape)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(f"{directory} exists and is not empty; choose another folder")
    draft = directory.absolute().with_name(f".{directory.absolute().name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        _write_weights(weight, family, shape, draft, dtype)
        config = family.configuration(shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        _write_json(draft / CONFIG, config)
        draft.rename(directory)
    except (OSError, SafetensorError) as error:
        raise PhalanxError(
            f"cannot write {directory}: {error}; make room there or choose another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return family


def _write_weights(
    weight: Callable[[str], Tensor],
    family: Family,
    shape: ModelShape,
    directory: Path,
    dtype: torch.dtype,
) -> None:
    parts: dict[str, list[PlacedParameter]] = {}
    for declaration in declarations(shape):
        for place in family.places(declaration):
            parts.setdefault(place.name, []).append(PlacedParameter(declaration, place))
    whole = lru_cache(maxsize=1)(weight)  # of a stack of experts, each in turn
    files = _share_out(parts, dtype)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = WEIGHTS
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _joined(whole, parts[name], dtype) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = shape.params() * dtype.itemsize
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


class PlacedParameter(NamedTuple):
    """A parameter of ours, all or some of which makes up all or some of a tensor of theirs."""

    declaration: Declaration
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what goes into theirs."""
        whole = self.declaration.shape
        return whole if self.place.expert is None else whole[1:]


def _share_out(
    parts: Mapping[str, Sequence[PlacedParameter]], dtype: torch.dtype
) -> list[list[str]]:
    """Which tensors go into which file."""
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    for name, held in parts.items():
        size = sum(prod(part.shape) for part in held) * dtype.itemsize
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def _joined(
    weight: Callable[[str], Tensor], parts: Sequence[PlacedParameter], dtype: torch.dtype
) -> Tensor:
    """One tensor of theirs from its parts in order, in memory of its own."""
    values = []
    for declaration, place in parts:
        value = weight(declaration.name)
        if tuple(value.shape) != declaration.shape:
            raise CheckpointError(
                f"{declaration.name} has shape {tuple(value.shape)}; "
                f"a model of these sizes has {declaration.shape}"
            )
        values.append(value if place.expert is None else value[place.expert])
    whole = torch.cat([value.to(dtype) for value in values])
    return whole.t().contiguous() if parts[0].place.transposed else whole


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; a folder of weights has {CONFIG} in it"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a JSON object")
    return document


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
