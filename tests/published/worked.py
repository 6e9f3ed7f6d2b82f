"""The functions that answer the worked numbers, by name.

Nominal sizes (70e9 parameters, 990e12 FLOP/s) are the documents' own; shapes come from the
catalog. Two documents round the same peak to 989 and to 990 TFLOP/s, so it is written out here.
"""

from collections.abc import Callable

from volumes import tensor_layer_bytes

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.cost.activations import linear_term_bytes, paper_layer_bytes
from phalanx.cost.clocks import (
    Axes,
    estimated_params,
    expert_clocks,
    expert_width,
    matmul_output_bytes,
    mixed_best_dp,
    mixed_floor,
    mixed_ratio,
    pipeline_hops,
    seconds_for,
    share_from_rate,
    stack_params,
    tensor_width,
)
from phalanx.cost.collectives import Level, LinkRate, bytes_sent, gather_bandwidth, ring_seconds
from phalanx.cost.flops import rate_from_share
from phalanx.cost.roofline import (
    LayerSizes,
    SwitchedFabric,
    block_of,
    domain_weights_floor,
    tensor_limit,
    weights_floor,
)
from phalanx.cost.state import BOOK_ADAM, MIXED_ADAM, largest_model, sharded
from phalanx.schedules.layouts import layers_of_stages
from phalanx.schedules.registry import find_schedule

Value = float | list[float]

V5P = load.accelerator("tpu-v5p")
V5P_PEAK = V5P.peak("bf16")
ICI = 2 * V5P.domain.link.bandwidth  # both links of one axis
RIDGE = V5P_PEAK / ICI
DCN = V5P.network.bandwidth

H100_PEAK, H800_PEAK, B200_PEAK = 990e12, 990e12, 2250e12
H100 = SwitchedFabric(8, 450e9, 400e9)
H800 = SwitchedFabric(8, 200e9, 400e9)
B200 = SwitchedFabric(8, 900e9, 400e9)
GB200 = SwitchedFabric(72, 900e9, 3600e9)
NODE, OUT = H100_PEAK / H100.local, H100_PEAK / H100.egress

LLAMA_13B = load.model("llama-2-13b")
LLAMA_8B = load.model("llama-3-8b")
LLAMA_70B = load.model("llama-3-70b")
LLAMA_405B = load.model("llama-3.1-405b")
DEEPSEEK = load.model("deepseek-v3")
GEMMA = load.model("gemma-7b")
F_MIXED = 32768

N70, N405 = 70e9, 405e9
PEAK_989 = 989e12
NVLINK, IB, PCIE = 450e9, 50e9, 64e9
GB = 1e9


def step_bytes_70b() -> list[float]:
    """The exercise of the second document: 70B on tp=8 pp=8 dp=8."""
    share = N70 / 64
    z1, z3 = sharded(MIXED_ADAM, 1, 8), sharded(MIXED_ADAM, 3, 8)
    return [
        share * z1.weights / GB,
        share * z1.gradients / GB,
        share * z1.optimizer / GB,
        4e6 / 8,
        float(layers_of_stages(Layout(pp=8), 80)[0]),
        find_schedule("1f1b").bubble_of(8, 32).idle_fraction,
        share * z3.total / GB,
    ]


def beacon_state() -> list[float]:
    """405B on tp=8 pp=16: weights, gradients, optimizer, and the last under ZeRO-1 of 128."""
    share = N405 / 128
    return [
        share * MIXED_ADAM.weights / GB,
        share * MIXED_ADAM.gradients / GB,
        share * MIXED_ADAM.optimizer / GB,
        share * sharded(MIXED_ADAM, 1, 128).optimizer / GB,
    ]


def zero_table(d: int) -> list[float]:
    """GB of a 70B model under ZeRO 0 to 3."""
    return [N70 * sharded(MIXED_ADAM, zero, d).total / GB for zero in range(4)]


def two_domain_gather(G: int) -> float:
    """Bandwidth of a gather over exactly two H100 nodes."""
    return gather_bandwidth((Level(G, H100.local), Level(2, H100.egress)))


