"""What training programs do differently that changes time and memory, not the mathematics."""

from dataclasses import dataclass

from phalanx.cost.saved import MEGATRON, OURS, PAPER, Stack


@dataclass(frozen=True, kw_only=True)
class Practice:
    """The habits of a program.

    Attributes:
        name: of the practice.
        stack: what it keeps in memory.
        fused_attention: scores never leave the chip, and only half of them are computed.
        dropout: after embeddings, scores, attention and MLP.
        hides_gradients: gradients are reduced while backward goes on.
        hides_weights: weights are gathered while forward goes on.
        pipeline_outside: neighbouring ranks differ in dp before they differ in pp.
        accumulate: bytes read and written per parameter to add up a gradient.
        gradient: bytes of an element of what is reduced.
    """

    name: str
    stack: Stack
    fused_attention: bool = True
    dropout: bool = False
    hides_gradients: bool = True
    hides_weights: bool = True
    pipeline_outside: bool = False
    accumulate: float = 8.0
    gradient: float = 4.0


PHALANX = Practice(name="phalanx", stack=OURS)
MEGATRON_CORE = Practice(name="Megatron Core", stack=MEGATRON, pipeline_outside=True)
# Megatron-LM until 2022: scores in memory, dropout, one all-reduce of 16-bit gradients at the end
MEGATRON_2021 = Practice(
    name="Megatron-LM 2021",
    stack=PAPER,
    fused_attention=False,
    dropout=True,
    hides_gradients=False,
    hides_weights=False,
    pipeline_outside=True,
    accumulate=6.0,
    gradient=2.0,
)
