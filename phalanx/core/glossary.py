"""The words that code, messages and pages use, one meaning each; `docs/glossary.md` is printed.

Where the field has a word, it is that word. Letters of formulas have a legend of their own,
`phalanx/core/symbols.py`.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """One word of the legend."""

    word: str
    meaning: str


GLOSSARY = (
    Entry("accelerator", "one device: a GPU, a TPU chip, or this machine's CPU"),
    Entry("action", "one unit of work of a schedule: stage, kind and micro-batch, as in 2F0"),
    Entry("activation", "what a forward keeps for its backward"),
    Entry("all-gather", "each rank of a group holds a part; afterwards all hold the whole"),
    Entry("all-reduce", "each rank holds a whole vector; afterwards all hold the sum"),
    Entry("all-to-all", "each rank sends another part to each other rank of the group"),
    Entry("axis", "one direction of the mesh of ranks: data, tensor, context, pipeline, expert"),
    Entry("batch", "sequences of one step, over all ranks"),
    Entry("bubble", "time in which a pipeline rank waits: over the ideal, or over all time"),
    Entry("candidate", "a layout that a search prices"),
    Entry("capacity", "of an expert: visits that it takes; of a device: bytes of its memory"),
    Entry("chunk", "one of the v stages that a pipeline rank holds"),
    Entry("collective", "a message in which every rank of a group takes part"),
    Entry("context parallelism", "cp: ranks share each sequence and meet in attention"),
    Entry("convention", "what MFU counts as needed FLOP, and which peak it is a share of"),
    Entry("data parallelism", "dp: ranks see other sequences and sum their gradients"),
    Entry("dim", "one direction of a tensor; see axis for ranks"),
    Entry(
        "dispatch", "the all-to-all that brings tokens to their experts; combine brings them back"
    ),
    Entry("domain", "accelerators joined by the fast fabric, such as the 8 of a machine"),
    Entry("expert parallelism", "ep: ranks of dp x cp divide the experts of a layer among them"),
    Entry("exposed", "seconds of a message in which a rank stands still for it"),
    Entry("FLOP", "floating-point operations; FLOP/s is a rate of them"),
    Entry("framework", "the program whose ways of fusing, overlapping and keeping are priced"),
    Entry("goodput", "share of the time of a whole training that moved it forward"),
    Entry("gradient accumulation", "several micro-batches, one after another, before one update"),
    Entry("HFU", "hardware FLOP utilisation: executed FLOP, recomputation included, over the peak"),
    Entry("hidden", "width of the residual stream; of a message: seconds behind computation"),
    Entry("hop", "one send between neighbouring pipeline stages"),
    Entry("HSDP", "sharding within groups of dp ranks, replicas between them: shard below dp"),
    Entry("in flight", "micro-batches whose forward is done and whose backward is not"),
    Entry("input gradient", "the half of backward that the previous stage waits for; I"),
    Entry("kv head", "a head of keys and values, shared by several query heads"),
    Entry("layout", "one line that says how a step is cut: degrees, ZeRO stage, schedule, ..."),
    Entry("ledger", "what a rank really sent in a step, message by message"),
    Entry("master weights", "fp32 copies of 16-bit weights, which the optimizer moves"),
    Entry("mesh", "the ranks, arranged along the axes"),
    Entry("MFU", "model FLOP utilisation: needed FLOP, recomputation left out, over the peak"),
    Entry("micro-batch", "the sequences of one pass of a rank"),
    Entry("mixture of experts", "a block of several MLPs of which each token visits a few"),
    Entry("model", "the sizes of a transformer; a catalog name, or the table [model]"),
    Entry("offload", "what leaves the device between its uses, for the host or for files"),
    Entry(
        "optimistic update",
        "weights move before the global norm is known, and roll back if it says so",
    ),
    Entry("oracle", "one device that sees the whole batch; every layout must take its update"),
    Entry("peak", "of bytes: the worst moment of a step; of FLOP/s: what the data sheet promises"),
    Entry(
        "pipeline parallelism", "pp: ranks hold other layers, and micro-batches pass through them"
    ),
    Entry("plan", "a search over layouts, and the reasons for what it found"),
    Entry("purpose", "what a message is for; the same word in the plan and in the run"),
    Entry("rank", "one process, and the accelerator that it has"),
    Entry("recomputation", "forward done again in backward, so that less is kept"),
    Entry("reduce-scatter", "like all-reduce, but each rank keeps only its part of the sum"),
    Entry("refusal", "why something cannot be cut or trained so, with what works"),
    Entry("replica", "one whole copy of the model"),
    Entry("ring attention", "keys and values of other cp ranks travel around, one part at a time"),
    Entry("schedule", "for each pipeline rank the order of its actions; no clock in it"),
    Entry("sequence parallelism", "sp: what tp leaves whole is split along the sequence"),
    Entry("shard", "a part that one rank holds, of what several ranks hold together"),
    Entry("stage", "a slice of layers; p v of them make the model"),
    Entry("step", "one update of the optimizer"),
    Entry("straggler", "the rank that all others wait for"),
    Entry("tensor parallelism", "tp: ranks hold a part of every matrix"),
    Entry("term", "a named part of the seconds of a step; terms add up to the step"),
    Entry(
        "traffic", "messages with their price: bytes that one rank sends, seconds, and how exposed"
    ),
    Entry("unit", "the parameters of one block, as one flat vector that is sharded together"),
    Entry("verdict", "what the oracle found: how far a layout is from one device"),
    Entry("warm-up", "steps in which the learning rate rises; of a pipeline: its first forwards"),
    Entry("weight gradient", "the half of backward that only the optimizer waits for; W"),
    Entry("ZeRO", "dp ranks shard optimizer state (1), gradients too (2), weights too (3)"),
)


def to_markdown() -> str:
    """The legend as the page `docs/glossary.md`."""
    return "\n".join(
        [
            "# Glossary",
            "",
            "What the words mean, here and in the field; `phalanx help WORD` says the same.",
            "Written by `python tools/pages.py`; edit `phalanx/core/glossary.py`.",
            "",
            "| word | meaning |",
            "|---|---|",
            *(f"| {word} | {meaning} |" for word, meaning in GLOSSARY),
            "",
        ]
    )