def hidden_13b_step() -> float:
    """Bytes per chip of Llama-2 13B, 3M tokens on 4096 chips: state and three checkpoints."""
    return (LLAMA_13B_PARAMS * BOOK_ADAM.total + matmul_output_bytes(LLAMA_13B, 3e6)) / 4096


LLAMA_13B_PARAMS = LLAMA_13B.params() - LLAMA_13B.hidden * (2 * LLAMA_13B.layers + 1)
LAYER_70B = Layout(tp=8, sp=False)
TP_70B = Layout(tp=8)
NO_CUT = Layout()


def _bubble_answers() -> dict[str, Callable[[], Value]]:
    cases = [(16, 16), (16, 64), (16, 256), (8, 8), (8, 32), (8, 64)]
    return {
        f"bubble.p{p}_m{m}": (lambda p=p, m=m: find_schedule("1f1b").bubble_of(p, m).idle_fraction)  # type: ignore[misc]
        for p, m in cases
    }


TPU: dict[str, Callable[[], Value]] = {
    "tpu_v5p.alpha": lambda: weights_floor(RIDGE),
    "tpu_v5p.alpha_3axes": lambda: weights_floor(RIDGE, axes=3),
    "tpu_v5p.pod_tokens": lambda: weights_floor(RIDGE, axes=3) * V5P.domain.size,
    "tpu_v5p.max_params_pureDP": lambda: largest_model(V5P.memory, BOOK_ADAM),
    "fsdp.deepseekv2_chips": lambda: 40e6 / weights_floor(RIDGE, axes=3),
    "fsdp.llama3_70b_chips": lambda: 16e6 / weights_floor(RIDGE, axes=3),
    "fsdp.llama3_70b_days": lambda: seconds_for(15e12, 6 * N70, 18823 * V5P_PEAK, 0.5) / 86400,
    "tp.max_llama3_70b_v5p": lambda: tensor_limit(LLAMA_70B.ffn, RIDGE),
    "tp.max_llama3_70b_v5p_M3": lambda: tensor_limit(LLAMA_70B.ffn, RIDGE, axes=3),
    "tp.F_needed_8way": lambda: tensor_width(RIDGE, 8),
    "tp.F_needed_16way": lambda: tensor_width(RIDGE, 16),
    "tp.max_gemma7b_v5p": lambda: tensor_limit(GEMMA.ffn, RIDGE),
    "tp.max_gemma7b_book": lambda: tensor_limit(2 * GEMMA.ffn, RIDGE),
    "mixed.DP_opt_book_example": lambda: mixed_best_dp(48000, F_MIXED, 64),
    "mixed.floor_F32768_max": lambda: mixed_floor(F_MIXED, RIDGE),
    "mixed.floor_F32768_sum": lambda: mixed_floor(F_MIXED, RIDGE, overlap=False),
    "mixed.ratio_check": lambda: mixed_ratio(99.2 * 64, F_MIXED, 64, RIDGE),
    "mixed.crossover_B_16cube": lambda: 4096 * mixed_floor(F_MIXED, RIDGE, Axes(2, 1)),
    "dcn.alpha": lambda: V5P_PEAK / DCN,
    "q1.ffw": lambda: LLAMA_13B.layers * 3 * LLAMA_13B.hidden * LLAMA_13B.ffn,
    "q1.attn": lambda: LLAMA_13B.layers * 4 * LLAMA_13B.hidden**2,
    "q1.vocab": lambda: 2 * LLAMA_13B.embedding_params(),
    "q1.total": lambda: LLAMA_13B_PARAMS,
    "q2.params_bytes": lambda: LLAMA_13B_PARAMS * BOOK_ADAM.weights,
    "q2.opt_bytes": lambda: LLAMA_13B_PARAMS * BOOK_ADAM.optimizer,
    "q2.state_bytes": lambda: LLAMA_13B_PARAMS * BOOK_ADAM.total,
    "q2.acts_bytes_16M": lambda: matmul_output_bytes(LLAMA_13B, 16e6),
    "q3.slice_hbm": lambda: load.cluster("tpu-v5p:16x16x16").memory,
    "q3.seqs": lambda: 3e6 / 32768,
    "q3.acts_bytes_3M": lambda: matmul_output_bytes(LLAMA_13B, 3e6),
    "q3.total_bytes": lambda: 4096 * hidden_13b_step(),
    "q3.per_device_bytes": hidden_13b_step,
    "q3.fsdp_floor_tokens": lambda: 4096 * weights_floor(RIDGE, axes=3),
    "q3.tokens_per_chip": lambda: 3e6 / 4096,
    "q3.mixed_floor": lambda: mixed_floor(LLAMA_13B.ffn, RIDGE),
    "q3.DP_opt": lambda: mixed_best_dp(3e6, LLAMA_13B.ffn, 4096),
    "q3.step_s_book": lambda: seconds_for(3e6, 6 * 13e9, 4096 * 4.6e14, 0.4),
    "q3.step_s_exact": lambda: seconds_for(3e6, 6 * LLAMA_13B_PARAMS, 4096 * V5P_PEAK, 0.4),
    "q4.1M_per_chip": lambda: 1e6 / 4096,
    "q4.10M_per_chip": lambda: 1e7 / 4096,
}

