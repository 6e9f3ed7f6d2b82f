"""What a file is, by its first bytes: what is not text must not be learned as text."""

from pathlib import Path

import numpy as np

from phalanx.core.errors import DataError

SIGNATURES = {
    b"\x7fELF": "an executable",
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x1f\x8b": "compressed (gzip)",
    b"\xfd7zXZ\0": "compressed (xz)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x93NUMPY": "a numpy array without the suffix .npy",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF",
    b"GGUF": "a GGUF model",
    b"\x80\x02": "a pickle",
    b"SQLite format 3\0": "a database",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LOOK_AT = 1 << 16  # bytes, at the beginning and in the middle
_MANY_ZEROS, _MANY_CONTROLS, _ENOUGH = 0.1, 0.05, 32
_CONTROLS = np.array([b < 32 and chr(b) not in "\0\t\n\v\f\r\x1b" for b in range(256)])


def refuse_binary(path: Path) -> None:
    """Stop at a file that is no text in UTF-8 or an 8-bit code.

    Zero bytes may be in it: they end documents.

    Raises:
        DataError: saying what it is, and what to do.
    """
    head, middle = _look(path)
    if head.startswith(UTF16) or _is_utf16(head):
        raise DataError(
            f"{path.name} is UTF-16 text, and text is read as the bytes of UTF-8; convert it: "
            f"iconv -f UTF-16 -t UTF-8 {path.name} > text.txt (data.trust=true learns it as it is)"
        )
    what = next((kind for sign, kind in SIGNATURES.items() if head.startswith(sign)), "")
    if _is_safetensors(head):
        what = "a safetensors file: weights are given by model.weights"
    if not what and any(map(_looks_binary, (head, middle))):
        what = "binary"
    if what:
        raise DataError(
            f"{path.name} is not text but {what}; give a text or a file of token ids (.npy, .bin), "
            "or data.trust=true to learn its bytes"
        )


def _look(path: Path) -> tuple[bytes, bytes]:
    with path.open("rb") as file:
        head = file.read(_LOOK_AT)
        file.seek(max(path.stat().st_size // 2, len(head)))
        return head, file.read(_LOOK_AT)


def _is_utf16(head: bytes) -> bool:
    """Latin letters in UTF-16 have a zero in every second byte, and in those alone."""
    values = np.frombuffer(head[: len(head) // 2 * 2], np.uint8).reshape(-1, 2)
    if len(values) < _ENOUGH:
        return False
    low, high = np.sort((values == 0).mean(axis=0))
    return bool(high > 0.4 and low < 0.01)


def _is_safetensors(head: bytes) -> bool:
    size = int.from_bytes(head[:8], "little")
    return head[8:10] == b'{"' and 2 <= size <= 100_000_000


def _looks_binary(text: bytes) -> bool:
    if len(text) < _ENOUGH:
        return False
    values = np.frombuffer(text, np.uint8)
    zeros, controls = (values == 0).mean(), _CONTROLS[values].mean()
    return bool(zeros > _MANY_ZEROS or controls > _MANY_CONTROLS)
