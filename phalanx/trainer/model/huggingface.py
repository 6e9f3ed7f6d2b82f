"""Model weights in and out: folders as Hugging Face Transformers writes and reads them.

A folder holds `config.json` and safetensors files, one or, with an index, several. Which tensor is
which is said in families.py.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from phalanx.trainer.model.families import family_called, family_of
from phalanx.trainer.model.family import Family, Place
from phalanx.trainer.model.inventory import declarations
from phalanx.trainer.model.parameters import Box, Declaration

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000  # a larger model is written as several files

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_COMPANIONS = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "spiece",
    "tiktoken",
    "chat_template",
    "generation_config",
)  # what their names begin with
_FILE = re.compile(r"[\w.+=@-][\w .+=@-]*\.safetensors")  # in the folder itself
_READABLE = ("F64", "F32", "BF16", "F16")


def import_hf(directory: Path) -> tuple[ModelShape, "Weights"]:
    """Open a folder: the shape of its model, and a reader of any part of its weights.

    Raises:
        UsageError: it is no such folder.
        RefusedError: the model is of a kind that is not trained here.
        CheckpointError: tensors are missing, or of another shape than the model's.
    """
    family, config = _described(directory)
    shape = family.shape(config)
    return shape, Weights(directory, family, shape)


def _described(directory: Path) -> tuple[Family, dict[str, Any]]:
    config = _read_json(directory / CONFIG)
    return family_called(str(config.get("model_type"))), config


class Weights:
    """Reads any part of the weights of a folder, and nothing else of it.

    Called like `initial_values`, so that training can start from it.

    Attributes:
        unused: names of tensors in the folder that the model has no place for.
    """

    def __init__(self, directory: Path, family: Family, shape: ModelShape) -> None:
        """Find each tensor's file.

        Raises:
            CheckpointError: tensors or files are missing, or tensors are not those of the model.
        """
        self.directory, self.family, self.shape = directory, family, shape
        self._open: dict[str, Any] = {}
        self._files = self._index()
        self._require_as_many(shape)
        wanted = dict(_expected(family, shape))
        missing = sorted(name for name in wanted if self._stored_name(name) not in self._files)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{directory} has no tensor {missing[0]}{more}; "
                f"a {family.architecture} has {len(wanted)} tensors"
            )
        for name, expected in wanted.items():
            self._require_usable(name, expected)
        known = {*map(self._stored_name, wanted), *map(self._stored_name, self._bias_names())}
        self.unused = tuple(sorted(self._files.keys() - known))

    def _bias_names(self) -> list[str]:
        if not self.family.router_bias:
            return []
        layers = filter(self.shape.routes, range(self.shape.layers))
        return [self.family.router_bias.format(layer) for layer in layers]

    def router_bias(self, layer: int) -> Tensor | None:
        """What evens out the load of the experts of a layer, fp64 [E]; None where nothing does."""
        name = self.family.router_bias.format(layer)
        if not name or self._stored_name(name) not in self._files:
            return None
        values: Tensor = self._slice(name)[:]
        return values.double()

    def __call__(self, declaration: Declaration, box: Box) -> Tensor:
        """The values of one box of a parameter.

        Returns:
            float32 or float64, shape `box.sizes`, on the CPU.
        """
        places = self.family.places(declaration, self.shape)
        if places[0].expert is None:
            return self._values(places[0], declaration.shape, box)
        one = Box(box.offsets[1:], box.sizes[1:])
        mine = places[box.offsets[0] : box.offsets[0] + box.sizes[0]]
        return torch.stack([self._values(place, declaration.shape[1:], one) for place in mine])

    def _values(self, place: Place, shape: tuple[int, ...], box: Box) -> Tensor:
        """A box of a tensor of ours that one of theirs holds."""
        stored = self._slice(place.name)
        if place.rows:
            return self._rows(stored, place, box)
        first = (place.part * shape[0], *(0 for _ in shape[1:]))
        cut = tuple(
            slice(start + offset, start + offset + size)
            for start, offset, size in zip(first, box.offsets, box.sizes, strict=True)
        )
        values: Tensor = stored[cut[::-1]].t() if place.transposed else stored[cut]
        values = values if values.dtype == torch.float64 else values.float()
        return values + place.shift if place.shift else values

    def _rows(self, stored: Any, place: Place, box: Box) -> Tensor:
        """A box of which every row lies somewhere else in theirs."""
        assert place.rows is not None
        wanted = place.rows.index[box.offsets[0] : box.offsets[0] + box.sizes[0]]
        if not len(wanted):
            return torch.empty(box.sizes)
        first, last = int(wanted.min()), int(wanted.max()) + 1
        ends = zip(box.offsets[1:], box.sizes[1:], strict=True)
        rest = [slice(offset, offset + size) for offset, size in ends]
        values: Tensor = stored[(slice(first, last), *rest)][torch.from_numpy(wanted - first)]
        return values if values.dtype == torch.float64 else values.float()

    def _require_as_many(self, shape: ModelShape) -> None:
        """Every block and every expert has a tensor at least: a count beyond them is a mistake."""
        for key, count in (("layers", shape.layers), ("experts", shape.experts)):
            if count > len(self._files):
                raise CheckpointError(
                    f"{self.directory / CONFIG} says {count:,} {key}, and the files beside it hold "
                    f"{len(self._files):,} tensors; one of them belongs to another model"
                )

    def _require_usable(self, name: str, expected: tuple[int, ...]) -> None:
        """Look at the header alone, so that a start and what only asks about it agree."""
        stored = self._slice(name)
        if tuple(stored.get_shape()) != expected:
            raise CheckpointError(
                f"{self._stored_name(name)} in {self.directory} has shape "
                f"{tuple(stored.get_shape())}; by its {CONFIG} it has {expected}"
            )
        if stored.get_dtype() not in _READABLE:
            raise CheckpointError(
                f"{self._stored_name(name)} in {self.directory} is {stored.get_dtype()}; "
                f"weights are read from {', '.join(_READABLE)}"
            )

    def _slice(self, name: str) -> Any:
        stored_name = self._stored_name(name)
        file = self._file(self._files[stored_name])
        try:
            return file.get_slice(stored_name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{stored_name} is not in {self._files[stored_name]} of {self.directory}, "
                f"where {INDEX} says it is"
            ) from error

    def _stored_name(self, name: str) -> str:
        """The name in the files: a model saved without its head leaves out the first word."""
        return name if name in self._files else name.partition(".")[2]

    def _index(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.directory / INDEX).is_file():
            index = _read_json(self.directory / INDEX).get("weight_map", {})
            if not isinstance(index, dict):
                raise CheckpointError(f"{self.directory / INDEX}: weight_map is no table of files")
            for file in index.values():
                if not isinstance(file, str) or not _FILE.fullmatch(file):
                    raise CheckpointError(
                        f"{self.directory / INDEX} names {str(file)[:80]!r}; weights lie in "
                        ".safetensors files of the same folder"
                    )
            return index
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


def _expected(family: Family, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of theirs with its shape."""
    for declaration in declarations(shape):
        for place in family.places(declaration, shape):
            ours = declaration.shape if place.expert is None else declaration.shape[1:]
            yield place.name, place.whole(ours)