SIZES: dict[str, Callable[[], Value]] = {
    "P_w.llama2_13b": lambda: estimated_params(block_of(LLAMA_13B), 40),
    "P_w.llama3_8b": lambda: estimated_params(block_of(LLAMA_8B), 32),
    "P_w.llama3_70b": lambda: estimated_params(block_of(LLAMA_70B), 80),
    "P_w.llama3_405b": lambda: estimated_params(block_of(LLAMA_405B), 126),
    "P_w.deepseek_v3": lambda: estimated_params(block_of(DEEPSEEK), 61),
    "P.llama2_13b": lambda: stack_params(block_of(LLAMA_13B), 40),
}

GPU: dict[str, Callable[[], Value]] = {
    "h100.node.alpha": lambda: weights_floor(NODE),
    "h100.out.alpha": lambda: weights_floor(OUT),
    "h800.link_spec.alpha": lambda: weights_floor(H800_PEAK / H800.local),
    "b200.node.alpha": lambda: weights_floor(B200_PEAK / B200.local),
    "b200.out.alpha": lambda: domain_weights_floor(B200_PEAK, B200),
    "gb200.node.alpha": lambda: weights_floor(B200_PEAK / GB200.local),
    "gb200.out.alpha": lambda: weights_floor(B200_PEAK / GB200.egress),
    "gb200.out.floor_max_rule": lambda: domain_weights_floor(B200_PEAK, GB200),
    "h800.link_measured.C_implied": lambda: 4517 * load.accelerator("h800").domain.link.sustained,
    "h100.2domain": lambda: weights_floor(OUT) * (2 - 1) / 2,
    "h100.2domain_max_rule": lambda: weights_floor(H100_PEAK / two_domain_gather(8)),
    "h100.floor_TP16_outer": lambda: domain_weights_floor(H100_PEAK, H100, inner=16),
    "h100.16384gpus_tokens": lambda: 16384 * domain_weights_floor(H100_PEAK, H100),
    "moe.gptoss_floor": lambda: weights_floor(OUT, LayerSizes(2880, 2880, 128, 4).sparsity),
    "moe.dsv3_penalty_routed": lambda: DEEPSEEK.experts / DEEPSEEK.top_k,
    "moe.dsv3_penalty_with_shared": lambda: block_of(DEEPSEEK).sparsity,
    "dsv3.batch_tokens": lambda: 4096 * 15360,
    "dsv3.batch_start": lambda: 4096 * 3072,
    "dsv3.tokens_per_gpu": lambda: 4096 * 15360 / 2048,
    "dsv3.model_parallel": lambda: 64 * 16,
    "llama405.tokens_per_gpu": lambda: 16e6 / 16384,
    "llama405.gpus": lambda: Layout(tp=8, pp=16, dp=128).ranks,
    "h100.tp_max_node_70b": lambda: tensor_limit(LLAMA_70B.ffn, NODE),
    "h100.tp_max_out_70b": lambda: tensor_limit(LLAMA_70B.ffn, OUT),
    "h100.tp_max_2node_70b": lambda: tensor_limit(LLAMA_70B.ffn, OUT) + H100.G,
    "b200.tp_max_node_70b": lambda: tensor_limit(LLAMA_70B.ffn, B200_PEAK / B200.local),
    "ep.dsv3_F_needed_EP64": lambda: expert_width(OUT, 64, 8, 8),
    "ep.F_needed_large": lambda: expert_width(OUT, 10**12, 8, 8),
    "ep.EP16_k8_F_needed": lambda: expert_width(OUT, 16, 8, 8),
    "ep.dsv3_math_over_comms_EP64": lambda: deepseek_experts(64),
    "ep.dsv3_math_over_comms_EP32": lambda: deepseek_experts(32),
    "quiz.70b_min_h100": lambda: N70 * BOOK_ADAM.total / 80e9,
    "quiz.70b_days": lambda: seconds_for(15e12, 6 * N70, 4096 * 990e12, 0.45) / 86400,
    "quiz.70b_8way_GB": lambda: N70 * BOOK_ADAM.total / 8 / GB,
    "quiz.70b_tokens_per_gpu": lambda: 4e6 / 4096,
    "quiz.70b_pp8_alpha": lambda: weights_floor(OUT, p=8),
    "quiz.ag_node_us": lambda: 2 * 1024 * 16384 / H100.local * 1e6,
    "quiz.ag_node_us_exact": lambda: (
        ring_seconds("all_gather", 2 * 1024 * 16384, 8, LinkRate(0.0, H100.local)) * 1e6
    ),
    "net.node_ag": lambda: gather_bandwidth((Level(8, 450e9),)),
    "net.leaf_ag": lambda: gather_bandwidth((Level(8, 450e9), Level(32, 400e9), Level(4, 12.8e12))),
    "net.2node": lambda: gather_bandwidth((Level(1, 450e9), Level(2, 400e9))),
    "pp.hops_p16_m64": lambda: pipeline_hops(16384, 16e6, 16, 64, IB).number,
}


