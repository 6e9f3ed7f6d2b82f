"""Profiles of frameworks: what changes time and memory, and not the mathematics."""

from dataclasses import dataclass, replace

from phalanx.cost.saved import EAGER, MEGATRON, OURS, PAPER, Stack

# Norm 4 and clipping 8; gradient 4, master and two moments read and written 24, weight written 2.
FUSED_ADAMW = 4 + 8 + 4 + 24 + 2
# The same after a copy of the gradients to fp32, unscaling, and a copy of the weights back.
FP16_ADAMW = FUSED_ADAMW + 6 + 8 + 4
# Norm and clipping, and eight operators one after the other (decay, two means, square, root,
# quotient, sum, weight) that each read two and write one.
EAGER_ADAMW = 4 + 8 + 2 + 8 * 12

# Share by which what PyTorch's allocator reserves lies over what is allocated: 40 GB beside 36.6
# in Megatron-Bridge's page on activation recomputation.
RESERVED_TOO_MUCH = 0.09
# In eager programs, whose streams keep their blocks apart: an assumption.
RESERVED_BY_STREAMS = 0.15


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The profile of a framework.

    Attributes:
        name: of the framework.
        stack: what it keeps in memory.
        fused_attention: scores never leave the chip, and only half of them are computed.
        dropout: after embeddings, scores, attention and MLP.
        fused_passes: norms, activations and the optimizer read and write every tensor once;
            otherwise one operator of the framework after the other does.
        stops_early: recomputation ends at the last tensor that backward needs, so that the last
            product of a block is not repeated.
        first_attention: fused attention of the first generation, which reaches less.
        hides_sums: in backward, the messages of tp go on beside products that do not need them.
        hides_gradients: gradients are reduced while backward goes on.
        hides_weights: weights are gathered while forward goes on.
        pipeline_outside: neighbouring ranks differ in dp before they differ in pp.
        accumulate: bytes read and written per parameter to add up a gradient.
        fused_accumulation: within the product that makes it, while arithmetic goes on.
        loss_bytes: moved per logit in forward and in backward of the cross-entropy.
        optimizer_bytes: moved per parameter by a step of AdamW, norm and clipping included.
        graphs: kernels are launched from recorded graphs, without waiting for the host.
        gradient: bytes of an element of what is reduced.
        sends_as_ledger: it sends what the axes declare, message by message; else what
            `cost/messages/frameworks.py` makes of that.
        sends_token_once: a token travels once to every rank that has one of its experts, and once
            to every other domain.
        hides_experts: what goes to experts and back does so beside another micro-batch.
        groups_experts: an operator for each expert multiplies, without one that picks its rows.
        fuses_routing: one kernel chooses experts, and one each sorts tokens and puts them back.
        captured: parts of a block that recorded graphs of kernels start; see `SCOPES`.
        balances_context: ranks along cp hold parts of a sequence with equal numbers of scores; else
            in a row, so that the last one computes nearly twice the mean.
        bucket: bytes of gradients that are reduced by one message; 0 is all that a rank has.
        learns: weights have gradients; else only small adapters beside them do (LoRA).
    """

    name: str
    stack: Stack
    fused_attention: bool = True
    dropout: bool = False
    fused_passes: bool = True
    stops_early: bool = False
    first_attention: bool = False
    hides_sums: bool = True
    hides_gradients: bool = True
    hides_weights: bool = True
    pipeline_outside: bool = False
    accumulate: float = 8.0
    fused_accumulation: bool = False
    loss_bytes: tuple[float, float] = (14.0, 22.0)
    optimizer_bytes: float = EAGER_ADAMW
    graphs: bool = False
    gradient: float = 4.0
    sends_as_ledger: bool = False
    sends_token_once: bool = False
    hides_experts: bool = False
    groups_experts: bool = False
    fuses_routing: bool = False
    captured: frozenset[str] = frozenset()
    balances_context: bool = True
    bucket: float = 0.0
    learns: bool = True


# Parts of a block that a graph of kernels may hold: operators of attention, of an MLP, of the
# choice of experts, of what prepares their tokens, and those that work on these.
SCOPES = ("attention", "mlp", "router", "dispatch", "experts")

PHALANX = Framework(
    name="phalanx",
    stack=OURS,
    fused_passes=False,
    stops_early=True,
    hides_sums=False,
    sends_as_ledger=True,
)
MEGATRON_CORE = Framework(
    name="Megatron Core",
    stack=replace(MEGATRON, fragmentation=RESERVED_TOO_MUCH),
    pipeline_outside=True,
    fused_accumulation=True,
    loss_bytes=(10.0, 8.0),
    optimizer_bytes=FUSED_ADAMW,
    groups_experts=True,
)
# Eager PyTorch with tp and pp, which sums 16-bit gradients up in fp32 beside them
EAGER_3D = replace(
    MEGATRON_CORE,
    name="eager 3D",
    bucket=25e6,  # as DistributedDataParallel by default
    stack=replace(
        MEGATRON_CORE.stack,
        gradient_bytes=6.0,
        keeps_gates=True,
        fragmentation=RESERVED_BY_STREAMS,
    ),
)
# The performance recipes of Megatron-Bridge in FP8, which reduce gradients in 16 bits
MEGATRON_FP8 = replace(
    MEGATRON_CORE,
    name="Megatron Core in FP8",
    stack=replace(MEGATRON_CORE.stack, gradient_bytes=2.0),
    accumulate=4.0,
    gradient=2.0,
)
# PyTorch FSDP in eager mode, 2023: one operator after the other, FlashAttention of that year
EAGER_FSDP = Framework(
    name="PyTorch FSDP",
    stack=replace(EAGER, fragmentation=RESERVED_BY_STREAMS),
    fused_passes=False,
    stops_early=True,
    first_attention=True,
    pipeline_outside=True,
)
# Its successor, with FlashAttention-2 and an optimizer whose passes go over all tensors at once
EAGER_FSDP2 = replace(
    EAGER_FSDP,
    name="PyTorch FSDP2",
    first_attention=False,
    optimizer_bytes=FUSED_ADAMW,
    balances_context=False,
)
# Programs that a compiler sees whole: fused passes, messages beside products, no host to wait for
XLA = replace(MEGATRON_CORE, name="XLA", stack=MEGATRON, graphs=True)
# Megatron-LM until 2022: scores in memory, dropout, one all-reduce of 16-bit gradients at the end
MEGATRON_2021 = Framework(
    name="Megatron-LM 2021",
    stack=replace(PAPER, fragmentation=0.05),
    fused_attention=False,
    dropout=True,
    hides_gradients=False,
    hides_weights=False,
    pipeline_outside=True,
    accumulate=4.0,
    fused_accumulation=True,
    loss_bytes=(14.0, 10.0),
    optimizer_bytes=FP16_ADAMW,
    gradient=2.0,
)

FRAMEWORKS = {
    "phalanx": PHALANX,
    "megatron": MEGATRON_CORE,
    "megatron-fp8": MEGATRON_FP8,
    "fsdp": EAGER_FSDP,
    "fsdp2": EAGER_FSDP2,
    "xla": XLA,
    "megatron-2021": MEGATRON_2021,
}
