"""Tokenizer files beside exported weights, so that the folder alone reads and writes text."""

import json
import shutil
from pathlib import Path

from phalanx.data.tokenizers import CARRIED

_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "spiece.model", *CARRIED)
_NUM_BYTES = 256


def write_tokenizer(home: Path | None, folder: Path) -> None:
    """Put a tokenizer beside weights, unless one is there.

    Args:
        home: folder of the tokenizer; None where ids are bytes of text.
        folder: of the weights.

    Raises:
        OSError: it cannot be written.
    """
    if any((folder / name).exists() for name in _FILES[:4]):
        return
    if home is None:
        _write(folder / "tokenizer.json", bytes_tokenizer())
    else:
        for name in (*_FILES, *(file.name for file in home.glob("*.tiktoken"))):
            if (home / name).is_file():
                shutil.copyfile(home / name, folder / name)
    if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def bytes_tokenizer() -> dict[str, object]:
    """A `tokenizer.json` whose ids are the bytes of UTF-8: byte-level BPE without a merge.

    Bytes stand as the letters that GPT-2 gives them (Radford et al. 2019, encoder.py).
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }


def _letters() -> list[str]:
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, others = [], 0
    for byte in range(_NUM_BYTES):
        letters.append(chr(byte if byte in printed else 256 + others))
        others += byte not in printed
    return letters


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