def export_hf(
    weight: Callable[[str], Tensor],
    shape: ModelShape,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    origin: Path | None = None,
) -> Family:
    """Write a folder that Transformers loads; it appears complete or not at all.

    Args:
        weight: gives each whole parameter by its global name; called once for each.
        shape: of the model.
        directory: to make; it may exist only if it is empty.
        dtype: of the weights in the files.
        origin: the folder that training began from: its tokenizer and what else is no weight come
            along, if it is still there.

    Returns:
        The architecture that loads it.

    Raises:
        RefusedError: no family of Transformers has a model of this shape; the folder is in use.
        PhalanxError: it cannot be written.
    """
    origin = origin if origin is not None and (origin / CONFIG).is_file() else None
    family = _family_for(shape, origin)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(f"{directory} exists and is not empty; choose another folder")
    draft = directory.absolute().with_name(f".{directory.absolute().name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        _write_weights(weight, family, shape, draft, dtype)
        config = family.configuration(shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        if origin is not None:
            config |= _carried_over(origin, family)
            _copy_companions(origin, draft)
        _write_json(draft / CONFIG, config)
        draft.rename(directory)
    except (OSError, SafetensorError) as error:
        raise PhalanxError(
            f"cannot write {directory}: {error}; make room there or choose another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return family


def _family_for(shape: ModelShape, origin: Path | None) -> Family:
    """The family that the model came from, if it still is of it: several have one arithmetic."""
    if origin is not None:
        before, _ = _described(origin)
        if before.has(shape):
            return before
    return family_of(shape)


def _carried_over(origin: Path, family: Family) -> dict[str, Any]:
    """What a configuration says besides shapes: special tokens."""
    before = _read_json(origin / CONFIG)
    kept = _SPECIAL_TOKENS
    same = before.get("model_type") == family.model_type
    return {key: before[key] for key in kept if key in before} if same else {}


def _copy_companions(origin: Path, folder: Path) -> None:
    """Tokenizer, generation settings, chat template: all that is not weights or configuration."""
    for file in sorted(origin.iterdir()):
        if file.is_file() and file.name != CONFIG and file.name.startswith(_COMPANIONS):
            shutil.copyfile(file, folder / file.name)


def _write_weights(
    weight: Callable[[str], Tensor],
    family: Family,
    shape: ModelShape,
    directory: Path,
    dtype: torch.dtype,
) -> None:
    parts: dict[str, list[PlacedParameter]] = {}
    for declaration in declarations(shape):
        for place in family.places(declaration, shape):
            parts.setdefault(place.name, []).append(PlacedParameter(declaration, place))
    biases = dict(_router_biases(weight, family, shape))
    whole = lru_cache(maxsize=1)(weight)  # of a stack of experts, each in turn
    files = _share_out(parts, dtype)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = WEIGHTS
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _joined(whole, parts[name], dtype) for name in names}
        if number == len(files):
            tensors |= biases
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        total = shape.params() * dtype.itemsize
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _router_biases(
    weight: Callable[[str], Tensor], family: Family, shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """What evens out the load of experts: no parameter, and zero where nothing moved it."""
    for layer in filter(shape.routes, range(shape.layers if family.router_bias else 0)):
        try:
            bias = weight(f"blocks.{layer}.router.bias").float()
        except (KeyError, CheckpointError):
            bias = torch.zeros(shape.experts)
        yield family.router_bias.format(layer), bias.contiguous()


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
        value = value if place.expert is None else value[place.expert]
        values.append((value - place.shift if place.shift else value).to(dtype))
    rows = [place.rows for _, place in parts]
    if rows[0] is not None:
        whole = values[0].new_empty((rows[0].count, *values[0].shape[1:]))
        for value, mine in zip(values, rows, strict=True):
            if mine is not None:
                whole[torch.from_numpy(mine.index)] = value
        return whole
    whole = torch.cat(values)
    return whole.t().contiguous() if parts[0].place.transposed else whole


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; a folder of weights has {CONFIG} in it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a JSON object")
    return document


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
