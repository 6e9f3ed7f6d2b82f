"""Measure how well a trained model foretells a text.

phalanx eval runs/demo book.txt
phalanx eval out/demo tokens --layout tp=2

MODEL is a run, one of its checkpoints, or a folder that Transformers loads. Text and records are
read with the tokenizer of the model.
"""

import json
from argparse import ArgumentParser, Namespace


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run, a checkpoint, or a folder of weights")
    add("data", metavar="DATA", help="a text, records, or tokens")
    add("--seq", type=int, default=0, help="tokens per window (default: as it was trained)")
    add("--batches", type=int, default=0, metavar="N", help="of 8 windows at most (default: all)")
    add("--layout", default="dp=1", help="how the model is cut: 'tp=2 pp=2' (default: not)")
    add("--token-dtype", default="auto", help="of bare ids in a .bin file")
    add("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Measure, and print the loss, the perplexity and the bits per byte."""
    from phalanx.api.generation import evaluate

    found = evaluate(
        args.model,
        args.data,
        layout=args.layout,
        seq=args.seq,
        batches=args.batches,
        keys={"token_dtype": args.token_dtype},
    )
    if args.json:
        print(json.dumps(found.to_dict()))
        return 0
    bits = found.bits_per_byte
    print(
        f"{found.corpus}: {found.nats:.4f} nats per token over {found.tokens:,} tokens, "
        f"perplexity {found.perplexity:,.2f}"
        + ("" if bits is None else f", {bits:.4f} bits per byte")
    )
    return 0
