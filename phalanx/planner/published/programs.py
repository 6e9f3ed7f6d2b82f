"""What program a published run was: its framework profile, and what its columns change in it.

The column `program` names the framework; where it is empty, the device, the precision and ZeRO say
which profile comes nearest. What a public recipe says (`recipe_ref`) counts only where that recipe
is the run (`recipe_match`).
"""

from dataclasses import replace

from phalanx.cost.framework import (
    EAGER_3D,
    EAGER_FSDP,
    EAGER_FSDP2,
    MEGATRON_2021,
    MEGATRON_CORE,
    SCOPES,
    XLA,
    Framework,
)
from phalanx.planner.published.cells import Row, from_recipe
from phalanx.planner.published.row_layout import OVERLAPS_EXPERTS

# By the beginning of the column `program`; MEGATRON_CORE stands for its family of releases.
PROGRAMS = {
    "fsdp1": EAGER_FSDP,
    "fsdp2": EAGER_FSDP2,
    "nanotron": EAGER_3D,
    "maxtext": XLA,
    "google internal": XLA,
    "megatron-bridge": MEGATRON_CORE,
    "nemo": MEGATRON_CORE,
    "megatron-core": MEGATRON_CORE,
}
# What graphs of kernels hold, in the words of Megatron Core's `cuda_graph_scope`.
GRAPHS = {
    "attn": {"attention"},
    "mlp": {"mlp"},
    "moe_router": {"router"},
    "moe_preprocess": {"dispatch"},
    "moe": {"router", "dispatch", "experts"},
    "full_layer": set(SCOPES),
}
HALF = 2  # bytes of a 16-bit number


def framework_of_row(row: Row) -> Framework:
    """The profile of the program of a row, with what the row says of it."""
    found = _with_experts(row, _with_precision(row, _with_overlap(row, _profile(row))))
    return replace(found, learns="lora performance" not in row.get("notes", "").lower())


def _profile(row: Row) -> Framework:
    """By the name of the program, else by what it did.

    TPUs run compiled programs; programs of 2021 trained in fp16, with every score in memory;
    PyTorch's FSDP runs operator by operator; the rest has the fused kernels of Megatron Core.
    """
    program = row.get("program", "").lower()
    for name, profile in PROGRAMS.items():
        if program.startswith(name):
            return profile
    if row["gpu"].lower().startswith("tpu"):
        return XLA
    if "fp16" in row["dtype"].lower():
        return MEGATRON_2021
    if "fp32 gradient accumulation" in row.get("notes", "").lower():
        return EAGER_3D
    sharding = row.get("zero_stage_or_fsdp", "").lower()
    return EAGER_FSDP if "fsdp" in sharding else MEGATRON_CORE


def _with_overlap(row: Row, framework: Framework) -> Framework:
    """What goes on beside what, and what recorded graphs start."""
    graphs = from_recipe(row, "cuda_graphs")
    captured = frozenset[str]().union(*(GRAPHS.get(word, set()) for word in graphs.split("+")))
    whole = graphs == "full_iteration" or "cuda graphs" in row.get("notes", "").lower()
    return replace(
        framework,
        graphs=framework.graphs or whole,
        captured=framework.captured | captured,
        hides_sums=_says_yes(row, "tp_overlap", framework.hides_sums),
        hides_gradients=_says_yes(row, "grad_reduce_overlap", framework.hides_gradients),
        hides_weights=_says_yes(row, "param_gather_overlap", framework.hides_weights),
    )


def _says_yes(row: Row, column: str, silent: bool) -> bool:
    """What a cell says, or what the profile has where it is empty."""
    said = from_recipe(row, column)
    return said.startswith("yes") if said else silent


def _with_precision(row: Row, framework: Framework) -> Framework:
    """Bytes of gradients, moments and master weights."""
    gradient, moments = from_recipe(row, "grad_dtype"), from_recipe(row, "moment_dtype")
    master, stack = from_recipe(row, "master_dtype"), framework.stack
    if gradient in ("bf16", "fp16"):
        stack = replace(stack, gradient_bytes=HALF)
        framework = replace(framework, gradient=HALF, accumulate=2.0 * HALF)
    if moments == "bf16":
        stack = replace(stack, moment_bytes=2.0 * HALF)
    if master == "bf16":
        stack = replace(stack, master_weights=False)
    return replace(framework, stack=stack)


def _with_experts(row: Row, framework: Framework) -> Framework:
    """How tokens come to experts."""
    dispatcher, program = from_recipe(row, "moe_dispatcher"), row.get("program", "").lower()
    if dispatcher in ("hybridep", "deepep") or program == "deepseek internal":
        framework = replace(framework, sends_token_once=True, fuses_routing=True)
    overlap = from_recipe(row, "ep_overlap").startswith("yes")
    dual = row.get("schedule", "").lower().startswith(OVERLAPS_EXPERTS)
    return replace(framework, hides_experts=overlap or dual)
