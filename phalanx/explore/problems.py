"""The worked problems of the three documents: givens pinned, an answer graded with the reason.

Every right answer is computed by the function that the package uses, from the givens alone; the state
of the page does not matter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.catalog import load
from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.units import parse_bytes, parse_count
from phalanx.cost.activations import paper_layer_bytes
from phalanx.cost.clocks import (
    TWO_AND_ONE,
    matmul_output_bytes,
    mixed_best_dp,
    mixed_floor,
    seconds_for,
    share_from_rate,
    tensor_width,
)
from phalanx.cost.collectives import LinkRate, bytes_sent, ring_seconds
from phalanx.cost.flops import rate_from_share
from phalanx.cost.roofline import tensor_limit, weights_floor
from phalanx.cost.state import BOOK_ADAM, MIXED_ADAM, largest_model, sharded
from phalanx.explore.records import BEACON, BOOK, SYSTEMS, Verdict, show
from phalanx.schedules.registry import find_schedule

TOLERANCE = 0.03
V5P = load.accelerator("tpu-v5p")
RIDGE = V5P.peak("bf16") / (2 * V5P.domain.link.bandwidth)
LLAMA_13B, LLAMA_70B = load.model("llama-2-13b"), load.model("llama-3.1-70b")
PARAMS = LLAMA_13B.params() - LLAMA_13B.hidden * (2 * LLAMA_13B.layers + 1)  # without norms
CHIPS, TOKENS = 4096, 3e6
N70, N405, PEAK = 70e9, 405e9, 989e12
FACTORS = (
    (2.0, "twice as much"), (0.5, "half as much"), (3.0, "three times as much"), (1 / 3, "a third"),
    (8.0, "eight times as much (bits for bytes?)"), (1 / 8, "an eighth (bytes for bits?)"),
    (1e3, "a thousand times as much"), (1e-3, "a thousandth"), (1e6, "a million times as much"),
    (1e-6, "a millionth"), (100.0, "a hundred times as much (a share, not per cent)"),
    (0.01, "a hundredth (write 0.4 or 40 %)"),
)  # fmt: skip


class Problem(NamedTuple):
    """One question with its answer.

    Attributes:
        id: in the page.
        source: document and section.
        question: with its givens, which are pinned.
        unit: of the answer; "yes or no" for a decision.
        answer: computes it.
        way: how, step by step.
        slips: wrong answers that are often given, and why they are wrong.
    """

    id: str
    source: str
    question: str
    unit: str
    answer: Callable[[], float]
    way: str
    slips: tuple[tuple[Callable[[], float], str], ...] = ()


class Grade(NamedTuple):
    """What an answer is worth."""

    verdict: Verdict
    text: str
    reason: str


def _fsdp_floor() -> float:
    return weights_floor(RIDGE, axes=3)


PROBLEMS: tuple[Problem, ...] = (
    Problem(
        "q1", f"{BOOK}, question 1",
        "LLaMA-2 13B has L = 40, D = 5,120, F = 13,824 (three matrices to an MLP), 40 heads of 128 for queries, keys and values, and V = 32,000 with separate embedding and head. How many parameters is that?",
        "params", lambda: float(PARAMS),
        "MLPs 3·D·F·L = 8.49B; attention 4·D·D·L = 4.19B; vocabulary 2·V·D = 0.33B; together 13.0B.",
        ((lambda: float(PARAMS - LLAMA_13B.layers * LLAMA_13B.hidden * LLAMA_13B.ffn), "the gated MLP has three matrices, not two"),),
    ),
    Problem(
        "q2p", f"{BOOK}, question 2", "How many bytes are the parameters of LLaMA-2 13B in bf16?", "bytes",
        lambda: float(PARAMS * BOOK_ADAM.weights), "2 bytes · 13.0B = 26 GB.",
        ((lambda: float(PARAMS * 4), "bf16 has two bytes, not four"),),
    ),
    Problem(
        "q2o", f"{BOOK}, question 2", "How many bytes is its optimizer state: Adam's two moments in fp32?", "bytes",
        lambda: float(PARAMS * BOOK_ADAM.optimizer), "(4 + 4) bytes · 13.0B = 104 GB.",
        ((lambda: float(PARAMS * 12), "that counts an fp32 master copy too; here there is none"),
         (lambda: float(PARAMS * 4), "Adam has two moments")),
    ),
    Problem(
        "q2a", f"{BOOK}, question 2",
        "A step has 16M tokens, and each layer checkpoints the outputs of its three big matrices (F, F and D wide) in bf16. How many bytes of activations is that?",
        "bytes", lambda: matmul_output_bytes(LLAMA_13B, 16e6),
        "2 bytes · L · T · (2·F + D) = 2 · 40 · 16e6 · 32,768 = 42 TB: far more than all the state.",
        ((lambda: 2.0 * 40 * 16e6 * (LLAMA_13B.hidden + LLAMA_13B.ffn), "two of the three outputs are F wide"),),
    ),
    Problem(
        "q3dp", f"{BOOK}, question 3.1",
        "3M tokens in sequences of 32k on a TPU v5p 16×16×16, bf16 weights and fp32 moments: can it be pure data parallelism?",
        "yes or no", lambda: 0.0,
        "The state alone is 10 bytes · 13B = 130 GB, and a chip has 96 GB. Besides, 732 tokens per chip are below the floor of 850.",
    ),
    Problem(
        "q3floor", f"{BOOK}, question 3.2",
        "How many tokens must that step have, for pure FSDP over all three axes of the 4,096 chips to hide its messages?",
        "tokens", lambda: CHIPS * _fsdp_floor(),
        "α = C/W = 459e12 / 180e9 = 2,550; over three axes 850 per chip; · 4,096 = 3.48M, more than the 3M there are.",
        ((lambda: CHIPS * RIDGE, "all three axes of the torus can carry FSDP: divide by 3"),),
    ),
    Problem(
        "q3mem", f"{BOOK}, question 3.2",
        "With pure FSDP, how many bytes does each device hold (state and the three checkpoints per layer)?",
        "bytes", lambda: (PARAMS * float(BOOK_ADAM.total) + matmul_output_bytes(LLAMA_13B, TOKENS)) / CHIPS,
        "(130 GB of state + 7.86 TB of activations) / 4,096 = 1.95 GB.",
        ((lambda: PARAMS * float(BOOK_ADAM.total) / CHIPS, "that is the state alone; activations are more"),),
    ),
    Problem(
        "q3mix", f"{BOOK}, question 3.3",
        "How many tokens per chip does the best mix of FSDP (two axes) and TP (one axis) need?",
        "tokens", lambda: mixed_floor(LLAMA_13B.ffn, RIDGE, TWO_AND_ONE),
        "α² / (M_DP · M_TP · F) = 2,550² / (2 · 13,824) = 235; there are 732, so it hides.",
        ((lambda: mixed_floor(LLAMA_13B.ffn, RIDGE, TWO_AND_ONE, overlap=False), "the two kinds of messages use different axes at once: the edition that adds them up gets four times as much"),),
    ),
    Problem(
        "q3dpopt", f"{BOOK}, question 3.3", "What is the best degree of FSDP, before rounding?", "ranks",
        lambda: mixed_best_dp(TOKENS, LLAMA_13B.ffn, CHIPS),
        "√( B/F · M_DP/M_TP · N ) = √( 3e6/13,824 · 2 · 4,096 ) = 1,333: DP = 1,024 or 2,048, TP = 4 or 2.",
        ((lambda: mixed_best_dp(TOKENS, LLAMA_13B.ffn, CHIPS) / 2**0.5, "FSDP has two axes and TP one: the 2 stays under the root"),),
    ),
    Problem(
        "q3step", f"{BOOK}, question 3.3", "How many seconds does a step take at 40 % MFU (6·N·T, N = 13B)?", "s",
        lambda: seconds_for(TOKENS, 6 * 13e9, CHIPS * V5P.peak("bf16"), 0.4),
        "6 · 3e6 · 13e9 / (4,096 · 459e12 · 0.4) = 0.31 s.",
        ((lambda: seconds_for(TOKENS, 6 * 13e9, CHIPS * V5P.peak("bf16"), 1.0), "that is at the peak; 40 % of it is reached"),),
    ),
    Problem(
        "alpha", f"{BOOK}, Data Parallelism",
        "A TPU v5p does 459 TFLOP/s and sends 180 GB/s along one axis, both ways. How many tokens per chip does data parallelism over one axis need?",
        "tokens", lambda: weights_floor(RIDGE), "C / W_ici = 459e12 / 180e9 = 2,550.",
        ((lambda: weights_floor(RIDGE, axes=3), "that is over three axes"),
         (lambda: 2 * RIDGE, "each axis has two links, one to either side")),
    ),
    Problem(
        "largest", f"{BOOK}, Data Parallelism",
        "How many parameters can pure data parallelism train on a chip of 96 GB, at 10 bytes of state each?", "params",
        lambda: largest_model(V5P.memory, BOOK_ADAM), "96e9 / 10 = 9.6B, without any activation.",
    ),
    Problem(
        "tpmax", f"{BOOK}, Tensor Parallelism",
        "How far can TP go for LLaMA 3 70B (F = 28,672) over one axis of a TPU v5p, before its messages show?", "ranks",
        lambda: tensor_limit(LLAMA_70B.ffn, RIDGE), "F / α = 28,672 / 2,550 = 11.2: 8-way hides, 16-way does not.",
    ),
    Problem(
        "tpwidth", f"{BOOK}, Tensor Parallelism", "How wide must the MLP be for 8-way TP over one axis of a TPU v5p?", "",
        lambda: tensor_width(RIDGE, 8), "8 · α = 8 · 2,550 = 20,400.",
    ),
    Problem(
        "h100", f"{BOOK}, Where the bounds land on this fabric",
        "16,384 H100s (990 TFLOP/s each, nodes of 8 that send 400 GB/s) train a dense model with pure FSDP. How many tokens must a step have?",
        "tokens", lambda: 16384 * weights_floor(990e12 / 400e9),
        "C / W_node = 990e12 / 400e9 = 2,475 per GPU; · 16,384 = 40.6M. Llama 3.1 used 16M, since 16 stages reduce 1/16 of the weights each.",
        ((lambda: 16384 * weights_floor(990e12 / 450e9), "outside a node the 400 GB/s of the node count, not the 450 GB/s of NVLink"),
         (lambda: 16384 * weights_floor(990e12 / 50e9), "a node has 8 network cards: 400 GB/s together")),
    ),
    Problem(
        "state70", f"{SYSTEMS}, Bytes per parameter", "How many bytes of training state has a 70B model (bf16 weights and gradients, fp32 master copy and two moments)?",
        "bytes", lambda: N70 * float(MIXED_ADAM.total), "(2 + 2 + 4 + 4 + 4) bytes · 70e9 = 1.12 TB.",
        ((lambda: N70 * 10, "here there is a gradient and a master copy too"), (lambda: N70 * 12, "that is the optimizer's share alone")),
    ),
    Problem(
        "zero1", f"{SYSTEMS}, ZeRO", "How many bytes of state does each of 64 GPUs hold of that 70B model under ZeRO-1?", "bytes",
        lambda: N70 * float(sharded(MIXED_ADAM, 1, 64).total), "(4 + 12/64) · 70e9 = 293 GB.",
        ((lambda: N70 * float(sharded(MIXED_ADAM, 2, 64).total), "that is ZeRO-2"), (lambda: N70 * float(sharded(MIXED_ADAM, 3, 64).total), "that is ZeRO-3")),
    ),
    Problem(
        "ring", f"{SYSTEMS}, The cost model", "How long does a ring all-reduce of 140 GB over 64 GPUs take, at 50 GB/s one way and without latency?", "s",
        lambda: ring_seconds("all_reduce", 140e9, 64, LinkRate(0.0, 50e9)), "2 · 63/64 · 140e9 / 50e9 = 5.5 s.",
        ((lambda: ring_seconds("all_gather", 140e9, 64, LinkRate(0.0, 50e9)), "an all-reduce is a reduce-scatter and an all-gather: twice"),),
    ),
    Problem(
        "acts", f"{SYSTEMS}, Activation memory", "How many bytes does one layer of Llama 3 70B keep (h = 8,192, 64 heads, s = 8,192, b = 1), with nothing cut and nothing computed again?", "bytes",
        lambda: paper_layer_bytes(LLAMA_70B, Layout(), 8192), "s·b·h·(34 + 5·a·s/h) = 67.1e6 · (34 + 320) = 23.8 GB; nine tenths of it are scores.",
        ((lambda: 34.0 * 8192 * 8192, "that leaves the scores out"),),
    ),
    Problem(
        "bubble", f"{SYSTEMS}, Microbatches and the bubble", "What share of the time is a rank of a 16-stage 1F1B pipeline idle, with 64 micro-batches?", "share",
        lambda: find_schedule("1f1b").bubble_of(16, 64).idle_fraction, "(p − 1)/(m + p − 1) = 15/79 = 19 %.",
        ((lambda: 15 / 64, "that is over the ideal time, (p − 1)/m; the question is about all of the time"),),
    ),
    Problem(
        "inflight", f"{SYSTEMS}, Schedules", "How many micro-batches does the first of 8 stages hold at its peak under 1F1B, with 32 micro-batches?", "",
        lambda: float(find_schedule("1f1b").peak_in_flight(8, 32, 1)[0]), "As many as there are stages: 8. GPipe holds all 32.",
        ((lambda: 32.0, "that is GPipe"),),
    ),
    Problem(
        "mfu", f"{SYSTEMS}, Both directions, worked", "A 70B model trains at 12,000 tokens per second on 1,024 H100s (989 TFLOP/s). What is its MFU, by 6·N?", "share",
        lambda: share_from_rate(12_000, 6 * N70, 1024 * PEAK), "12,000 · 6 · 70e9 / (1,024 · 989e12) = 0.5 %: something is very wrong with that run.",
    ),
    Problem(
        "rate", f"{SYSTEMS}, Both directions, worked", "How many tokens per second would 40 % MFU be?", "tokens",
        lambda: rate_from_share(0.4, 6 * N70, 1024 * PEAK), "0.4 · 1,024 · 989e12 / (6 · 70e9) = 964,510.",
    ),
    Problem(
        "beacon", f"{BEACON}, Data parallelism", "405B parameters are cut 8 × 16 ways, and the bf16 gradients of a share go round a ring of 128. How many bytes does a rank send?", "bytes",
        lambda: float(bytes_sent("all_reduce", 2 * N405 / 128, 128)), "S = 2 · 405e9 / 128 = 6.33 GB; 2 · 127/128 · S = 12.6 GB.",
        ((lambda: float(bytes_sent("all_gather", 2 * N405 / 128, 128)), "an all-reduce sends twice as much as a gather"),),
    ),
    Problem(
        "beaconopt", f"{BEACON}, Beacon's memory", "How many bytes of optimizer does each of those ranks hold under ZeRO-1 over the 128 (12 bytes per parameter)?", "bytes",
        lambda: N405 / 128 * float(sharded(MIXED_ADAM, 1, 128).optimizer), "12 · 405e9 / 128 / 128 = 0.30 GB; unsharded it would be 38 GB.",
        ((lambda: N405 / 128 * float(MIXED_ADAM.optimizer), "ZeRO-1 shares that out over 128 ranks"),),
    ),
    Problem(
        "beaconstep", f"{BEACON}, exercises", "A step of 16M tokens of a 405B model on 16,384 GPUs, at 400 TFLOP/s each: how many seconds, by 6·N?", "s",
        lambda: seconds_for(16e6, 6 * N405, 16384 * 400e12, 1.0), "6 · 405e9 · 16e6 / (16,384 · 400e12) = 5.9 s.",
    ),
)  # fmt: skip
BY_ID = {problem.id: problem for problem in PROBLEMS}


def grade(problem: Problem, text: str) -> Grade:
    """Grade an answer, and say why.

    Args:
        problem: the question.
        text: what somebody typed.
    """
    if problem.unit == "yes or no":
        return _decision(problem, text)
    try:
        given = _read(text, problem.unit)
    except PhalanxError as error:
        return Grade("note", "cannot be read", str(error))
    right = problem.answer()
    if abs(given / right - 1) <= TOLERANCE:
        return Grade("good", "right", f"it is {show(right, problem.unit)}. {problem.way}")
    for wrong, why in problem.slips:
        if abs(given / wrong() - 1) <= TOLERANCE:
            return Grade("bad", "not quite", why)
    for factor, words in FACTORS:
        if abs(given / right / factor - 1) <= TOLERANCE:
            return Grade("bad", "not quite", f"that is {words}")
    return Grade("bad", "not yet", "too large" if given > right else "too small")


def _decision(problem: Problem, text: str) -> Grade:
    said = text.strip().lower()[:1]
    if said not in ("y", "n"):
        return Grade("note", "cannot be read", "answer yes or no")
    if (said == "y") == bool(problem.answer()):
        return Grade("good", "right", problem.way)
    return Grade("bad", "no", "look at the memory of a chip, and at its tokens")


def _read(text: str, unit: str) -> float:
    bare = text.strip()
    if bare.endswith("%"):
        return parse_count(bare[:-1], "the answer") / 100
    if unit == "bytes":
        return parse_bytes(bare.replace("bytes", "").strip(), "the answer")
    for ending in ("seconds", "tokens", "ranks", "sec", "s"):
        bare = bare.removesuffix(ending).strip()
    if unit == "s" and bare.endswith("m"):  # 310ms
        return parse_count(bare[:-1], "the answer") / 1000
    return parse_count(bare, "the answer")


def to_dict(problem: Problem) -> dict[str, Any]:
    """The problem as the page's JSON has it, without its answer.

    Args:
        problem: the question.
    """
    return {
        "id": problem.id,
        "source": problem.source,
        "question": problem.question,
        "unit": problem.unit,
    }
