"""Weights written by Transformers, read by us, and back again.

The folders in `data/` were written by Transformers 5.24 from random weights; `expected.safetensors`
in each holds tokens and the logits it gave for them (see benchmarks/versus_transformers.py).
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.core.errors import CheckpointError, PhalanxError, RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.batches import IGNORED, Batch
from phalanx.trainer.engine.batching import micro_batches
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.model import huggingface
from phalanx.trainer.model.families import (
    GPT2,
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    STARCODER2,
)
from phalanx.trainer.model.family import Family
from phalanx.trainer.model.huggingface import export_hf, import_hf
from phalanx.trainer.model.init import notes_on_weights
from phalanx.trainer.model.inventory import declarations
from phalanx.trainer.model.parameters import WHOLE, Box, Declaration, Initial, Share
from phalanx.trainer.parallel.mesh import build_mesh

DATA = Path(__file__).parent / "data"
FOLDERS = [
    "llama-gqa-untied",
    "llama-tied",
    "gpt2",
    "mistral",
    "qwen2",
    "qwen3",
    "starcoder2",
    "mixtral",
    "qwen3-moe",
    "llama3",
    "linear",
    "dynamic",
    "yarn",
    "mistral-window",
    "qwen2-window",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi3",
    "phi3-partial",
    "neox",
    "deepseek2",
    "deepseek3",
]
LLAMA_SHAPE = ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=40)
GPT_SHAPE = ModelShape(
    layers=2,
    hidden=16,
    heads=4,
    vocab=40,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=32,
    bias=True,
    tied=True,
)


def random_weights(shape: ModelShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {d.name: torch.randn(d.shape, generator=generator) for d in declarations(shape)}


def whole(declaration: Declaration) -> Box:
    return declaration.box()


def engine_from(shape: ModelShape, source: Callable[[Declaration, Box], Tensor]) -> Engine:
    run = Run(model=shape, layout=Layout(mb=2), recipe=Recipe(seq=12, batch=2))
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    if isinstance(source, huggingface.Weights):
        for router in engine.balancer.routers:
            if (bias := source.router_bias(int(router.prefix.split(".")[1]))) is not None:
                router.bias.copy_(bias)
    for unit in engine.units:
        unit.unit.fill(source)
    return engine


def logits_of(engine: Engine, tokens: Tensor) -> Tensor:
    """Batch first, [b, s, V]."""
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    targets = np.full(tokens.shape, IGNORED)
    batch = Batch(tokens=tokens.numpy(), targets=targets, positions=positions, documents=None)
    (micro_batch,) = micro_batches(engine, 0, batch)
    logits = engine.forward_executor(1, *tokens.shape).infer(micro_batch)
    assert logits is not None
    return logits.transpose(0, 1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_logits_are_those_of_transformers(folder: str) -> None:
    shape, weights = import_hf(DATA / folder)
    expected = load_file(DATA / folder / "expected.safetensors")
    logits = logits_of(engine_from(shape, weights), expected["tokens"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_transformers_wrote_comes_back_bit_by_bit(folder: str, tmp_path: Path) -> None:
    shape, weights = import_hf(DATA / folder)
    declared = {d.name: d for d in declarations(shape)}

    def weight(name: str) -> Tensor:
        if name.endswith("router.bias"):
            return weights.router_bias(int(name.split(".")[1]))
        return weights(declared[name], whole(declared[name]))

    export_hf(weight, shape, tmp_path / "out", origin=DATA / folder)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs: dict[str, Tensor] = {}
    for file in sorted((DATA / folder).glob("model*.safetensors")):
        theirs |= load_file(file)
    assert ours.keys() == theirs.keys()
    # Gemma stores the scale of a norm less 1, which takes its last bits where it is small
    room = 2.0**-23 if folder.startswith("gemma") else 0.0
    assert all((ours[name] - theirs[name]).abs().max() <= room for name in ours)


@given(
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4)]),
    tied=st.booleans(),
    bias=st.booleans(),
    parts=st.integers(1, 3),
    family=st.sampled_from([LLAMA, GPT2, QWEN2, QWEN3, STARCODER2, MIXTRAL, QWEN3_MOE]),
)
@settings(max_examples=25, deadline=None)
def test_any_box_of_what_was_written_is_read_back(
    heads: tuple[int, int], tied: bool, bias: bool, parts: int, family: Family, tmp_path_factory
) -> None:
    if family is GPT2:
        shape = replace(GPT_SHAPE, tied=tied)
    else:
        shape = replace(LLAMA_SHAPE, heads=heads[0], kv_heads=heads[1], tied=tied, **family.kind)
    if family is LLAMA:
        shape = replace(shape, bias=bias)
    if family in (MIXTRAL, QWEN3_MOE):
        shape = replace(shape, experts=3, top_k=2, moe_ffn=24 if family is MIXTRAL else 10)
    written = random_weights(shape)
    folder = tmp_path_factory.mktemp("hf") / "out"
    assert export_hf(written.__getitem__, shape, folder) is family
    read_shape, weights = import_hf(folder)
    assert read_shape == shape
    for declaration in declarations(shape):
        for index in range(parts):
            expert = Share(3, index) if parts == 3 else WHOLE
            box = declaration.box(Share(parts, index), expert)
            cut = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(weights(declaration, box), written[declaration.name][cut])


def test_a_large_model_is_written_as_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "FILE_BYTES", 4000)
    written = random_weights(LLAMA_SHAPE)
    export_hf(written.__getitem__, LLAMA_SHAPE, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    _, weights = import_hf(tmp_path / "out")
    for declaration in declarations(LLAMA_SHAPE):
        assert torch.equal(weights(declaration, whole(declaration)), written[declaration.name])


def test_weights_in_bf16_are_read_as_fp32(tmp_path: Path) -> None:
    written = random_weights(LLAMA_SHAPE)
    export_hf(written.__getitem__, LLAMA_SHAPE, tmp_path / "out", torch.bfloat16)
    _, weights = import_hf(tmp_path / "out")
    declaration = next(declarations(LLAMA_SHAPE))
    values = weights(declaration, whole(declaration))
    assert values.dtype == torch.float32
    assert torch.equal(values, written[declaration.name].bfloat16().float())


def test_a_model_saved_without_its_head_is_read_too(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "gpt2", tmp_path / "gpt2")
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    shape, weights = import_hf(folder)
    declaration = next(declarations(shape))
    assert torch.equal(weights(declaration, whole(declaration)), bare["wte.weight"])


def test_a_model_that_no_family_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    shape = replace(LLAMA_SHAPE, positions="learned")
    with pytest.raises(RefusedError, match="it has llama"):
        export_hf(random_weights(shape).__getitem__, shape, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RefusedError, match="choose another folder"):
        export_hf(random_weights(LLAMA_SHAPE).__getitem__, LLAMA_SHAPE, tmp_path)


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    weights = {name: value[:-1] for name, value in random_weights(LLAMA_SHAPE).items()}
    with pytest.raises(CheckpointError, match=r"embedding.weight has shape \(39, 16\)"):
        export_hf(weights.__getitem__, LLAMA_SHAPE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not known; it can be llama, gpt2, mistral"),
        ({"hidden_act": "relu"}, "hidden_act=relu is not known .* it can be silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope is not known"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_type=su"),
        ({"attention_gate": True}, "attention_gate=True is not known for llama models"),
        ({"mlp_bias": True}, "mlp_bias=True is not known"),
    ],
)
def test_other_arithmetic_is_refused(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama-gqa-untied", tmp_path / "llama")
    change(folder, **keys)
    with pytest.raises(RefusedError, match=message):
        import_hf(folder)


@pytest.mark.parametrize(
    ("name", "keys", "window"),
    [
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 48}, 48),
        ("mistral", {}, 4096),
        ("qwen2", {"sliding_window": 48}, None),
        ("qwen2", {"sliding_window": 48, "use_sliding_window": True}, 48),
        ("qwen3", {"use_sliding_window": True}, 4096),
        ("starcoder2", {}, None),
        ("llama-tied", {"sliding_window": 48}, None),
    ],
)
def test_a_window_is_found_where_a_family_has_one(
    tmp_path: Path, name: str, keys: dict[str, object], window: int | None
) -> None:
    folder = shutil.copytree(DATA / name, tmp_path / name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("sliding_window", "layer_types", "max_window_layers"):
        config.pop(key, None)
    path.write_text(json.dumps(config | keys))
    shape, _ = import_hf(folder)
    assert shape.window == (window or 0)


def test_layers_that_see_all_tokens_follow_a_rule_or_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "mistral-window", tmp_path / "mistral")
    near, far = "sliding_attention", "full_attention"
    change(folder, layer_types=[near, far, near, far])
    shape, _ = import_hf(folder)
    assert [shape.window_of(layer) for layer in range(4)] == [5, 0, 5, 0]
    change(folder, layer_types=[far, far, near, near])
    shape, _ = import_hf(folder)
    assert [shape.window_of(layer) for layer in range(4)] == [0, 0, 5, 5]
    change(folder, layer_types=[near, far, far, near])
    with pytest.raises(RefusedError, match="layer_types follow no rule"):
        import_hf(folder)


def test_what_evens_out_experts_comes_along(tmp_path: Path) -> None:
    shape, weights = import_hf(DATA / "deepseek3")
    biases = {layer: weights.router_bias(layer) for layer in range(shape.layers)}
    assert biases[0] is None
    assert all(biases[layer].abs().min() > 0 for layer in (1, 2, 3))
    values = {d.name: weights(d, d.box()) for d in declarations(shape)}
    values |= {f"blocks.{layer}.router.bias": biases[layer] for layer in (1, 2, 3)}
    export_hf(values.__getitem__, shape, tmp_path / "out")
    _, again = import_hf(tmp_path / "out")
    torch.testing.assert_close(again.router_bias(2), biases[2])


def test_a_size_that_the_configuration_lacks_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama-tied", tmp_path / "llama")
    change(folder, hidden_size=None)
    with pytest.raises(UsageError, match="hidden_size=None"):
        import_hf(folder)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama-tied", tmp_path / "llama")
    change(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.2.input_layernorm.weight"):
        import_hf(folder)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama-tied", tmp_path / "llama")
    change(folder, vocab_size=41)
    with pytest.raises(CheckpointError, match=r"has shape \(40, 16\); .* it has \(41, 16\)"):
        import_hf(folder)


def stored(folder: Path, **tensors: Tensor) -> Path:
    """The folder with some tensors more, or others."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(path) | named, path)
    return folder


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama-tied", tmp_path / "llama")
    stored(folder, model__norm__weight=torch.ones(16, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=r"norm\.weight in .* is I32; weights are read"):
        import_hf(folder)


def test_tensors_without_a_place_are_told_but_for_known_buffers(tmp_path: Path) -> None:
    folder = str(shutil.copytree(DATA / "llama-tied", tmp_path / "llama"))
    assert notes_on_weights(folder) == []
    ones = torch.ones(2)
    stored(Path(folder), model__rotary_emb__inv_freq=ones, lm_head__weight=ones.clone())
    assert notes_on_weights(folder) == []
    stored(Path(folder), vision__tower=ones, vision__head=ones.clone())
    (note,) = notes_on_weights(folder)
    assert note.endswith("without a place in the model, left out: vision.head, vision.tower")


def test_what_goes_with_the_weights_comes_along(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "mistral", tmp_path / "mistral")
    change(folder, sliding_window=4096, eos_token_id=2, bos_token_id=1, max_position_embeddings=64)
    companions = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for name in companions:
        (folder / name).write_text(name)
    (folder / "README.md").write_text("of the model before")
    shape, _ = import_hf(folder)
    out = tmp_path / "out"
    export_hf(random_weights(shape).__getitem__, shape, out, torch.float32, folder)
    weights = {"config.json", "model.safetensors"}
    assert {file.name for file in out.iterdir()} == {*weights, *companions}
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "mistral"
    assert config["sliding_window"] == 4096
    assert [config[key] for key in ("bos_token_id", "eos_token_id")] == [1, 2]
    assert import_hf(out)[0] == shape


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "cannot read .*config.json: No such file"),
        ("config.json", "{", "is not JSON"),
        ("model.safetensors", None, "is missing"),
        ("model.safetensors", "nonsense", "is not a safetensors file"),
    ],
)
def test_a_broken_folder_is_one_clear_line(
    file: str, text: str | None, message: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(DATA / "llama-tied", tmp_path / "llama")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(PhalanxError, match=message) as caught:
        import_hf(folder)
    assert "\n" not in str(caught.value)


def test_initial_values_and_a_folder_fill_a_unit_alike() -> None:
    source = Initial(seed=3, std=0.02, layers=2)
    engine = engine_from(LLAMA_SHAPE, source)
    unit = engine.units[1].unit
    slot = unit.slots[0]
    assert torch.equal(
        unit.weights[slot.start : slot.stop], source(slot.declaration, slot.box).flatten()
    )


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/tmp/outside.safetensors", "a/b.safetensors", "..", "", 3, None],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, file: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "llama-tied" / "config.json").read_text())
    (tmp_path / "outside.safetensors").write_bytes(b"")
    index = {"weight_map": {"lm_head.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"weights lie in .safetensors files of the same"):
        import_hf(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": []}', '{"weight_map": 3}'])
def test_an_index_that_is_none_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text((DATA / "llama-tied" / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PhalanxError, match=r"index.json.* is not JSON|is no table"):
        import_hf(tmp_path)


@pytest.mark.parametrize(
    ("source", "key", "message"),
    [
        ("llama-tied", "num_hidden_layers", "1,000,000,000 layers, and the files beside it hold"),
        ("mixtral", "num_local_experts", "1,000,000,000 experts, and the files beside it hold"),
        ("llama-tied", "vocab_size", "has shape .* by its config.json it has"),
        ("llama-tied", "intermediate_size", "has shape .* by its config.json it has"),
    ],
)
def test_absurd_sizes_are_refused_at_once(
    tmp_path: Path, source: str, key: str, message: str
) -> None:
    folder = shutil.copytree(DATA / source, tmp_path / "model")
    change(folder, **{key: 1_000_000_000})
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder)
    assert time.perf_counter() - start < 1
