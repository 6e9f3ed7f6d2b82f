"""What the trainer declares is what the model's shape counts."""

from dataclasses import replace
from math import prod

import pytest

from phalanx.catalog import load
from phalanx.core.model import ModelShape
from phalanx.trainer.model.inventory import declarations

DENSE_V3 = replace(load.model("deepseek-v3"), experts=0, name="deepseek-v3 without experts")


@pytest.mark.parametrize(
    "shape",
    [
        *(load.model(name) for name in ("llama-3.2-1b", "gpt2", "qwen2.5-0.5b", "qwen3-8b")),
        DENSE_V3,
        replace(DENSE_V3, q_lora_rank=0, name="with direct queries"),
    ],
    ids=lambda shape: shape.name,
)
def test_the_declared_parameters_are_those_that_the_shape_counts(shape: ModelShape) -> None:
    assert sum(prod(d.shape) for d in declarations(shape)) == shape.params()