def deepseek_experts(e: int) -> float:
    """Arithmetic over all-to-all of DeepSeek-V3's routed experts, the network side alone."""
    block = LayerSizes(DEEPSEEK.hidden, DEEPSEEK.moe_ffn, DEEPSEEK.experts, DEEPSEEK.top_k)
    unbounded_inside = SwitchedFabric(8, 1e30, H800.egress)
    return expert_clocks(block, 62914560, e, H800_PEAK, unbounded_inside).ratio


ACTIVATIONS: dict[str, Callable[[], Value]] = {
    "act70b.linear": lambda: linear_term_bytes(LLAMA_70B, 8192, 1, 1),
    "act70b.scores": lambda: (
        paper_layer_bytes(LLAMA_70B, NO_CUT, 8192)
        - paper_layer_bytes(LLAMA_70B, Layout(recompute="selective"), 8192)
    ),
    "act70b.layer": lambda: paper_layer_bytes(LLAMA_70B, NO_CUT, 8192),
    "act70b.total": lambda: 80 * paper_layer_bytes(LLAMA_70B, NO_CUT, 8192),
    "act70b.noscore_total": lambda: (
        80 * paper_layer_bytes(LLAMA_70B, Layout(recompute="selective"), 8192)
    ),
    "act70b.tp8": lambda: paper_layer_bytes(LLAMA_70B, LAYER_70B, 8192),
    "act70b.tp8_sp": lambda: paper_layer_bytes(LLAMA_70B, TP_70B, 8192),
    "act70b.tp8_sp_sel": lambda: paper_layer_bytes(
        LLAMA_70B, Layout(tp=8, recompute="selective"), 8192
    ),
    "act8b_mb4.layer": lambda: paper_layer_bytes(LLAMA_8B, Layout(mb=4), 8192),
    "act8b_mb4.noscore_total": lambda: (
        32 * paper_layer_bytes(LLAMA_8B, Layout(mb=4, recompute="selective"), 8192)
    ),
}

