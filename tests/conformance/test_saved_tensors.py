"""The trainer's blocks keep for backward exactly what the ledger says, to the byte.

Autograd is asked which tensors it saves; storages are counted once, parameters not at all. The
process group is torch's fake one, so that one process can be a rank of many.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fake_ranks import fake_mesh
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.message import Axis
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.cost.precision import as_operands
from phalanx.cost.saved import OURS, Saved, block_saved, bytes_per_token, head_saved, kept
from phalanx.dryrun.live_bytes import LiveBytes
from phalanx.oracle.verify import default_case
from phalanx.trainer.engine.batching import micro_batches
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.block import Block
from phalanx.trainer.model.ends import Head
from phalanx.trainer.model.parameters import Share, declared_in
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.context import ContextParallel
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.precision.arithmetic import choose
from phalanx.trainer.precision.dtypes import Dtypes

SEQ = 32
LLAMA = ModelShape(hidden=64, heads=8, kv_heads=4, ffn=192, vocab=96)
GPT = ModelShape(
    hidden=64,
    heads=8,
    vocab=96,
    activation="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
)
QWEN = replace(LLAMA, qk_norm=True, qkv_bias=True)
GEMMA = replace(
    QWEN, norms="both", activation="geglu", window=3, attention_cap=5.0, attention_scale=0.3
)
SINKS = replace(LLAMA, sinks=True, window=3)
NEOX = replace(
    GPT, positions="rope", parallel_branches=True, rotary_share=0.5, activation="gelu-erf"
)
LATENT = replace(
    LLAMA, kv_heads=8, q_lora_rank=24, kv_lora_rank=20, qk_nope=12, qk_rope=6, v_head=14
)
DIRECT = replace(LATENT, q_lora_rank=0, norm="layernorm")
MIXTRAL = replace(LLAMA, experts=4, top_k=2)
DEEPSEEK = replace(
    LATENT,
    experts=8,
    top_k=4,
    moe_ffn=40,
    shared_experts=1,
    routing="sigmoid",
    expert_groups=4,
    groups_kept=2,
    routed_scale=2.5,
)
SHARED = replace(LLAMA, experts=8, top_k=3, moe_ffn=40, shared_experts=2)
PLAIN = replace(LLAMA, experts=4, top_k=1, normalised=False, activation="gelu")
WIDE = ModelShape(hidden=256, heads=4, kv_heads=4, ffn=512, vocab=96)
LAYOUTS = [
    "mb=1",
    "mb=3",
    "mb=3 recompute=selective",
    "tp=2 mb=3",
    "tp=2 sp=off mb=3",
    "tp=4 mb=2 recompute=selective",
    "tp=8 mb=2",
]
PARTS = [
    "mb=2 recompute=norms",
    "mb=2 recompute=activation+core",
    "tp=2 mb=2 recompute=mlp+norms",
    "tp=2 sp=off mb=2 recompute=operators",
    "mb=2 recompute=core+operators+mlp",
]


@contextmanager
def tensor_group(size: int, axis: Axis = "tensor") -> Iterator[Group]:
    if size == 1:
        yield Group(axis, [0], None, Ledger())
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Group(axis, range(size), dist.group.WORLD, Ledger())
    finally:
        dist.destroy_process_group()


def alone() -> Group:
    return Group("tensor", [0], None, Ledger())


def fill(module: nn.Module, tp: int, dtype: torch.dtype) -> None:
    """Give a module the parameters of the first tensor-parallel rank."""
    for declaration, owner, attribute in declared_in(module):
        values = torch.full(declaration.box(Share(tp, 0)).sizes, 0.01, dtype=dtype)
        setattr(owner, attribute, nn.Parameter(values))


def measured(forward: Callable[[], Tensor], module: nn.Module) -> int:
    """Bytes of all storages that autograd saves, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        scale_of_all = x.dim() == 0  # one number of a whole tensor is in nobody's way
        if storage.data_ptr() not in parameters and x.is_floating_point() and not scale_of_all:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        alive.append(forward())
    return sum(storages.values())


def micro_batch(mb: int) -> MicroBatch:
    tokens = torch.zeros(SEQ, mb, dtype=torch.int64)
    return MicroBatch(
        tokens=tokens,
        targets=tokens,
        positions=torch.arange(SEQ).unsqueeze(1).expand(SEQ, mb),
        documents=None,
        samples=torch.arange(mb),
        seq=SEQ,
        step=0,
    )


def predicted(saved: tuple[Saved, ...], layout: Layout) -> float:
    return SEQ * layout.mb * bytes_per_token(kept(saved, layout.recompute), layout)


