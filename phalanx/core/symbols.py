"""The letters that formulas use, defined once; `docs/symbols.md` is printed from here.

Letters stand only in formulas (`cost`, `schedules`, `core/model.py`); everywhere else things
have names.
"""

from typing import NamedTuple


class Symbol(NamedTuple):
    """One letter of the legend."""

    letter: str
    name: str
    meaning: str


LEGEND = (
    Symbol("b", "mb", "sequences in one micro-batch"),
    Symbol("s", "seq", "tokens in one sequence"),
    Symbol("h", "hidden", "width of the residual stream"),
    Symbol("a", "heads", "query heads"),
    Symbol("g", "kv_heads", "key and value heads"),
    Symbol("d", "head_dim", "width of one head; beside t, p and c it is dp"),
    Symbol("f", "ffn", "width of the MLP, or of one expert"),
    Symbol("L", "layers", "transformer blocks"),
    Symbol("V", "vocab", "token ids"),
    Symbol("E", "experts", "routed experts of a layer"),
    Symbol("K", "top_k", "routed experts that one token visits"),
    Symbol("N", "", "parameters that one token is multiplied with, the input embedding left out"),
    Symbol("t", "tp", "tensor-parallel degree"),
    Symbol("p", "pp", "pipeline ranks; in a collective, the ranks of the group"),
    Symbol("c", "cp", "context-parallel degree"),
    Symbol("e", "ep", "expert-parallel degree"),
    Symbol("m", "", "micro-batches per step and rank"),
    Symbol("v", "v", "chunks of layers per pipeline rank"),
    Symbol("F", "", "forward of one micro-batch through a stage, and how long it takes"),
    Symbol("B", "", "whole backward, I + W; a bandwidth where it stands under bytes"),
    Symbol("I", "", "input-gradient half of backward, which the previous stage waits for"),
    Symbol("W", "", "weight-gradient half of backward, which only the optimizer waits for"),
    Symbol("S", "", "bytes of the full vector of a collective"),
    Symbol("α", "latency", "seconds before the first byte of a message arrives"),
    Symbol("C", "peak", "FLOP/s of one accelerator"),
)

CLASHES = (
    "Qi et al. 2024 (arXiv:2401.10241) write B for the input gradient alone; here that is I, "
    "as in torch.distributed.pipelining.",
    "Korthikanti et al. 2022 (arXiv:2205.05198) write v for the vocabulary; here that is V.",
    "The scaling book writes D, F, B, X, Y, Z for hidden, ffn, tokens per step, dp, tp and ep, "
    "and counts shared experts in E and k; its formulas in `cost/roofline.py` are in our letters "
    "but for T, tokens per step, and ridge, its α = C/W.",
)


def to_markdown() -> str:
    """The legend as the page `docs/symbols.md`."""
    rows = [f"| {s.letter} | {f'`{s.name}`' if s.name else ''} | {s.meaning} |" for s in LEGEND]
    lines = [
        "# Symbols",
        "",
        "Letters in formulas, and what they are called elsewhere in the code.",
        "Written by `python tools/pages.py`; edit `phalanx/core/symbols.py`.",
        "",
        "| letter | name | meaning |",
        "|---|---|---|",
        *rows,
        "",
        "Where papers clash:",
        "",
        *(f"* {clash}" for clash in CLASHES),
    ]
    return "\n".join(lines) + "\n"
