"""What the newest checkpoint of a run holds, and whether two runs hold the same."""

from pathlib import Path

import pytest
import torch

from phalanx.trainer.checkpoint import newest


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By name and field, of the newest checkpoint that verifies."""
    found = newest(folder / "checkpoints", pytest.fail)
    assert found is not None
    with found:
        keys = [(name, field) for name in found.names() for field in found.fields(name)]
        return {str(key): found.tensor(*key) for key in keys}


def equal(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
