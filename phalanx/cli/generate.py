"""Let a trained model continue texts.

phalanx generate runs/demo --prompt "def "
phalanx generate out/demo --prompt "Once" --tokens 200 --temperature 0.8 --top-p 0.9
phalanx generate runs/demo --prompts prompts.txt --layout "tp=2 pp=2"

MODEL is a run, one of its checkpoints, or a folder that Transformers loads.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.core.errors import UsageError

SCHEMA = 1


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run, a checkpoint, or a folder of weights")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    add("--samples", type=int, default=1, metavar="N", help="texts for each prompt")
    add("--tokens", type=int, default=128, metavar="N", help="to add at most (default 128)")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest (default 0.7)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share P")
    add("--seed", type=int, default=0)
    add("--layout", default="dp=1", help="how the model is cut: 'tp=2 pp=2' (default: not)")
    add("--tokenizer", default="", metavar="DIR", help="instead of the model's own")
    add("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Write, and print what was written.

    Raises:
        UsageError: there is no prompt, or an option lies outside its range.
    """
    from phalanx.api.generation import generate

    prompts = _prompts(args)
    _require_ranges(args)
    found = generate(
        args.model,
        [prompt for prompt in prompts for _ in range(args.samples)],
        args.tokens,
        layout=args.layout,
        tokenizer=args.tokenizer,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    if args.json:
        document = {"schema": SCHEMA, "texts": [one.to_dict() for one in found]}
        print(json.dumps(document))
        return 0
    for number, one in enumerate(found):
        if number:
            print("---")
        print(one.prompt + one.text)
    return 0


def _prompts(args: Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts is not None:
        prompts += args.prompts.read_text(encoding="utf-8").splitlines()
    if not prompts:
        raise UsageError("there is nothing to continue; give --prompt TEXT")
    return prompts


def _require_ranges(args: Namespace) -> None:
    for name, value in (("--tokens", args.tokens), ("--samples", args.samples)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it is at least 1")
    for name, number in (("--temperature", args.temperature), ("--top-k", args.top_k)):
        if not number >= 0:
            raise UsageError(f"{name} is {number}; it is at least 0")
    if not 0 < args.top_p <= 1:
        raise UsageError(f"--top-p is {args.top_p}; it lies in (0, 1]")
