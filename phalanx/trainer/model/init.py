"""Initial weights: values drawn from the seed, or the weights of a folder."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.core.errors import UsageError, shorten
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.trainer.engine.unit import Source
from phalanx.trainer.model.huggingface import import_hf
from phalanx.trainer.model.parameters import Initial, initial_values

_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def init_source(run: Run) -> Source:
    """The values of any box of any parameter before the first step, the same under every layout.

    Raises:
        UsageError: the run's folder of weights is none, or of another model than the run's.
        CheckpointError: tensors are missing.
    """
    if not run.weights:
        recipe = Initial(run.recipe.seed, run.recipe.init_std, run.model.layers)
        return partial(initial_values, recipe=recipe)
    shape, weights = import_hf(Path(run.weights))
    _require_agreement(run.weights, shape, asdict(run.model))
    return weights


def router_biases(run: Run) -> Mapping[int, Tensor]:
    """What evens out the load of experts at the first step, by layer: fp64 [E]; zero where absent.

    Raises:
        UsageError: the run's folder of weights is none.
    """
    if not run.weights or not run.model.is_moe:
        return {}
    _, weights = import_hf(Path(run.weights))
    found = {layer: weights.router_bias(layer) for layer in range(run.model.layers)}
    return {layer: bias for layer, bias in found.items() if bias is not None}


def shape_of_weights(directory: str, said: Mapping[str, Any]) -> ModelShape:
    """The shape of the model in a folder of weights.

    Args:
        directory: as Hugging Face Transformers writes them.
        said: what a run file says of the model besides.

    Raises:
        UsageError: the two contradict each other; the message names the key.
    """
    shape, _ = import_hf(Path(directory))
    _require_agreement(directory, shape, said)
    return shape


def notes_on_weights(directory: str) -> list[str]:
    """What is odd about a folder of weights and does not keep training from starting.

    Only names are looked at, not values. Buffers that older versions of Transformers stored, and
    the head of a model that shares it with its embedding, are not odd.
    """
    shape, weights = import_hf(Path(directory))
    odd = [name for name in weights.unused if not name.endswith(_BUFFERS)]
    if shape.tied:
        odd = [name for name in odd if name != "lm_head.weight"]
    if not odd:
        return []
    named = f"{len(odd)} tensor{'' if len(odd) == 1 else 's'} without a place in the model"
    return [f"{directory} has {named}, left out: {shorten(odd, 3)}"]


def _require_agreement(directory: str, shape: ModelShape, said: Mapping[str, Any]) -> None:
    for key, value in said.items():
        found = getattr(shape, key, value)
        if value != found:
            raise UsageError(
                f"model.{key} is {value}, and in {directory} it is {found}; leave out model.{key}"
            )