@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [LLAMA, GPT, QWEN, LATENT, DIRECT, MIXTRAL, DEEPSEEK, PLAIN, GEMMA, SINKS, NEOX],
    ids=[
        *("llama", "gpt", "qwen", "latent", "direct", "mixtral", "deepseek", "plain-experts"),
        *("gemma", "sinks", "neox"),
    ],
)
def test_a_block_keeps_what_the_ledger_says(shape: ModelShape, line: str):
    layout = Layout.parse(line)
    with tensor_group(layout.tp) as group:
        tp = TensorParallel(group, sequence=layout.sequence_parallel)
        block = Block(0, shape, Recipe(), tp)
        block.save_with(SavedTensors(layout.recompute.parts))
        fill(block, layout.tp, torch.float32)
        x = torch.ones(SEQ // tp.sequence_parts, layout.mb, shape.hidden, requires_grad=True)
        found = measured(lambda: block(x, micro_batch(layout.mb)), block)
    ledger = block_saved(shape, 0, SEQ, 4, OURS)
    assert found == predicted(ledger, layout)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize("shape", [LLAMA, GPT, LATENT], ids=["llama", "gpt", "latent"])
def test_a_rank_keeps_of_its_part_of_a_sequence_what_it_would_keep_alone(
    shape: ModelShape, kind: str, recompute: str
):
    layout = Layout(mb=3, recompute=recompute)
    block = Block(0, shape, Recipe(), TensorParallel(alone(), sequence=False))
    block.save_with(SavedTensors(layout.recompute.parts))
    fill(block, 1, torch.float32)
    x = torch.ones(SEQ, layout.mb, shape.hidden, requires_grad=True)
    with tensor_group(4, "context") as group:
        batch = replace(micro_batch(layout.mb), context=ContextParallel(group, kind))
        found = measured(lambda: block(x, batch), block)
    assert found == predicted(block_saved(shape, 0, SEQ, 4, OURS), layout)


@pytest.mark.parametrize("line", PARTS)
@pytest.mark.parametrize(
    "shape",
    [LLAMA, GPT, QWEN, MIXTRAL, SHARED],
    ids=["llama", "gpt", "qwen", "mixtral", "shared-experts"],
)
def test_a_block_lets_go_of_the_parts_that_are_recomputed(shape: ModelShape, line: str):
    layout = Layout.parse(line)
    with tensor_group(layout.tp) as group:
        tp = TensorParallel(group, sequence=layout.sequence_parallel)
        block, decides = Block(0, shape, Recipe(), tp), SavedTensors(layout.recompute.parts)
        block.save_with(decides)
        fill(block, layout.tp, torch.float32)
        x = torch.ones(SEQ // tp.sequence_parts, layout.mb, shape.hidden, requires_grad=True)
        before = {y.untyped_storage().data_ptr() for y in (x, *block.parameters())}

        def made(y: Tensor) -> bool:
            return y.is_floating_point() and y.untyped_storage().data_ptr() not in before

        with LiveBytes(made) as live, decides.watching():
            out = block(x, micro_batch(layout.mb))
        found = live.now - out.nbytes + x.nbytes
    ledger = block_saved(shape, 0, SEQ, 4, OURS)
    assert found == predicted(ledger, layout)


def test_llama_blocks_in_bf16_keep_what_the_ledger_says():
    with tensor_group(1) as group:
        block = Block(0, LLAMA, Recipe(), TensorParallel(group, sequence=False))
        fill(block, 1, torch.bfloat16)
        x = torch.ones(SEQ, 2, LLAMA.hidden, dtype=torch.bfloat16, requires_grad=True)
        found = measured(lambda: block(x, micro_batch(2)), block)
    ledger = block_saved(LLAMA, 0, SEQ, 2, OURS)
    assert found == predicted(ledger, Layout(mb=2))


@pytest.mark.parametrize("recipe", ["fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("line", ["mb=2", "tp=2 mb=2", "tp=2 sp=off mb=2 recompute=selective"])
def test_a_block_keeps_inputs_of_products_in_few_bits(line: str, recipe: str):
    layout = Layout.parse(f"{line} precision={recipe}")
    with fake_mesh(layout) as mesh:
        arithmetic = choose(Dtypes.named(recipe, torch.device("cpu")), mesh)
        tp = TensorParallel(
            mesh.tensor, sequence=layout.sequence_parallel, products=arithmetic.products
        )
        block = Block(0, WIDE, Recipe(), tp)
        block.save_with(SavedTensors(layout.recompute.parts))
        fill(block, layout.tp, torch.bfloat16)
        arithmetic.history.take_up(1)  # past the step that calibrates
        size = (SEQ // tp.sequence_parts, layout.mb, WIDE.hidden)
        x = torch.ones(size, dtype=torch.bfloat16, requires_grad=True)
        found = measured(lambda: block(x, micro_batch(layout.mb)), block)
    ledger = as_operands(block_saved(WIDE, 0, SEQ, 2, OURS), layout.precision)
    assert found == predicted(tuple(ledger), layout)


@pytest.mark.parametrize("line", ["mb=2", "tp=2 mb=2", "tp=4 sp=off mb=2"])
def test_the_head_keeps_what_the_ledger_says(line: str):
    layout = Layout.parse(line)
    with tensor_group(layout.tp) as group:
        tp = TensorParallel(group, sequence=layout.sequence_parallel)
        head = Head(LLAMA, Recipe(), tp, tied=None)
        fill(head, layout.tp, torch.float32)
        x = torch.ones(SEQ // tp.sequence_parts, layout.mb, LLAMA.hidden, requires_grad=True)
        found = measured(lambda: head(x, micro_batch(layout.mb)), head)
    ledger = head_saved(LLAMA, 4, OURS)
    assert found == pytest.approx(predicted(ledger, layout), abs=64)


@pytest.mark.parametrize("line", ["mb=2", "mb=2 recompute=full:2", "mb=2 logits=16 recompute=mlp"])
def test_with_activations_off_the_device_nothing_waits_there_for_backward(line: str):
    run = default_case(Layout.parse(f"{line} offload=activations precision=fp32")).run
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    batch = default_case(run.layout).stream().batch(0, engine.positions())
    (stage,) = engine.executor.stages.values()
    state = {unit.unit.weights.untyped_storage().data_ptr() for unit in engine.units}

    def on_device(x: Tensor) -> bool:
        there = x.untyped_storage().data_ptr() not in state
        return x.is_floating_point() and there and not stage.saved.host.memory.owns(x)

    with LiveBytes(on_device) as live:
        loss = stage.forward(None, micro_batches(engine, 0, batch)[0])
    assert live.now == loss.nbytes
    assert stage.saved.host.memory.bytes > run.recipe.seq * 2 * run.model.hidden * 4