SYSTEMS: dict[str, Callable[[], Value]] = {
    "zero.70b.D8": lambda: zero_table(8),
    "zero.70b.D64": lambda: zero_table(64),
    "ring.70b_8_nvlink_s": lambda: ring_seconds("all_reduce", 140e9, 8, LinkRate(0.0, NVLINK)),
    "ring.70b_64_ib_s": lambda: ring_seconds("all_reduce", 140e9, 64, LinkRate(0.0, IB)),
    "tp.allreduce_bytes": lambda: bytes_sent("all_reduce", 2 * 8192 * 8192, 8),
    "tp.layer_bytes": lambda: tensor_layer_bytes(LLAMA_70B, TP_70B, 8192),
    "tp.mb_bytes": lambda: 80 * tensor_layer_bytes(LLAMA_70B, TP_70B, 8192),
    "tp.nvlink_s": lambda: 80 * tensor_layer_bytes(LLAMA_70B, TP_70B, 8192) / NVLINK,
    "tp.pcie_s": lambda: 80 * tensor_layer_bytes(LLAMA_70B, TP_70B, 8192) / PCIE,
    "tp.ib_s": lambda: 80 * tensor_layer_bytes(LLAMA_70B, TP_70B, 8192) / IB,
    "mfu.70b_12k": lambda: share_from_rate(12_000, 6 * N70, 1024 * PEAK_989),
    "mfu.70b_40pct_toks": lambda: rate_from_share(0.4, 6 * N70, 1024 * PEAK_989),
    "mfu.1e12_tokens_days": lambda: seconds_for(1e12, 6 * N70, 1024 * PEAK_989, 0.4) / 86400,
    "llama405.step_s": lambda: seconds_for(16.8e6, 6 * N405, 16384 * 400e12, 1.0),
    "llama3_405b.tokens_per_s": lambda: rate_from_share(1.0, 6 * N405, 16384 * 400e12),
    "llama3_405b.days_15.6T": lambda: seconds_for(15.6e12, 6 * N405, 16384 * 400e12, 1.0) / 86400,
    "llama3_405b.llama3_paper_bubble_interleaved": lambda: (
        find_schedule("interleaved").bubble_of(16, 32, v=8).over_ideal
    ),
    "bubble.naive_1mb_p16": lambda: find_schedule("gpipe").bubble_of(16, 1).idle_fraction,
    "inflight.gpipe_p8_m32": lambda: find_schedule("gpipe").peak_in_flight(8, 32, 1)[0],
    "inflight.1f1b_p8_m32": lambda: find_schedule("1f1b").peak_in_flight(8, 32, 1)[0],
    **_bubble_answers(),
}

BEACON: dict[str, Callable[[], Value]] = {
    "s2.ring_bytes": lambda: bytes_sent("all_reduce", 2 * N405 / 128, 128),
    "s2.ring_s": lambda: ring_seconds("all_reduce", 2 * N405 / 128, 128, LinkRate(0.0, IB)),
    "s2.compute_s": lambda: seconds_for(16e6, 6 * N405, 16384 * 4e14, 1.0),
    "s2.acts_GB": lambda: linear_term_bytes(LLAMA_405B, 125_000, 8, 8) / GB,
    "s2.acts_7.875": lambda: linear_term_bytes(LLAMA_405B, 125_000, 126 / 16, 8) / GB,
    "s2.state": beacon_state,
    "s2.exercise_70b_TP8PP8DP8": step_bytes_70b,
}

ANSWERS = TPU | SIZES | GPU | ACTIVATIONS | SYSTEMS | BEACON
